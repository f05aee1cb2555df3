"""From rules to shardings: time, against a lower bound and other libraries.

    python benchmarks/resolve.py --sizes 300 3000 --rules 10 100

Trees are Llama-like training states of `jax.ShapeDtypeStruct`; rules are model families
of nine patterns each and a catch-all, and the one family that matches is in the middle.
Prints a Markdown table: medians of the CPU time of the thread, and in brackets how many
times that is the floor. All rows of a tree are measured in turn, round after round.
Garbage collection is off inside the clock, and Python's cache of compiled patterns is
emptied before each call, because rules are applied once per job. On the smallest tree
the specs of all libraries are compared with ours first; a difference stops the run.
A library that cannot be imported has no row. One that has taken `--limit` seconds sits
the other rounds out, and one that would take longer than that for one call, by its time
for the last smaller tree, has an empty cell.
"""

import argparse
import datetime
import gc
import importlib
import itertools
import os
import platform
import re
import statistics
import string
import sys
import time
import warnings
from collections.abc import Callable
from functools import cached_property, partial
from importlib import metadata
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import flax_layoutmap as flm  # noqa: E402
from flax_layoutmap._rules import matching  # noqa: E402

Call = Callable[[], Any]
Pairs = list[tuple[str, PartitionSpec]]

MESH_SHAPE, MESH_AXES = (2, 4), ("data", "model")
MESH = jax.make_mesh(MESH_SHAPE, MESH_AXES, (jax.sharding.AxisType.Auto,) * 2)
DATA_MODEL, MODEL_DATA = PartitionSpec("data", "model"), PartitionSpec("model", "data")
REPLICATED = PartitionSpec()

# ------------------------------------------------------------------------- the trees

LAYER = {
    "self_attn/q_proj/kernel": (4096, 4096),
    "self_attn/k_proj/kernel": (4096, 1024),
    "self_attn/v_proj/kernel": (4096, 1024),
    "self_attn/o_proj/kernel": (4096, 4096),
    "mlp/gate_proj/kernel": (4096, 14336),
    "mlp/up_proj/kernel": (4096, 14336),
    "mlp/down_proj/kernel": (14336, 4096),
    "input_layernorm/scale": (4096,),
    "post_attention_layernorm/scale": (4096,),
}
Leaf = Callable[..., Any]


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    """A leaf that holds no data; every leaf is another object."""
    return jax.ShapeDtypeStruct(shape, "float32")


def parameter(*shape: int) -> nnx.Param:
    """The same as a Variable."""
    return nnx.Param(struct(*shape))


def layer(leaf: Leaf) -> dict[str, Any]:
    """The nested dict of one layer."""
    tree: dict[str, Any] = {}
    for path, shape in LAYER.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf(*shape)
    return tree


def parameters(layers: int, leaf: Leaf, key: Callable[[int], Any]) -> dict[str, Any]:
    """The parameters of a model, as a nested dict."""
    return {
        "model": {
            "embed_tokens": {"embedding": leaf(32000, 4096)},
            "layers": {key(index): layer(leaf) for index in range(layers)},
            "norm": {"scale": leaf(4096)},
        },
        "lm_head": {"kernel": leaf(4096, 32000)},
    }


def training_state(size: int, leaf: Leaf, key: Callable[[int], Any]) -> dict[str, Any]:
    """Parameters, two moments and a step: about `size` leaves."""
    layers = max(1, round(((size - 1) / 3 - 3) / len(LAYER)))
    trees = {name: parameters(layers, leaf, key) for name in ("params", "mu", "nu")}
    return {**trees, "step": leaf()}


KINDS: dict[str, Callable[[int], Any]] = {
    "plain dicts": lambda size: training_state(size, struct, str),
    "`nnx.State`": lambda size: nnx.State(training_state(size, parameter, int)),
}


class Case:
    """One kind of tree, of about so many leaves, and so many rules."""

    def __init__(self, kind: str, size: int, count: int) -> None:
        self.kind, self.size, self.rules = kind, size, regex_rules(count)

    @cached_property
    def tree(self) -> Any:
        """The tree to resolve."""
        return KINDS[self.kind](self.size)

    @cached_property
    def twin(self) -> Any:
        """Another tree with the same structure and shapes, and no common leaf."""
        return KINDS[self.kind](self.size)


def regex_rules(count: int) -> Pairs:
    """So many (pattern, spec) pairs: nine for each family, and a catch-all."""
    families, rest = divmod(count - 1, len(FAMILY))
    if rest or not families:
        raise ValueError(f"{count} rules: use 9 per family and one more, as 10 or 100")
    # Names of letters alone, since digits in a pattern are a case of their own.
    letters = itertools.product(string.ascii_lowercase, repeat=2)
    others = [
        [(re.sub("@", f"m{a}{b}", pattern), spec) for pattern, spec in OTHER_FAMILY]
        for a, b in itertools.islice(letters, families - 1)
    ]
    middle = len(others) // 2
    ordered = [*others[:middle], FAMILY, *others[middle:]]
    return [*itertools.chain.from_iterable(ordered), (".*", REPLICATED)]


FAMILY: Pairs = [
    ("model/embed_tokens/embedding", MODEL_DATA),
    ("self_attn/(q|k|v)_proj/kernel", DATA_MODEL),
    ("self_attn/o_proj/kernel", MODEL_DATA),
    (r"layers/\d+/mlp/(gate|up)_proj/kernel", DATA_MODEL),
    ("layers/[0-9]+/mlp/down_proj/kernel", MODEL_DATA),
    ("input_layernorm/scale", REPLICATED),
    ("post_attention_layernorm/scale", REPLICATED),
    ("model/norm/scale", REPLICATED),
    ("lm_head/kernel", DATA_MODEL),
]
OTHER_FAMILY: Pairs = [
    ("@/wte/embedding", MODEL_DATA),
    ("attn_@/(query|key|value)/kernel", DATA_MODEL),
    ("attn_@/out/kernel", MODEL_DATA),
    (r"block/\d+/ffn_@/fc_in/kernel", DATA_MODEL),
    ("block/[0-9]+/ffn_@/fc_out/kernel", MODEL_DATA),
    ("ln_attn_@/scale", REPLICATED),
    ("ln_ffn_@/scale", REPLICATED),
    ("@/ln_f/scale", REPLICATED),
    ("score_@/kernel", DATA_MODEL),
]

# -------------------------------------------------------------------------- the rows
# Each prepares outside the clock what is made once per job, and returns the call.


def layout_map(case: Case) -> flm.LayoutMap:
    """Our map of the rules; a new one each time, so that nothing is remembered."""
    return flm.LayoutMap.from_rules(case.rules, MESH, overlap="first")


def floor(case: Case) -> Call:
    """What no library can go below: walking the tree and naming its leaves."""
    return partial(jax.tree_util.tree_flatten_with_path, case.tree)


def cold(case: Case) -> Call:
    return partial(layout_map(case).shardings, case.tree)


def cold_with_map(case: Case) -> Call:
    return lambda: layout_map(case).shardings(case.tree)


def repeated(case: Case) -> Call:
    ours = layout_map(case)
    ours.shardings(case.twin)
    return partial(ours.shardings, case.tree)


def resolve(case: Case) -> Call:
    return partial(layout_map(case).resolve, case.tree)


def keras(case: Case) -> Call:
    """`layout_map[path]` of each leaf; patterns for whole paths, none overlapping."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    distribution = importlib.import_module("keras").distribution
    devices = [str(device) for device in MESH.devices.flat]
    mesh = distribution.DeviceMesh(MESH_SHAPE, MESH_AXES, devices=devices)
    theirs = distribution.LayoutMap(mesh)
    for pattern, spec in [*case.rules[:-1], ("step", REPLICATED)]:
        whole = f".*{pattern}" + "(/value)?" * (case.kind == "`nnx.State`")
        theirs[whole] = distribution.TensorLayout(tuple(spec), mesh)

    def sharding(key_path: tuple[Any, ...], _: Any) -> NamedSharding:
        names = (getattr(key, "key", getattr(key, "name", key)) for key in key_path)
        return theirs["/".join(map(str, names))].backend_layout

    return lambda: jax.tree_util.tree_map_with_path(sharding, case.tree)


def eformer(case: Case) -> Call:
    escale = importlib.import_module("eformer.escale")
    return lambda: escale.match_partition_rules(case.rules, case.tree)


def scalax(case: Case) -> Call:
    sharding = importlib.import_module("scalax.sharding")
    helper = sharding.MeshShardingHelper(MESH_SHAPE, MESH_AXES)
    rule = sharding.TreePathShardingRule(*case.rules)
    return lambda: helper.match_sharding_rule(rule, case.tree)


OURS: dict[str, Callable[[Case], Call]] = {
    "floor": floor,
    "**flax_layoutmap**, cold": cold,
    "**flax_layoutmap**, cold, with building the map": cold_with_map,
    "**flax_layoutmap**, repeated call": repeated,
    "flax_layoutmap, `resolve` alone, cold": resolve,
}
OTHERS: dict[str, Callable[[Case], Call]] = {
    "Keras `LayoutMap`": keras,
    "eformer `match_partition_rules`": eformer,
    "scalax `TreePathShardingRule`": scalax,
}


# ------------------------------------------------------------------------- measuring


def cpu_seconds(prepare: Callable[[Case], Call], case: Case) -> float:
    """CPU seconds of one call, cold."""
    matching._compiled.cache_clear()
    call = prepare(case)
    re.purge()
    gc.collect()
    gc.freeze()  # the trees stay, so the next collection need not look at them
    start = time.thread_time()
    call()
    return time.thread_time() - start


def measure(
    rows: dict[str, Callable[[Case], Call]], case: Case, repeats: int, limit: float
) -> dict[str, float]:
    """Median seconds of each row; another row goes first in each round."""
    samples: dict[str, list[float]] = {name: [] for name in rows}
    # A millisecond needs more rounds than a second.
    for turn in range(repeats * min(5, max(1, 30_000 // case.size))):
        names = list(rows)
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            spent = samples[name]
            if not spent or sum(spent) + spent[-1] <= limit:
                spent.append(cpu_seconds(rows[name], case))
    return {name: statistics.median(seconds) for name, seconds in samples.items()}


def specs(tree: Any) -> list[tuple[Any, ...]]:
    """The specs of a tree of shardings or specs, without trailing `None`."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
    entries = [tuple(getattr(leaf, "spec", leaf)) for leaf in leaves]
    return [spec[:-1] if spec[-1:] == (None,) else spec for spec in entries]


def usable(case: Case) -> dict[str, Callable[[Case], Call]]:
    """The other libraries that can be imported, once their specs equal ours."""
    rows = {}
    ours = specs(layout_map(case).shardings(case.tree))
    for name, prepare in OTHERS.items():
        try:
            call = prepare(case)
        except (ImportError, AttributeError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        if specs(call()) != ours:
            raise RuntimeError(f"{name}: some specs differ from ours ({case.kind})")
        rows[name] = prepare
    return rows


def three_digits(value: float) -> str:
    """A number for people."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def measure_kind(kind: str, options: argparse.Namespace) -> None:
    """Print the rows of one kind of tree."""
    columns = list(itertools.product(options.sizes, options.rules))
    others = usable(Case(kind, 300, 10)) if options.peers else {}
    rows = OURS | others
    cells: dict[str, list[str]] = {name: [] for name in rows}
    last: dict[tuple[str, int], tuple[float, int]] = {}  # seconds, and of which size
    for size, count in columns:
        print(f"{kind}, {size:,} leaves, {count:,} rules", file=sys.stderr)
        gc.unfreeze()
        case = Case(kind, size, count)
        wanted = dict(rows)
        for name in others:
            seconds, smaller = last.get((name, count), (0.0, 1))
            if seconds * size / smaller > options.limit:
                del wanted[name]
        medians = measure(wanted, case, options.repeats, options.limit)
        last |= {(name, count): (medians[name], size) for name in wanted}
        for name in rows:
            cell = ""
            if name in wanted:
                seconds, ratio = medians[name], medians[name] / medians["floor"]
                cell = f"{three_digits(seconds * 1000)} ms ({three_digits(ratio)}×)"
            cells[name].append(cell)
    for name, found in cells.items():
        print(f"| {kind} | {name} | " + " | ".join(found) + " |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    whole = {"type": int, "nargs": "+"}
    parser.add_argument("--sizes", **whole, default=[300, 3000, 30_000])
    parser.add_argument("--rules", **whole, default=[10, 100, 1000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=25.0)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    options.sizes.sort()
    gc.disable()
    # Most families match nothing, which our map warns of once per map.
    warnings.simplefilter("ignore", flm.LayoutWarning)
    versions = [f"Python {platform.python_version()}"]
    for package in ("jax", "flax", "keras", "eformer", "scalax"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{package} not installed")
    print(f"{datetime.date.today()}, {', '.join(versions)}\n")
    columns = itertools.product(options.sizes, options.rules)
    heads = [f"{size:,}, {count:,} rules" for size, count in columns]
    print("| tree | row | " + " | ".join(heads) + " |")
    print("|---|---|" + "--:|" * len(heads))
    for kind in KINDS:
        measure_kind(kind, options)


if __name__ == "__main__":
    main()
