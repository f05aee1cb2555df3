"""Eight CPU devices for every test, and the meshes that most tests use."""

import os
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before JAX is imported: with an accelerator's plugin installed, a bare JAX probes for
# the hardware. A value from outside wins, and subprocesses inherit it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import quick

os.environ.setdefault("XLA_FLAGS", quick.xla_flags())

import hypothesis
import jax
import numpy as np
import pytest
from multiprocess import launch

import flax_layoutmap as flm
from flax_layoutmap.pod import _ask

jax.config.update("jax_num_cpu_devices", 8)

# Tracing and compiling take their time on a busy machine, which is no failure.
hypothesis.settings.register_profile("project", deadline=None, print_blob=True)
hypothesis.settings.load_profile("project")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Neighbours in one worker, as they share fixtures and compiled programs."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> None:
    """Refuse to run on fewer devices, where placement tests would show nothing."""
    found = jax.devices()
    assert len(found) == 8, (
        f"the tests need 8 devices and JAX found {len(found)} on"
        f" {found[0].platform!r}: run them with JAX_PLATFORMS=cpu"
    )


# A value from outside wins here too: "0" is as for users, in all tests.
_QUICK = os.environ[quick.FEW_OPTIMISATIONS] == "1"
_is_quick = _QUICK


@pytest.fixture(autouse=True)
def optimisations(request: pytest.FixtureRequest) -> None:
    """Tests marked `optimised` get all of XLA's optimisations."""
    global _is_quick
    is_optimised = request.node.get_closest_marker("optimised") is not None
    if is_optimised and quick.makes_older_code():
        pytest.skip(
            "It is about bits or programs as users get them, and this run has XLA's "
            "older code for CPUs: `XLA_FLAGS= pytest -m optimised` runs it."
        )
    wanted = _QUICK and not is_optimised
    if _is_quick != wanted:
        _is_quick = wanted
        jax.config.update("jax_disable_most_optimizations", wanted)
        jax.clear_caches()  # of what was compiled otherwise


@pytest.fixture(scope="session")
def donation_after_reads() -> None:
    """Skip where what NumPy has read does not count as deleted once donated."""
    devices = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    where = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec("x"))
    array = jax.device_put(np.ones(devices.size, np.float32), where)
    np.asarray(array)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    if not array.is_deleted():
        pytest.skip(
            "With this version of JAX (0.11.2, on CPUs) is_deleted() stays False for a "
            "donated array that NumPy has read before, as this test reads it."
        )


@pytest.fixture(scope="session")
def mesh() -> flm.DeviceMesh:
    """Eight devices as two rows ('data') of four ('model')."""
    return flm.DeviceMesh((2, 4), ("data", "model"))


@pytest.fixture(scope="session")
def abstract_mesh() -> flm.DeviceMesh:
    """The same mesh without devices."""
    return flm.DeviceMesh.abstract((2, 4), ("data", "model"))


@pytest.fixture
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """So that nothing waits for a compile of somebody else's, or leaves files there."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_temporary_folder: Path
) -> Callable[[str], None]:
    """Puts another program in the place of the child process of flm.pod."""
    head = """\
        import json, os, resource, runpy, signal, sys, threading, time
        from pathlib import Path
        folder = Path(sys.argv[1])
        request = json.loads((folder / "request.json").read_text())
        def answer(**values):
            (folder / "result.json").write_text(json.dumps(values))
        def written(text):
            for name in ("program", "given"):
                (folder / f"{name}.txt").write_text(text)
        def real():
            runpy.run_path(CHILD, run_name="__main__")
        """
    real = f"CHILD = {str(_ask._CHILD)!r}\n"

    def put(body: str) -> None:
        path = tmp_path / "child.py"
        path.write_text(real + textwrap.dedent(head) + textwrap.dedent(body))
        monkeypatch.setattr(_ask, "_CHILD", path)

    return put


@pytest.fixture
def job_part(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> launch.Part:
    """A part such as "values-2", which is its module and the number of processes.

    It runs with the parts of all other selected tests, whichever worker runs these.
    """
    name, _, processes = request.param.rpartition("-")
    wanted = []
    for item in request.session.items:
        if (spec := getattr(item, "callspec", None)) and "job_part" in spec.params:
            other, _, number = spec.params["job_part"].rpartition("-")
            if number == processes and other not in wanted:
                wanted.append(other)
    base = tmp_path_factory.getbasetemp()
    in_worker = "PYTEST_XDIST_WORKER" in os.environ
    shared = base.parent if in_worker else base
    return launch.Part(name, int(processes), tuple(wanted), shared)
