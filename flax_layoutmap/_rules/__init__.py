"""Rules, what they match, and the files that hold them."""
