"""Benchmark the creation of a sharded model against handwritten JAX.

    python benchmarks/create.py --layers 8 32

A decoder of 9 arrays per layer is made on eight devices, each row in a process of its
own, one after the other: nothing is compiled yet, and the peak of memory is that of
the row. The scanned model is made five times, rows in turn; of these, the median
counts. Prints two Markdown tables, then the targets as PASS or FAIL. docs/benchmarks.md
says more.
"""

import argparse
import contextlib
import datetime
import functools
import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
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
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

import flax_layoutmap as flm  # noqa: E402

WIDTH, HIDDEN, VOCABULARY = 256, 1024, 2048
SCANNED = 32
ROUNDS = 5  # of the scanned model, whose rows take few seconds, in turn
TRACED = (8, 32, 80, 160)
TRACED_BY_FLAX = 32  # beyond, it takes minutes

EAGER = "eager constructor, on one device"
MOVED = "eager, then `device_put`"
FLAX = "Flax eager sharding, `set_mesh`"
NNX_JIT = "`nnx.jit`, constraints inside"
JIT = "`jax.jit(…, out_shardings)`"
JIT_WARM = "`jax.jit(…, out_shardings)`, persistent cache"
OURS = "**flm.create**"
OURS_SCOPE = "**flm.layout_map_scope**"
OURS_WARM = "**flm.create**, persistent cache"
MODELS = (EAGER, MOVED, FLAX, NNX_JIT, JIT, JIT_WARM, OURS, OURS_SCOPE, OURS_WARM)
TRACE = "**flax_layoutmap**: trace and rules (`resolve(make)`)"
OPTIMIZER_JIT = "`jax.jit(tx.init, out_shardings)`"
OPTIMIZER_EAGER = "`nnx.Optimizer`, eager"
OPTIMIZER_OURS = "**flm.create_optimizer**"
OPTIMIZERS = (OPTIMIZER_EAGER, OPTIMIZER_JIT, OPTIMIZER_OURS)
TXS = {"adamw": optax.adamw, "adafactor": optax.adafactor}

RULES: dict[str, Any] = {
    "(q|k|v|gate|up)/kernel": (..., "data", "model"),
    "(out|down)/kernel": (..., "model", "data"),
    "embedding": ("model", "data"),
    "scale": None,
}


class Block(nnx.Module):
    """A decoder layer: nine arrays."""

    def __init__(self, rngs: nnx.Rngs, annotate: bool = False) -> None:
        def linear(inputs: int, outputs: int, *spec: str) -> nnx.Linear:
            init: Any = nnx.initializers.lecun_normal()
            if annotate:
                init = nnx.with_partitioning(init, spec)
            return nnx.Linear(
                inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs
            )

        self.norm1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.q = linear(WIDTH, WIDTH, "data", "model")
        self.k = linear(WIDTH, WIDTH, "data", "model")
        self.v = linear(WIDTH, WIDTH, "data", "model")
        self.out = linear(WIDTH, WIDTH, "model", "data")
        self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.gate = linear(WIDTH, HIDDEN, "data", "model")
        self.up = linear(WIDTH, HIDDEN, "data", "model")
        self.down = linear(HIDDEN, WIDTH, "model", "data")


class Decoder(nnx.Module):
    """Layers in a list, or stacked in one for `nnx.scan`."""

    def __init__(
        self, layers: int, scanned: bool, rngs: nnx.Rngs, annotate: bool = False
    ) -> None:
        init: Any = nnx.initializers.normal(0.02)
        if annotate:
            init = nnx.with_partitioning(init, ("model", "data"))
        self.embed = nnx.Embed(VOCABULARY, WIDTH, embedding_init=init, rngs=rngs)
        if scanned:

            @nnx.split_rngs(splits=layers)
            @nnx.vmap
            def stack(rngs: nnx.Rngs) -> Block:
                return Block(rngs)

            self.layers: Any = stack(rngs)
        else:
            self.layers = nnx.List([Block(rngs, annotate) for _ in range(layers)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)


# ------------------------------------------------------------------ inside one process


class Row:
    """One row, for one model: how to make it.

    Attributes:
        mesh: two by four devices.
        layout_map: the rules, on it.
    """

    def __init__(self, layers: int, scanned: bool) -> None:
        self._layers, self._scanned = layers, scanned
        grid = np.array(jax.devices()).reshape(2, 4)
        self.mesh = Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        self.layout_map = flm.LayoutMap(self.mesh)
        self.layout_map.update(RULES)

    def make(self, *, annotate: bool = False) -> Decoder:
        """The constructor."""
        return Decoder(self._layers, self._scanned, nnx.Rngs(0), annotate)

    @functools.cached_property
    def abstract(self) -> Any:
        """The graphdef and the abstract State of the model."""
        return nnx.split(nnx.eval_shape(self.make))

    @functools.cached_property
    def shardings(self) -> Any:
        """Shardings for the State of the model, as one would write them by hand."""
        return self.layout_map.shardings(self.abstract[1])

    def model(self, row: str) -> Callable[[], Any]:
        """How the row makes the model, from the constructor and the rules.

        All of that is inside of the clock: the shardings too, which take a trace.
        """
        if row in (OURS, OURS_WARM):
            return lambda: flm.create(self.make, self.layout_map)
        if row == OURS_SCOPE:
            return self._scope
        if row == EAGER:
            return self.make
        if row == FLAX:
            return self._flax
        if row == MOVED:
            return lambda: jax.device_put(nnx.state(self.make()), self.shardings)
        if row == NNX_JIT:
            jitted = functools.cache(
                lambda: nnx.jit(functools.partial(self._constrained, self.shardings))
            )
            return lambda: jitted()()
        program = functools.cache(
            lambda: jax.jit(
                lambda: nnx.state(self.make()), out_shardings=self.shardings
            )
        )
        return lambda: nnx.merge(self.abstract[0], program()())

    def _scope(self) -> Any:
        with flm.layout_map_scope(self.layout_map):
            model = self.make()
        return model

    def _flax(self) -> Any:
        with jax.set_mesh(self.mesh):
            return self.make(annotate=True)

    def _constrained(self, shardings: Any) -> Any:
        model = self.make()
        state = nnx.state(model)
        nnx.update(model, jax.lax.with_sharding_constraint(state, shardings))
        return model

    def optimizer(self, row: str, tx: Any) -> Callable[[], Any]:
        """How the row makes the state of an optimizer; the model is made before."""
        model = flm.create(self.make, self.layout_map)
        jax.block_until_ready(nnx.state(model))
        if row == OPTIMIZER_OURS:
            return lambda: flm.create_optimizer(model, tx)
        if row == OPTIMIZER_EAGER:
            return lambda: nnx.Optimizer(model, tx, wrt=nnx.Param)
        made = flm.create_optimizer(model, tx)
        state = nnx.state(made)["opt_state"]
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        del made, state
        jax.clear_caches()  # what was compiled so far counts for nothing
        params = nnx.state(model, nnx.Param)

        def init(params: Any) -> Any:
            optimizer = nnx.Optimizer(nnx.merge(graphdef, params), tx, wrt=nnx.Param)
            return nnx.state(optimizer)["opt_state"]

        graphdef = nnx.graphdef(model)
        return lambda: jax.jit(init, out_shardings=shardings)(params)


@contextlib.contextmanager
def counted_programs() -> Iterator[list[float]]:
    """The seconds of each compilation."""
    found: list[float] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def run_row(row: str, layers: int, scanned: bool, tx: str, cache: str) -> None:
    """Measure one row in this process, and print JSON."""
    warnings.simplefilter("ignore")
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    bench = Row(layers, scanned)
    call = bench.optimizer(row, TXS[tx](1e-3)) if tx else bench.model(row)
    jax.block_until_ready(jnp.zeros(8) + 1)  # the backend is up
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with counted_programs() as programs:
        start = time.perf_counter()
        made = call()
        state = nnx.state(made) if isinstance(made, nnx.Pytree) else made
        jax.block_until_ready(state)
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    compiled = len(programs)
    on_device = {device: 0 for device in jax.devices()}
    digest = hashlib.sha256()
    leaves = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.number)]
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            on_device[shard.device] += shard.data.nbytes
        digest.update(np.asarray(leaf).tobytes())
    start = time.perf_counter()
    again = call()
    jax.block_until_ready(nnx.state(again) if isinstance(again, nnx.Pytree) else again)
    result = {
        "seconds": seconds,
        "again": time.perf_counter() - start,
        "peak_bytes": peak * 1024,
        "grown_bytes": (peak - before) * 1024,
        "bytes_per_device": max(on_device.values()),
        "programs": compiled,
        "leaves": len(leaves),
        "digest": digest.hexdigest(),
    }
    print(json.dumps(result))


# -------------------------------------------------------------------------- all of them

Cell = dict[str, Any]
Cells = dict[tuple[str, str], Cell]  # (row, model) → what was measured


def measured(
    row: str, layers: int, scanned: bool, tx: str = "", cache: str = ""
) -> Cell:
    """Run one row in a process of its own."""
    command = [sys.executable, __file__, "--row", row, "--layers", str(layers)]
    command += ["--tx", tx, "--cache", cache] + ["--scanned"] * scanned
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"  {row}: {result['seconds']:.1f} s", file=sys.stderr)
    return result


def rows_of(
    rows: tuple[str, ...], layers: int, scanned: bool, tx: str
) -> Iterator[Any]:
    """(row, cell) of each row for one model."""
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            if row == FLAX and scanned:
                continue  # stacked by nnx.vmap, its annotations name too few dims
            cache = ""
            if row in (JIT_WARM, OURS_WARM):
                cache = f"{folder}/{'jit' if row == JIT_WARM else 'ours'}"
                measured(row, layers, scanned, tx, cache)  # fills it
            yield row, measured(row, layers, scanned, tx, cache)


def trace_table() -> tuple[str, list[tuple[float, float, str]]]:
    """Milliseconds per layer of tracing alone, and the growth of ours."""
    lines = ["| row |" + "".join(f" {count} layers |" for count in TRACED)]
    lines.append("|---|" + "--:|" * len(TRACED))
    warnings.simplefilter("ignore")
    benches = [Row(count, False) for count in TRACED]
    per_layer: dict[str, list[float]] = {"`nnx.eval_shape`": [], TRACE: []}
    for bench, count in zip(benches, TRACED, strict=True):
        for row, call in (
            ("`nnx.eval_shape`", lambda b=bench: nnx.eval_shape(b.make)),
            (TRACE, lambda b=bench: b.layout_map.resolve(b.make)),
        ):
            if row != TRACE and count > TRACED_BY_FLAX:
                continue
            call()  # what is imported, and what JAX keeps of each shape
            start = time.perf_counter()
            call()
            per_layer[row].append((time.perf_counter() - start) / count)
    for row, found in per_layer.items():
        shown = "".join(f" {seconds * 1000:.1f} ms per layer |" for seconds in found)
        shown += " not run |" * (len(TRACED) - len(found))
        lines.append(f"| {row} |{shown}")
    ours = per_layer[TRACE]
    return "\n".join(lines), [(ours[-1] / ours[1], 1.5, "160 layers against 32")]


def megabytes(count: float) -> str:
    """Bytes for people."""
    return f"{count / 1e6:,.0f} MB"


def table(cells: Cells, models: list[str], against: str) -> str:
    """All cells as one Markdown table; in brackets, how many times `against`."""
    lines = [
        "| model | row | seconds | again | peak RSS | per device | programs |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for model in models:
        for (row, of), cell in cells.items():
            if of != model:
                continue
            other = cells[against, model]
            lines.append(
                f"| {model} | {row} | {cell['seconds']:.1f} "
                f"({cell['seconds'] / other['seconds']:.2f}×) | {cell['again']:.1f} | "
                f"{megabytes(cell['peak_bytes'])} | "
                f"{megabytes(cell['bytes_per_device'])} | {cell['programs']} |"
            )
    return "\n".join(lines)


def verdict(text: str, found: list[tuple[float, float, str]]) -> int:
    """Print one target over (value, limit, where); return 1 if it is missed."""
    if not found:
        print(f"- not measured: {text}")
        return 0
    value, limit, where = max(found, key=lambda cell: cell[0] / cell[1])
    bad = sum(value > limit for value, limit, _ in found)
    print(
        f"- {'FAIL' if bad else 'PASS'}: {text} — worst {value:.3g} of {limit:.3g} "
        f"allowed ({where})"
    )
    return 1 if bad else 0


def report(cells: Cells, optimizers: Cells) -> int:
    """Print the targets; return 1 if one is missed."""

    def ratio(row: str, model: str, what: str) -> float:
        return cells[row, model][what] / cells[JIT, model][what]

    models = list(dict.fromkeys(model for _, model in cells))
    missed = 0
    for layers, share in ((32, 1 / 5), (80, 1 / 10)):
        found = [
            (ratio(row, model, "seconds"), share, f"{plain(row)}, {model}")
            for model in models
            for row in (OURS, OURS_SCOPE)
            if model == f"{layers} layers"
        ]
        text = (
            f"{layers} layers: {1 / share:.0f} × faster than `jit` (share of its time)"
        )
        missed += verdict(text, found)
    found = [
        (ratio(row, m, "seconds"), 1.1, f"{plain(row)}, {m}")
        for m in models
        for row in (OURS, OURS_SCOPE)
        if "scanned" in m
    ]
    missed += verdict("scanned: at most 1.1 × the time of `jit`", found)
    found = [
        (ratio(row, m, "peak_bytes"), 1.0, f"{plain(row)}, {m}")
        for m in models
        for row in (OURS, OURS_SCOPE)
    ]
    for row, model in optimizers:
        if row == OPTIMIZER_OURS:
            other = optimizers[OPTIMIZER_JIT, model]["peak_bytes"]
            ours = optimizers[row, model]["peak_bytes"]
            found.append((ours / other, 1.0, f"{plain(row)}, {model}"))
    missed += verdict("peak RSS: at most that of `jit`", found)
    for model in models:
        bits = {cells[row, model]["digest"] for row in (JIT, OURS, OURS_SCOPE)}
        missed += verdict(
            f"{model}: the bits of `jit` (kinds of bits)", [(len(bits), 1, "all rows")]
        )
    return 1 if missed else 0


def plain(row: str) -> str:
    """The name of one of our rows without marks."""
    return row.replace("**", "")


def main() -> int:
    """Print the tables and the targets; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="*", default=[8, 32, 80])
    parser.add_argument("--optimizer-layers", type=int, nargs="*", default=[32])
    parser.add_argument("--no-scanned", action="store_true")
    for name in ("--row", "--tx", "--cache"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--scanned", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        run_row(given.row, given.layers[0], given.scanned, given.tx, given.cache)
        return 0
    models = {f"{count} layers": (count, False) for count in given.layers}
    if not given.no_scanned:
        models[f"{SCANNED} layers, scanned"] = (SCANNED, True)
    cells: Cells = {}
    for model, (count, scanned) in models.items():
        print(model, file=sys.stderr)
        found: dict[str, list[Any]] = {}
        for _ in range(ROUNDS if scanned else 1):
            for row, cell in rows_of(MODELS, count, scanned, ""):
                found.setdefault(row, []).append(cell)
        for row, own in found.items():
            own.sort(key=lambda cell: cell["seconds"])
            cells[row, model] = own[len(own) // 2]
    optimizers: Cells = {}
    for tx in TXS:
        for count in given.optimizer_layers:
            print(f"{tx}, {count} layers", file=sys.stderr)
            for row, cell in rows_of(OPTIMIZERS, count, False, tx):
                optimizers[row, f"{tx}, {count} layers"] = cell
    traces, growth = trace_table()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "flax"))
    print(
        f"{datetime.date.today()}, {os.cpu_count()} CPU cores, "
        f"Python {platform.python_version()}, {versions}\n"
    )
    print(table(cells, list(models), JIT), end="\n\n")
    if optimizers:
        names = list(dict.fromkeys(model for _, model in optimizers))
        print(table(optimizers, names, OPTIMIZER_JIT), end="\n\n")
    print(traces, end="\n\n")
    missed = verdict("time of a trace per layer grows by at most half", growth)
    return report(cells, optimizers) or missed


if __name__ == "__main__":
    sys.exit(main())
