"""Trees of parameters: their paths, their traces, Flax's internals."""
