"""Models and optimizers that are created sharded."""
