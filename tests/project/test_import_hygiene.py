"""Modules loaded and backends started by imports and plans, each in a new process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Prints the third-party modules that `code` loads: not those of the standard library,
# nor those that were there before it (an editable install brings its own finder).
LIST_MODULES = """
import json, sys
before = set(sys.modules)
{code}
loaded = set(sys.modules) - before
known = set(sys.stdlib_module_names)
print(json.dumps(sorted(n for n in loaded if n.partition(".")[0] not in known)))
"""

EVERY_NAME = """
import flax_layoutmap as flm
for name in flm.__all__:
    getattr(flm, name)
"""

PLAN = """
import jax
import flax_layoutmap as flm
layout_map = flm.LayoutMap(flm.DeviceMesh.abstract((2, 4), ("data", "model")))
layout_map["kernel"] = (None, "model")
kernel = jax.ShapeDtypeStruct((8, 8), "float32")
resolution = layout_map.resolve({"dense": {"kernel": kernel}})
assert "kernel" in resolution.report()
assert resolution["dense/kernel"].shard_shape == (8, 2)
"""

# JAX refuses this once a backend has started.
BACKEND_HAS_NOT_STARTED = """
import jax
jax.config.update("jax_num_cpu_devices", 3)
assert len(jax.devices()) == 3
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new interpreter that finds the package in this checkout."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def modules_loaded_by(code: str) -> set[str]:
    """Full names of the third-party modules that the code loads."""
    done = run(LIST_MODULES.format(code=code))
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def top_level(names: set[str]) -> set[str]:
    """`{"jax.numpy", "jax"}` → `{"jax"}`."""
    return {name.partition(".")[0] for name in names}


@pytest.fixture(scope="module")
def brought_by_flax() -> set[str]:
    """What a program that uses Flax NNX has loaded anyway."""
    return modules_loaded_by("import jax, flax.nnx")


@pytest.mark.parametrize("use", ["", "dir(flm)", "flm.__all__", "flm.__doc__"])
def test_import_alone_loads_nothing_else(use: str) -> None:
    code = f"import flax_layoutmap as flm; {use}"
    assert modules_loaded_by(code) == {"flax_layoutmap"}


def test_errors_need_neither_jax_nor_flax() -> None:
    loaded = modules_loaded_by("import flax_layoutmap as flm; flm.errors.MeshError")
    assert "flax_layoutmap.errors" in loaded
    assert top_level(loaded) == {"flax_layoutmap"}


def test_control_first_use_is_seen() -> None:
    loaded = modules_loaded_by("import flax_layoutmap as flm; flm.DeviceMesh")
    assert {"flax_layoutmap._core.mesh", "jax", "numpy"} <= loaded


@pytest.mark.parametrize("code", [EVERY_NAME, PLAN], ids=["every name", "plan"])
def test_use_brings_nothing_beyond_flax(code: str, brought_by_flax: set[str]) -> None:
    loaded = modules_loaded_by(code)
    assert top_level(loaded) - top_level(brought_by_flax) == {"flax_layoutmap"}
    # Flax loads a part of Orbax itself; no more of it may come in before first use.
    orbax = {name for name in loaded if name.partition(".")[0] == "orbax"}
    assert orbax <= brought_by_flax


def test_control_more_of_orbax_is_seen(brought_by_flax: set[str]) -> None:
    loaded = modules_loaded_by("import orbax.checkpoint.experimental.v1")
    orbax = {name for name in loaded if name.partition(".")[0] == "orbax"}
    assert orbax - brought_by_flax


@pytest.mark.slow
@pytest.mark.parametrize("code", [EVERY_NAME, PLAN], ids=["every name", "plan"])
def test_no_backend_is_started(code: str) -> None:
    done = run(code + BACKEND_HAS_NOT_STARTED)
    assert done.returncode == 0, done.stderr


def test_control_a_started_backend_is_seen() -> None:
    done = run("import jax; jax.devices()" + BACKEND_HAS_NOT_STARTED)
    assert done.returncode != 0
    assert "jax_num_cpu_devices" in done.stderr
