"""Programs that run as several JAX processes, and `launch`, which starts them."""
