"""Whether tests can use host memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import flax_layoutmap as flm


@functools.cache
def can_offload() -> bool:
    """Whether XLA compiles programs with host memory for several CPUs."""
    jax_mesh: Any = flm.DeviceMesh("data=8").jax_mesh
    host = NamedSharding(jax_mesh, PartitionSpec("data"), memory_kind="pinned_host")
    try:
        jax.jit(jnp.zeros, static_argnums=0, out_shardings=host).lower(8).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


WHY_NOT = "XLA of this JAX compiles no program with host memory for several CPUs."
needs_host_memory = pytest.mark.skipif(not can_offload(), reason=WHY_NOT)
