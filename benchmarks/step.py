"""Benchmark the Python overhead of a step against `jax.jit` and `nnx.jit`.

    python benchmarks/step.py --variables 30 120 --devices 8

The step multiplies every array of a model and of its Adam optimizer by one, all state
donated, so next to nothing is computed and what remains is dispatch. Prints one
Markdown table, then the targets as PASS or FAIL. Cells are medians of the CPU time of
the thread, rows measured in turn, 20 calls at a time; garbage collection is off inside
the clock, and so is flipping `train()` and `eval()`. A step's memory traffic empties
the caches, and a flip goes through a whole model: comparing the graph takes ten times
as long after a step as in a loop of its own, and the rows after a flip are for
comparison with each other. docs/benchmarks.md says more.
"""

import argparse
import collections
import datetime
import gc
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

Call = Callable[..., Any]

FLOOR = "floor: `jax.jit` on a flat list"
DICT = "`jax.jit` on a pure dict"
STATE = "`jax.jit` on `nnx.State`"
BARE = "the Variables in a list: read, `jax.jit`, write; nothing checked"
OURS = "**flm.jit**, model and optimizer"
EXPLICIT = "**flm.jit**, model and optimizer on Explicit axes"
OURS_FLIP = "**flm.jit**, after `train()` and `eval()` in turn"
OTHER_FLIP = "**flm.jit**, after another model's `train()` and `eval()`"
OURS_DICT = "**flm.jit** on a pure dict"
OURS_STATE = "**flm.jit** on `nnx.State`"
NNX_JIT = "`nnx.jit`"
WARM_UP, IN_A_ROW = 3, 20


class Layers(nnx.Module):
    """Layers of two Variables each, and a Dropout whose mode can be flipped."""

    def __init__(self, count: int) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(count)])
        self.dropout = nnx.Dropout(0.5)


def make(layers: int) -> tuple[Layers, nnx.Optimizer[Any]]:
    """A model and its optimizer: six Variables for each layer, and two."""
    model = Layers(layers)
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def rules(devices: int, kind: AxisType = AxisType.Auto) -> flm.LayoutMap:
    """Kernels over the columns, on a mesh of so many devices."""
    grid = np.array(jax.devices()[:devices]).reshape(2 if devices > 1 else 1, -1)
    mesh = Mesh(grid, ("data", "model"), axis_types=(kind, kind))
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = (None, "model")
    return layout_map


def step(model: Any, optimizer: Any, x: Any) -> Any:
    """Change every Variable."""
    for _, variable in nnx.iter_graph((model, optimizer)):
        if isinstance(variable, nnx.Variable):
            variable.set_raw_value(variable.get_raw_value() * 1)
    return x + 1


def tree_step(model: Any, optimizer: Any, x: Any) -> Any:
    """The same where NNX objects are plain pytrees."""

    def is_variable(node: Any) -> bool:
        return isinstance(node, nnx.Variable)

    for variable in jax.tree.leaves((model, optimizer), is_leaf=is_variable):
        if is_variable(variable):
            variable.set_raw_value(variable.get_raw_value() * 1)
    return x + 1


def pure_step(state: Any, x: Any) -> Any:
    """The same on a pure tree."""
    return jax.tree.map(lambda leaf: leaf * 1, state), x + 1


@dataclass(frozen=True)
class Flipping:
    """A call before which something happens that does not count."""

    jitted: Call
    arguments: tuple[Any, ...]
    before: Callable[[], None]

    def __call__(self) -> Any:
        return self.jitted(*self.arguments)


class Bench:
    """The rows for one number of layers and devices."""

    def __init__(
        self, layers: int, devices: int, kind: AxisType = AxisType.Auto
    ) -> None:
        self.layers, self.devices = layers, devices
        self.layout_map = rules(devices, kind)
        self.x = self.layout_map.place(jnp.zeros(()))

    def placed(self, layout_map: Any = None) -> Any:
        """A model and an optimizer, where the rules say."""
        model, optimizer = make(self.layers)
        placed = (layout_map or self.layout_map).place(
            {"model": model, "optimizer": optimizer}
        )
        return placed["model"], placed["optimizer"]

    def state(self) -> Any:
        """The `nnx.State` of both."""
        return nnx.state(self.placed())

    def count(self) -> int:
        """How many Variables there are."""
        return len(jax.tree.leaves(nnx.state(make(self.layers))))

    def rows(self) -> Iterator[tuple[str, Call]]:
        """(name, one call) of each row; a call may have `before`, outside the clock."""
        yield FLOOR, self.hold(jax.jit, jax.tree.leaves(self.state()), pinned=True)
        yield DICT, self.hold(jax.jit, nnx.to_pure_dict(self.state()), pinned=True)
        yield STATE, self.hold(jax.jit, self.state(), pinned=True)
        yield BARE, self.unchecked()
        yield OURS, self.on_objects(self.ours())
        yield EXPLICIT, self.on_explicit_axes()
        yield OTHER_FLIP, self.flipping(own=False)
        yield OURS_FLIP, self.flipping(own=True)
        yield OURS_DICT, self.hold(self.ours_pure, nnx.to_pure_dict(self.state()))
        yield OURS_STATE, self.hold(self.ours_pure, self.state())
        donate: dict[str, Any] = {"donate_argnums": (0, 1)}
        yield NNX_JIT, self.on_objects(nnx.jit(step, **donate))
        for name, fun, options in (
            ("`nnx.jit`, graph_updates=False", step, {"graph_updates": False}),
            ("`nnx.jit`, graph=False", tree_step, {"graph": False}),
        ):
            yield name, self.on_objects(nnx.jit(fun, **donate, **options))
        partial = nnx.jit_partial(
            tree_step, *self.placed(), donate_argnums=(0,), graph=False
        )
        yield "`nnx.jit_partial`, graph=False", lambda: partial(self.x)

    def unchecked(self) -> Call:
        """The least that Python can do: it trusts that nobody has changed the model.

        Reads and writes the slot that Flax has as `_raw_value`, Variable by Variable.
        """
        graph = nnx.iter_graph(self.placed())
        variables = [node for _, node in graph if isinstance(node, nnx.Variable)]
        slot: Any = vars(nnx.Variable)["_raw_value"]
        read, write = slot.__get__, slot.__set__
        at = [read(variable).sharding for variable in variables]
        jitted = jax.jit(
            pure_step,
            in_shardings=(at, self.x.sharding),
            out_shardings=(at, self.x.sharding),
            donate_argnums=0,
        )

        def call() -> Any:
            values, result = jitted(list(map(read, variables)), self.x)
            collections.deque(map(write, variables, values), maxlen=0)
            return result

        return call

    def on_explicit_axes(self) -> Call:
        """Our jit on a mesh of Explicit axes."""
        other = Bench(self.layers, self.devices, AxisType.Explicit)
        return other.on_objects(other.ours())

    def ours(self, layout_map: Any = None) -> Any:
        """Our jit of the step."""
        return flm.jit(
            step,
            layout_map=layout_map or self.layout_map,
            donate_argnames=("model", "optimizer"),
        )

    def ours_pure(self, fun: Any, **options: Any) -> Any:
        """Our jit of the step on a tree."""
        return flm.jit(fun, layout_map=self.layout_map, donate_argnames="state")

    def on_objects(self, jitted: Any, objects: Any = None) -> Call:
        """Call with a model and an optimizer."""
        model, optimizer = objects or self.placed()
        return lambda: jitted(model, optimizer, self.x)

    def flipping(self, *, own: bool) -> Call:
        """Call after the mode of this model, or of another one, has changed.

        To change it takes Python through the whole model, after which any call takes
        longer than one right after another.
        """
        model, optimizer = self.placed()
        other = model if own else self.placed()[0]
        modes = [False]

        def before() -> None:
            modes[0] = not modes[0]
            other.train() if modes[0] else other.eval()

        return Flipping(self.ours(), (model, optimizer, self.x), before)

    def hold(self, jit: Any, state: Any, *, pinned: bool = False) -> Call:
        """Call with a tree that each call replaces."""
        options: dict[str, Any] = {}
        if pinned:
            at = jax.tree.map(lambda leaf: leaf.sharding, state)
            options = {
                "in_shardings": (at, self.x.sharding),
                "out_shardings": (at, self.x.sharding),
            }
        jitted = jit(pure_step, donate_argnums=0, **options)
        held = [state]

        def call() -> Any:
            held[0], result = jitted(held[0], self.x)
            return result

        return call


def measure(rows: list[tuple[str, Call]], rounds: int) -> dict[str, float]:
    """Row → median seconds of CPU time of one call."""
    times: dict[str, list[float]] = {name: [] for name, _ in rows}
    for _, call in rows:
        for _ in range(WARM_UP):
            getattr(call, "before", bool)()
            jax.block_until_ready(call())
    gc.collect()
    gc.freeze()
    gc.disable()
    for _ in range(max(1, rounds // IN_A_ROW)):
        for name, call in rows:
            for _ in range(IN_A_ROW):
                getattr(call, "before", bool)()
                start = time.thread_time()
                result = call()
                times[name].append(time.thread_time() - start)
                jax.block_until_ready(result)
    gc.enable()
    gc.unfreeze()
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    """Print the table and the targets; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variables", type=int, nargs="+", default=[30, 120, 480])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    cells: dict[tuple[str, int, int], float] = {}
    names: dict[str, None] = {}
    for devices in arguments.devices:
        for variables in arguments.variables:
            bench = Bench(max(1, variables // 6), devices)
            print(f"{bench.count()} Variables, {devices} devices", file=sys.stderr)
            measured = measure(list(bench.rows()), arguments.rounds)
            for name, seconds in measured.items():
                names[name] = None
                cells[name, variables, devices] = seconds
            jax.clear_caches()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "flax"))
    print(
        f"{datetime.date.today()}, {os.cpu_count()} CPU cores, "
        f"Python {platform.python_version()}, {versions}\n"
    )
    columns = [(v, d) for d in arguments.devices for v in arguments.variables]
    print("| row |" + "".join(f" {v}, {d} dev. |" for v, d in columns))
    print("|---|" + "--:|" * len(columns))
    for name in names:
        shown = [
            f" {cells[name, v, d] * 1e6:,.0f} µs "
            f"({cells[name, v, d] / cells[FLOOR, v, d]:.2f}×) |"
            for v, d in columns
        ]
        print(f"| {name} |{''.join(shown)}")
    return report(cells, columns)


def report(cells: dict[tuple[str, int, int], float], columns: list[Any]) -> int:
    """Print the targets; return 1 if one is missed."""
    print()
    missed = 0
    for text, row, other, limit in (
        ("at most 1.4 × the floor on eight devices", OURS, FLOOR, {8: 1.4}),
        ("at most 1.7 × the floor on one device", OURS, FLOOR, {1: 1.7}),
        ("at most 1/6 of `nnx.jit`", OURS, NNX_JIT, {8: 1 / 6, 1: 1 / 6}),
        ("a dict: at most 1.1 × `jax.jit`", OURS_DICT, DICT, {8: 1.1, 1: 1.1}),
        ("a State: at most 1.1 × `jax.jit`", OURS_STATE, STATE, {8: 1.1, 1: 1.1}),
        ("Explicit axes: at most 1.1 × Auto axes", EXPLICIT, OURS, {8: 1.1, 1: 1.1}),
        ("a known flip costs no rebind", OURS_FLIP, OTHER_FLIP, {8: 1.2, 1: 1.2}),
    ):
        found = [
            (cells[row, v, d] / cells[other, v, d], limit[d], v, d)
            for v, d in columns
            if d in limit
        ]
        if not found:
            continue
        worst = max(found, key=lambda cell: cell[0] / cell[1])
        bad = sum(ratio > most for ratio, most, _, _ in found)
        missed += bad
        print(
            f"- {'FAIL' if bad else 'PASS'}: {text} — worst {worst[0]:.3g} of "
            f"{worst[1]:.3g} allowed ({worst[2]} Variables, {worst[3]} devices); "
            f"{len(found) - bad} of {len(found)} cells reach it"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
