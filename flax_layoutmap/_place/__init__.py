"""Place arrays on devices, and change their layouts."""
