"""Arrays onto devices, and from one layout to another."""
