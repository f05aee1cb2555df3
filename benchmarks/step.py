"""The Python overhead of a step, against `jax.jit` and `nnx.jit`.

    python benchmarks/step.py --variables 30 120 --devices 8

The step multiplies every array of a model and of its Adam optimizer by one, all state
donated, so that next to nothing is computed and what remains is dispatch. Prints a
Markdown table: medians of the CPU time of the thread, and in brackets how many times
the first row. Rows are measured in turn, 20 calls at a time; garbage collection is
outside of the clock.
"""

import argparse
import copy
import datetime
import functools
import gc
import itertools
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType  # noqa: E402

import flax_layoutmap as flm  # noqa: E402

Call = Callable[[], Any]
WARM_UP, IN_A_ROW = 3, 20


class Layers(nnx.Module):
    """Layers of two Variables each."""

    def __init__(self, count: int) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(count)])


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


class Bench:
    """The rows for one number of Variables and devices."""

    def __init__(self, variables: int, devices: int) -> None:
        self.size = variables, devices
        shape = (2 if devices > 1 else 1, max(1, devices // 2))
        mesh = jax.make_mesh(
            shape,
            ("data", "model"),
            (AxisType.Auto, AxisType.Auto),
            devices=jax.devices()[:devices],
        )
        self.layout_map = flm.LayoutMap(mesh, strict=False)
        self.layout_map["kernel"] = (None, "model")
        self.x = self.layout_map.place(jnp.zeros(()))

    def placed(self) -> tuple[Layers, Any]:
        """A model and its optimizer: six Variables for each layer, and two."""
        model = Layers(max(1, self.size[0] // 6))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        objects = {"model": model, "optimizer": optimizer}
        return tuple(self.layout_map.place(objects).values())

    def on_objects(self, jit: Any, fun: Any = step, **options: Any) -> Call:
        """Call a step with a model and an optimizer."""
        donated = {"donate_argnames": ("model", "optimizer")}
        jitted, (model, optimizer) = jit(fun, **donated, **options), self.placed()
        return lambda: jitted(model, optimizer, self.x)

    def on_tree(self, jit: Any, tree: Any, **options: Any) -> Call:
        """Call a step with a tree that each call replaces."""
        jitted, held = jit(pure_step, donate_argnums=0, **options), [tree]

        def call() -> Any:
            held[0], result = jitted(held[0], self.x)
            return result

        return call

    def pinned(self, tree: Any) -> Call:
        """The same by `jax.jit`, with the shardings of the tree."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, tree), self.x.sharding
        options = {"in_shardings": shardings, "out_shardings": shardings}
        return self.on_tree(jax.jit, tree, **options)

    def rows(self) -> dict[str, Call]:
        """All rows; the first is the floor."""
        ours = {"layout_map": self.layout_map}
        flat = jax.tree.leaves(nnx.state(self.placed()))
        tree = nnx.to_pure_dict(nnx.state(self.placed()))
        return {
            "floor: `jax.jit` on a flat list": self.pinned(flat),
            "**flm.jit**, model and optimizer": self.on_objects(flm.jit, **ours),
            "**flm.jit**, a call that is not recognised": self.unknown(),
            "**flm.jit** on a pure dict": self.on_tree(flm.jit, tree, **ours),
            "`jax.jit` on a pure dict": self.pinned(
                nnx.to_pure_dict(nnx.state(self.placed()))
            ),
            "`nnx.cached_partial`": self.cached(),
            "`nnx.jit`": self.on_objects(nnx.jit),
            "`nnx.split`, `jax.jit`, `nnx.update`": self.by_hand(),
            "`nnx.jit_partial`, graph=False": self.partial(),
        }

    def unknown(self) -> Call:
        """Each call has a new model, of the same Variables."""
        jitted = flm.jit(
            step,
            layout_map=self.layout_map,
            donate_argnames=("model", "optimizer"),
        )
        model, optimizer = self.placed()
        models = itertools.cycle([copy.copy(model) for _ in range(40)])
        return lambda: jitted(next(models), optimizer, self.x)

    def cached(self) -> Call:
        """The call that does not look at the objects."""
        jitted = nnx.jit(step, donate_argnames=("model", "optimizer"))
        cached: Any = nnx.cached_partial(jitted, *self.placed())
        return lambda: cached(self.x)

    def by_hand(self) -> Call:
        """Six lines of Flax and JAX."""
        objects = self.placed()
        graphdef = nnx.graphdef(objects)

        @functools.partial(jax.jit, donate_argnums=0)
        def jitted(state: Any, x: Any) -> Any:
            objects = nnx.merge(graphdef, state)
            result = step(objects[0], objects[1], x)
            return nnx.state(objects), result

        def call() -> Any:
            state, result = jitted(nnx.state(objects), self.x)
            nnx.update(objects, state)
            return result

        return call

    def partial(self) -> Call:
        """The call that checks nothing."""
        options = {"donate_argnums": (0,), "graph": False}
        partial = nnx.jit_partial(tree_step, *self.placed(), **options)
        return lambda: partial(self.x)


def measure(rows: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median seconds of CPU time of a call, for each row."""
    times: dict[str, list[float]] = {name: [] for name in rows}
    for call in rows.values():
        for _ in range(WARM_UP):
            jax.block_until_ready(call())
    gc.collect()
    gc.freeze()
    gc.disable()
    for _ in range(max(1, rounds // IN_A_ROW)):
        for name, call in rows.items():
            for _ in range(IN_A_ROW):
                start = time.thread_time()
                result = call()
                times[name].append(time.thread_time() - start)
                jax.block_until_ready(result)
    gc.enable()
    gc.unfreeze()
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--variables", type=int, nargs="+", default=[30, 120, 480])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    cells: dict[str, list[str]] = {}
    heads = []
    for devices in arguments.devices:
        for variables in arguments.variables:
            print(f"{variables} Variables, {devices} devices", file=sys.stderr)
            heads.append(f"{variables}, {devices} dev.")
            rows = Bench(variables, devices).rows()
            measured = measure(rows, arguments.rounds)
            floor = measured[next(iter(rows))]
            for name, seconds in measured.items():
                cell = f"{seconds * 1e6:,.0f} µs ({seconds / floor:.2f}×)"
                cells.setdefault(name, []).append(cell)
            jax.clear_caches()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "flax"))
    print(f"{datetime.date.today()}, Python {platform.python_version()}, {versions}\n")
    print("| row | " + " | ".join(heads) + " |")
    print("|---|" + "--:|" * len(heads))
    for name, row in cells.items():
        print(f"| {name} | " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
