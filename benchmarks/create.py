"""The creation of a sharded model, against handwritten JAX.

    python benchmarks/create.py --layers 8 32

A decoder of 9 arrays for each layer, 256 wide, in a list of layers or stacked, is made
on eight devices. Each row runs in a process of its own, so that nothing is compiled
yet and the peak of memory is that of the row. Shardings are made inside of the clock.
Prints a Markdown table: in brackets how many times `jax.jit` takes; "again" is the same
call once more in the process, "per device" the bytes on the device that has most,
"bits" whether the values equal those of `jax.jit`.
"""

import argparse
import contextlib
import datetime
import functools
import hashlib
import json
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from _decoders import Config, Decoder  # noqa: E402
from flax import nnx  # noqa: E402

import flax_layoutmap as flm  # noqa: E402

RULES: dict[str, Any] = {
    "(query|key|value)/kernel": (..., "data", "model", None),
    "out/kernel": (..., "model", None, "data"),
    "(gate|up|head)/kernel": (..., "data", "model"),
    "down/kernel": (..., "model", "data"),
    "embedding": ("model", "data"),
    "scale": None,
}


class Bench:
    """How each row makes one model."""

    def __init__(self, layers: int, scanned: bool) -> None:
        self.config = Config(
            dim=256,
            layers=layers,
            heads=4,
            kv_heads=4,
            hidden=1024,
            vocab=2048,
            dtype=jnp.float32,
            scanned=scanned,
            named=False,
        )
        self.layout_map = flm.LayoutMap("data=2,model=4")
        self.layout_map.update(RULES)

    def make(self) -> Decoder:
        """The constructor."""
        return Decoder(self.config, rngs=nnx.Rngs(0))

    @functools.cached_property
    def abstract(self) -> tuple[Any, Any]:
        """The graphdef of the model, and shardings as one would write them by hand."""
        graphdef, state = nnx.split(nnx.eval_shape(self.make))
        return graphdef, self.layout_map.shardings(state)

    def moved(self) -> Any:
        return jax.device_put(nnx.state(self.make()), self.abstract[1])

    @functools.cached_property
    def _nnx_jitted(self) -> Callable[[], Any]:
        @nnx.jit
        def constrained() -> Decoder:
            model = self.make()
            constrain = jax.lax.with_sharding_constraint
            nnx.update(model, constrain(nnx.state(model), self.abstract[1]))
            return model

        return constrained

    def nnx_jit(self) -> Any:
        return self._nnx_jitted()

    @functools.cached_property
    def _jitted(self) -> Callable[[], Any]:
        shardings = self.abstract[1]
        return jax.jit(lambda: nnx.state(self.make()), out_shardings=shardings)

    def jit(self) -> Any:
        return nnx.merge(self.abstract[0], self._jitted())

    def create(self) -> Any:
        return flm.create(self.make, self.layout_map)

    def scope(self) -> Any:
        with flm.layout_map_scope(self.layout_map):
            model = self.make()
        return model


JIT = "`jax.jit(…, out_shardings)`"
ROWS: dict[str, Callable[[Bench], Any]] = {
    JIT: Bench.jit,
    "eager constructor, on one device": Bench.make,
    "eager, then `device_put`": Bench.moved,
    "`nnx.jit`, constraints inside": Bench.nnx_jit,
    "**flm.create**": Bench.create,
    "**flm.layout_map_scope**": Bench.scope,
}


# ------------------------------------------------------------------ inside one process


@contextlib.contextmanager
def counted_programs() -> Iterator[list[float]]:
    """The seconds of each compilation."""
    compiled: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def timed(call: Callable[[], Any]) -> tuple[float, list[jax.Array]]:
    """Seconds of a call, and the arrays that it makes."""
    start = time.perf_counter()
    made = call()
    state = nnx.state(made) if isinstance(made, nnx.Pytree) else made
    jax.block_until_ready(state)
    return time.perf_counter() - start, jax.tree.leaves(state)


def run_row(row: str, layers: int, scanned: bool) -> dict[str, Any]:
    """Measure one row in this process."""
    warnings.simplefilter("ignore")
    bench = Bench(layers, scanned)
    jax.block_until_ready(jnp.zeros(8) + 1)  # the backend is up
    call = functools.partial(ROWS[row], bench)
    with counted_programs() as programs:
        seconds, arrays = timed(call)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    on_device = dict.fromkeys(jax.devices(), 0)
    digest = hashlib.sha256()
    for array in arrays:
        for shard in array.addressable_shards:
            on_device[shard.device] += shard.data.nbytes
        digest.update(np.asarray(array).tobytes())
    count = len(programs)
    return {
        "seconds": seconds,
        "again": timed(call)[0],
        "peak": peak / 1e3,
        "per_device": max(on_device.values()) / 1e6,
        "programs": count,
        "digest": digest.hexdigest(),
    }


# -------------------------------------------------------------------------- all of them


def measured(row: str, layers: int, scanned: bool) -> dict[str, Any]:
    """Run one row in a process of its own."""
    command = [sys.executable, __file__, "--row", row, "--layers", str(layers)]
    command += ["--scanned"] * scanned
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"  {row}: {result['seconds']:.1f} s", file=sys.stderr)
    return result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="*", default=[8, 32, 80])
    parser.add_argument("--scanned", action="store_true", help="stack the layers")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        print(json.dumps(run_row(given.row, given.layers[0], given.scanned)))
        return
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "flax"))
    print(f"{datetime.date.today()}, Python {platform.python_version()}, {versions}\n")
    print(
        "| layers | row | seconds | again | peak RSS | per device | programs | bits |"
    )
    print("|---|---|--:|--:|--:|--:|--:|---|")
    for layers in given.layers:
        cells = {row: measured(row, layers, given.scanned) for row in ROWS}
        jit = cells[JIT]
        for row, cell in cells.items():
            times = f"{cell['seconds']:.1f} ({cell['seconds'] / jit['seconds']:.2f}×)"
            same = "equal" if cell["digest"] == jit["digest"] else "differ"
            print(f"| {layers} | {row} | {times} | {cell['again']:.1f} ", end="")
            print(f"| {cell['peak']:,.0f} MB | {cell['per_device']:.0f} MB ", end="")
            print(f"| {cell['programs']} | {same} |")


if __name__ == "__main__":
    main()
