"""Compile the programs of tests with less optimization, which takes less time.

Nearly all of the suite's time is compilation, and what is tested of a program is
mostly the sharding of its values. A test of bits or of a program's text is marked
`optimised`: it is compiled as for users, in a run of its own with `XLA_FLAGS=`.
"""

import os
from collections.abc import Mapping
from importlib import metadata

# JAX's own switch: most of XLA's optimisations are left out. `conftest.py` sets it.
FEW_OPTIMISATIONS = "JAX_DISABLE_MOST_OPTIMIZATIONS"

# XLA's older way to make code for CPUs, in half the time of its newer one.
OLDER_CODE = "--xla_cpu_use_fusion_emitters=false"

# XLA ends the process at an option that it does not know, so the option is set for
# versions of jaxlib that were seen to have it (to 0.10.2; 0.11 has none).
_LAST_KNOWN = (0, 10)


def _jaxlib() -> tuple[int, int]:
    major, minor = metadata.version("jaxlib").split(".")[:2]
    return int(major), int(minor)


def xla_flags() -> str:
    """To be set before JAX looks for devices. A value from outside wins."""
    return OLDER_CODE if _jaxlib() <= _LAST_KNOWN else ""


def makes_older_code() -> bool:
    """Whether programs are not those that users get: they may round otherwise."""
    return OLDER_CODE in os.environ.get("XLA_FLAGS", "")


def for_subprocess(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables without a number of devices: a test has its own."""
    found = dict(variables)
    if found.pop("XLA_FLAGS", None) == OLDER_CODE:
        found["XLA_FLAGS"] = OLDER_CODE
    found.pop("JAX_NUM_CPU_DEVICES", None)
    return found


def as_for_users(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that make programs compile as in tests."""
    settings = {FEW_OPTIMISATIONS, "XLA_FLAGS"}
    return {name: text for name, text in variables.items() if name not in settings}
