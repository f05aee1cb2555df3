"""`python -m flax_layoutmap`, the same as the command `flax-layoutmap`."""

from flax_layoutmap._cli import run

if __name__ == "__main__":
    run()
