"""`flm.jit`: arguments, shardings, programs."""
