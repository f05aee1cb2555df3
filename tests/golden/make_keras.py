"""Write `keras_*.json`: the results of the real Keras, for `tests/seeds/test_keras.py`.

Run by hand, where Keras is installed (its JAX backend), then where TensorFlow and
tf-keras are; the tests themselves need only the files:

    KERAS_BACKEND=jax python tests/golden/make_keras.py
    python tests/golden/make_keras.py tf-keras

Each line of a file is one vector. A result of null: the original raised. Lookups have
three meanings: `fullmatch` is asked of Keras itself, `match` of tf-keras itself (which
knows its layouts by their own names), and `search`, which was the rule of Keras 3.0 to
3.13, of Keras's own `__getitem__` with only the word `fullmatch` changed in its source.
"""

import ast
import contextlib
import importlib
import inspect
import itertools
import json
import os
import random
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"

HERE = Path(__file__).parent
Vector = dict[str, Any]
Axes = list[str | None]
Rules = list[tuple[str, Axes]]

MESHES: list[list[Any]] = [[[2, 4], ["data", "model"]], [[4, 2], ["data", "model"]]]
LAYOUTS: list[Axes] = [
    [None, "model"],
    ["model", None],
    ["model"],
    ["data", "model"],
    [None, None, None, "model"],
    ["data", None, "model"],
]
PATHS = [
    "dense/kernel",
    "dense/bias",
    "dense_1/kernel",
    "dense_10/kernel",
    "dense_1.kernel",
    "dense_1.bias",
    "my_model/conv2d_123/kernel",
    "my_model/conv2d_123/bias",
    "my_model/conv3d_1/kernel",
    "d1/output",
    "d1",
    "/model/layer/tensor",
    "token_embedding/embeddings",
    "gemma_backbone/token_embedding/embeddings",
    "decoder_block_0/attention/query/kernel",
    "decoder_block_0/attention/key/kernel",
    "decoder_block_1/attention/value/kernel",
    "decoder_block_11/attention/attention_output/kernel",
    "decoder_block_0/ffw_gating/kernel",
    "decoder_block_0/ffw_gating_2/kernel",
    "decoder_block_0/ffw_linear/kernel",
    "decoder_block_0/ffw_linear/lora_kernel_a",
    "layers/0/mlp/up/kernel",
    "layers/12/mlp/up/kernel",
    "layers[0]/w(1)",
    "a+b/kernel",
    "x|y",
    "kernel",
    "KERNEL",
    "adam/dense_kernel_momentum",
    "ds/0/kernel\n",
    "",
]
# The documentation of Keras 3.0 to 3.13, and that of today, with the paths they ask.
PAGE = ["dense.*kernel", "dense.*bias", "conv2d.*kernel", "conv2d.*bias"]
PAGE_LAYOUTS: list[Axes] = [[None, "model"], ["model"], LAYOUTS[4], ["model"]]
PAGE_PATHS = [
    *("dense_1.kernel", "dense_1.bias", "dense_2.kernel", "dense_2.bias"),
    *("my_model/conv2d_123/kernel", "my_model/conv2d_123/bias"),
    *("my_model/conv3d_1/kernel", "my_model/conv3d_1/bias"),
]
# The shape of keras-hub's rules for Gemma.
GEMMA: Rules = [
    ("token_embedding/embeddings", ["model", "data"]),
    ("decoder_block.*attention.*(query|key|value).kernel", ["model", "data", None]),
    ("decoder_block.*attention_output.kernel", ["model", None, "data"]),
    ("decoder_block.*ffw_gating.kernel", ["data", "model"]),
    ("decoder_block.*ffw_gating_2.kernel", ["data", "model"]),
    ("decoder_block.*ffw_linear.kernel", ["model", "data"]),
]
CHOSEN: list[Rules] = [
    list(zip(PAGE, PAGE_LAYOUTS, strict=True)),
    [(f".*{key}", axes) for key, axes in zip(PAGE, PAGE_LAYOUTS, strict=True)],
    GEMMA,
    [],
    [(".*", [None])],
    [("", ["model"])],
    # An exact key wins over patterns, also where it is a pattern itself.
    [("dense/kernel", ["model", None]), ("dense.*", [None, "model"])],
    [("dense.*", [None, "model"]), ("dense/kernel", ["model", None])],
    [("dense_1.kernel", ["model"]), ("dense_1/kernel", [None, "model"])],
    [("d1|d1/output", ["model"]), ("d1", ["data"])],
    # Several that agree, and several that do not.
    [(".*kernel", ["model"]), (".*dense.*", ["model"])],
    [(".*kernel", ["model"]), (".*dense.*", ["data"])],
    [("dense", ["model"]), ("kernel", ["data"]), ("1", ["model"])],
    # Special characters, plain and escaped.
    [("layers[0]/w(1)", ["model"]), ("a+b/kernel", ["data"]), ("x|y", [None])],
    [(re.escape("layers[0]/w(1)"), ["model"]), (re.escape("a+b/kernel"), ["data"])],
    [("x|y", ["model"]), ("y", ["data"])],
    [("(?i)kernel", ["model"]), ("^d1$", ["data"])],
    [("^dense", ["model"]), ("kernel$", ["data"])],
    [(r"layers/\d/.*", ["model"]), (r"layers/\d\d/.*", ["data"])],
    [(r"(?!.*lora).*kernel.*", ["model"]), (".*lora.*", ["data"])],
    [(r".*(?<!_2)/kernel", ["model"])],
    [(r"(?s).*", ["model"])],
    [(r".*kernel\n?", ["model"])],
    [("/model/layer/tensor", ["data", "model"]), ("/model/layer/other", ["model"])],
    [("(query|key|value)/kernel", [None, "model"]), ("output", ["model", None])],
    [(r".*/(\w+)_\1.*", ["model"]), (r"[a-z]+/[a-z]+", ["data"])],
]


def attempt(call: Callable[[], Any]) -> Any:
    """The result, or None where the original raises."""
    try:
        return call()
    except Exception:  # Of any kind: theirs are of many.
        return None


def some_pattern(path: str, random_: random.Random) -> str:
    """A pattern that looks like those that people write for such a path."""
    parts = [re.escape(part) if part.isidentifier() else part for part in path.split()]
    path = parts[0] if parts else "kernel"
    words = re.findall(r"[A-Za-z]+", path) or ["a"]
    first, last = words[0], words[-1]
    generic = re.sub(r"\d+", r"\\d+", re.sub(r"[^\w/]", ".", path))
    return random_.choice(
        [
            path if attempt(lambda: re.compile(path)) else re.escape(path),
            generic,
            f".*{last}",
            f"{first}.*{last}",
            f"{first}.*",
            f"{last}$",
            f"^{first}",
            f".*({last}|bias|scale)",
            f"({first}|{random_.choice(words)}).{last}",
            generic.replace("/", "."),
            f".*/{last}",
            f"[^/]*/{last}",
            f"{first}(_\\d+)?/.*",
            last,
        ]
    )


def lookup_maps() -> Iterator[tuple[Rules, list[str]]]:
    """Rules, and the paths that are asked."""
    yield CHOSEN[0], PAGE_PATHS
    yield CHOSEN[1], PAGE_PATHS
    for rules in CHOSEN:
        yield rules, PATHS
    random_ = random.Random(1)
    for _ in range(60):
        keys = dict.fromkeys(
            some_pattern(random_.choice(PATHS), random_)
            for _ in range(random_.randint(1, 6))
        )
        few = random_.sample(LAYOUTS, random_.randint(1, len(LAYOUTS)))
        rules = [(key, random_.choice(few)) for key in keys]
        yield rules, random_.sample(PATHS, 12)


def lookups(mode: str, make: Callable[[Rules], Any]) -> Iterator[Vector]:
    """What a kind of map answers: axes, "none", or null where it raises."""
    for rules, paths in lookup_maps():
        asked, answers, hits = make(rules), {}, {}
        for path in paths:
            try:
                found = asked[path]
                answers[path] = "none" if found is None else axes_of(found)
            except ValueError as error:
                answers[path] = None
                listed = re.search(r"keys: (\[.*\])\. Please", str(error), re.DOTALL)
                assert listed is not None
                hits[path] = ast.literal_eval(listed[1])
        yield {"mode": mode, "rules": rules, "answers": answers, "hits": hits}


def axes_of(layout: Any) -> Axes:
    """The axes of a layout of Keras or of tf-keras."""
    if hasattr(layout, "axes"):
        return list(layout.axes)
    return [None if spec == "unsharded" else spec for spec in layout.sharding_specs]


def write(name: str, vectors: Iterable[Vector], *, more: bool = False) -> None:
    made = [json.dumps(vector, separators=(",", ":")) for vector in vectors]
    file = HERE / f"keras_{name}.json"
    kept: list[str] = []
    if more:
        kept = file.read_text(encoding="utf-8").strip("[]\n").split(",\n")
        kept = [line for line in kept if json.loads(line)["mode"] != "match"]
    text = "[\n" + ",\n".join([*kept, *made]) + "\n]\n"
    file.write_text(text, encoding="utf-8")
    print(f"{file.name}: {len(made)} vectors, {len(text) >> 10} KiB")


def tf_keras() -> None:
    """The lookups of tf-keras, which takes layouts of DTensor only."""
    tf: Any = importlib.import_module("tensorflow")
    dtensor: Any = tf.experimental.dtensor
    module: Any = importlib.import_module("tf_keras.dtensor.experimental")
    cpu = tf.config.list_physical_devices("CPU")[0]
    virtual = [tf.config.LogicalDeviceConfiguration()] * 8
    tf.config.set_logical_device_configuration(cpu, virtual)
    devices = [f"CPU:{at}" for at in range(8)]
    mesh = dtensor.create_mesh([("data", 2), ("model", 4)], devices=devices)

    def make(rules: Rules) -> Any:
        made = module.LayoutMap(mesh)
        for key, axes in rules:
            specs = [axis or dtensor.UNSHARDED for axis in axes]
            made[key] = dtensor.Layout(specs, mesh)
        return made

    write("lookup", lookups("match", make), more=True)


def keras_3() -> None:
    """All that Keras itself is asked."""
    import jax
    import numpy as np

    jax.config.update("jax_num_cpu_devices", 8)
    keras: Any = importlib.import_module("keras")
    kd: Any = keras.distribution
    jit_of: Any = jax.jit
    print("keras", keras.__version__, "jax", jax.__version__)

    # ------------------------------------------------------------------- LayoutMap

    source = textwrap.dedent(inspect.getsource(kd.LayoutMap.__getitem__))
    assert source.count("re.fullmatch(") == 1
    namespace: dict[str, Any] = {"re": re}
    exec(source.replace("re.fullmatch(", "re.search("), namespace)
    searching = type(
        "LayoutMap", (kd.LayoutMap,), {"__getitem__": namespace["__getitem__"]}
    )

    def mesh_of(shape: Any, names: Any) -> Any:
        return kd.DeviceMesh(shape, names)

    mesh = mesh_of((2, 4), ("data", "model"))

    def filled(rules: Rules, kind: Any = kd.LayoutMap, on: Any = mesh) -> Any:
        made = kind(on)
        for key, axes in rules:
            made[key] = tuple(axes)
        return made

    def answer(made: Any, op: str, *arguments: Any) -> Any:
        """What an operation gives, as JSON."""

        def shown(value: Any) -> Any:
            if value is None:
                return "none"
            return axes_of(value) if isinstance(value, kd.TensorLayout) else value

        try:
            if op == "set":
                made[arguments[0]] = tuple(arguments[1])
                return "done"
            if op == "update":
                made.update({key: tuple(axes) for key, axes in arguments[0]})
                return "done"
            if op == "setdefault":
                return shown(made.setdefault(arguments[0], tuple(arguments[1])))
            if op == "del":
                del made[arguments[0]]
                return "done"
            if op in ("pop", "get"):
                return shown(getattr(made, op)(*arguments))
            if op == "item":
                return shown(made[arguments[0]])
            if op == "in":
                return arguments[0] in made
            if op == "len":
                return len(made)
            if op in ("iter", "keys"):
                return list(made if op == "iter" else made.keys())
            if op == "values":
                return [axes_of(value) for value in made.values()]
            if op == "items":
                return [[key, axes_of(value)] for key, value in made.items()]
            if op == "popitem":
                key, value = made.popitem()
                return [key, axes_of(value)]
            assert op == "clear"
            made.clear()
            return "done"
        except KeyError:
            return "KeyError"
        except ValueError:
            return "ValueError"

    def operations() -> Iterator[Vector]:
        """One operation on a map, and the keys it then has."""
        rules: Rules = [(".*kernel", [None, "model"]), ("d/bias", ["model"])]
        calls: list[list[Any]] = [[op] for op in ("len", "iter", "keys", "values")]
        calls += [[op] for op in ("items", "popitem", "clear")]
        for key in (".*kernel", "d/bias", "d/kernel", "none", ""):
            calls += [["get", key], ["item", key], ["in", key], ["del", key]]
            calls += [["pop", key], ["pop", key, 7], ["get", key, 7]]
            calls += [["set", key, ["data"]], ["setdefault", key, ["data"]]]
            calls += [["update", [[key, ["data"]], ["new", ["model"]]]]]
        for start, call in itertools.product((rules, []), calls):
            made = filled(start)
            given = answer(made, *call)
            yield {"rules": start, "steps": [[call, given]], "after": list(made)}

    def sequences() -> Iterator[Vector]:
        """Random operations, of those that are lawful, one after the other."""
        random_ = random.Random(2)
        keys = [".*kernel", "d/bias", ".*bias", "d/kernel", "x.*", "x"]
        for _ in range(60):
            made, steps = kd.LayoutMap(mesh), []
            for at in range(14):
                key = random_.choice(keys)
                # Each layout is another one, so that no two rules agree.
                axes = [None] * at + ["model"]
                call = random_.choice(
                    [["set", key, axes], ["set", key, axes], ["get", key]]
                    + [["item", "d/kernel"], ["item", "x/bias"], ["del", key]]
                    + [["pop", key], ["len"], ["iter"], ["items"]]
                )
                steps.append([call, answer(made, *call)])
            yield {"rules": [], "steps": steps, "after": list(made)}

    def insertions() -> Iterator[Vector]:
        """Values of all kinds; what the map then has, and the caller's own layout."""
        spec = jax.sharding.PartitionSpec(None, "model")
        named = jax.sharding.NamedSharding(mesh.backend_mesh, spec)
        other = mesh_of((8,), ("model",))
        for name, on in (("mesh", mesh), ("no mesh", None)):
            values: list[tuple[str, Any]] = [
                ("tuple", (None, "model")),
                ("empty tuple", ()),
                ("list", [None, "model"]),
                ("layout", kd.TensorLayout((None, "model"))),
                ("layout on its mesh", kd.TensorLayout((None, "model"), mesh)),
                ("layout on another mesh", kd.TensorLayout((None, "model"), other)),
                ("spec", spec),
                ("sharding", named),
                ("text", "model"),
                ("none", None),
                ("number", 3),
                ("unknown axis", (None, "x")),
                ("layout of an unknown axis", kd.TensorLayout(("x",))),
                ("two axes on a dim", (("data", "model"), None)),
                ("an axis twice", ("model", "model")),
            ]
            for kind, value in values:
                made = kd.LayoutMap(on)
                before = getattr(value, "device_mesh", None)

                def insert(made: Any = made, value: Any = value) -> Any:
                    made["a"] = value
                    return repr(made["a"].axes)

                yield {
                    "on": name,
                    "kind": kind,
                    "axes": attempt(insert),
                    "after": len(made),
                    "has_mesh": bool(len(made)) and made["a"].device_mesh is not None,
                    "changed": getattr(value, "device_mesh", None) is not before,
                }

    def bad_keys() -> Iterator[Vector]:
        """Keys that are no patterns: what is stored, and what a lookup then does."""
        for key in ("dense(", "[", "*", "a**", "(?P<x", r"\\", "a{2,1}", "(?x", "+a"):
            made = kd.LayoutMap(mesh)
            stored = answer(made, "set", key, ["model"])
            found = attempt(lambda: made["other"] or "none")  # noqa: B023
            yield {"key": key, "stored": stored, "lookup": found}

    # ------------------------------------------------------- DeviceMesh, TensorLayout

    def meshes() -> Iterator[Vector]:
        names = list("abcd")
        cases: list[tuple[Any, Any, Any]] = [
            ([2, 4], ["data", "model"], None),
            ([8], ["x"], None),
            ([2, 2, 2], ["a", "b", "c"], None),
            ([1, 8], ["a", "b"], None),
            ([], [], None),
            ([8], [], None),
            ([], ["x"], None),
            (None, ["x"], None),
            ([8], None, None),
            ([8], ["a", "b"], None),
            ([2, 4], ["a"], None),
            ([4], ["a"], None),
            ([16], ["a"], None),
            ([2, 3], ["a", "b"], None),
            ([-1], ["a"], None),
            ([2, -1], ["a", "b"], None),
            ([0], ["a"], None),
            (8, ["a"], None),
            ([8], "a", None),
            ([2, 4], "ab", None),
            ([2, 4], ["a", "a"], None),
            ([4], ["a"], [0, 1, 2, 3]),
            ([2, 2], ["a", "b"], [7, 5, 3, 1]),
            ([2], ["a"], [0, 0]),
            ([2], ["a"], [0]),
            ([2], ["a"], ["cpu:99", "cpu:1"]),
            ([2], ["a"], ["gpu:0", "gpu:1"]),
            ([2], ["a"], ["CPU:1", "cpu:0"]),
            ([2], ["a"], ["nonsense", "cpu:0"]),
        ]
        random_ = random.Random(3)
        for _ in range(60):
            rank = random_.randint(1, 4)
            sizes = (1, 2, 4) if random_.random() < 0.8 else (1, 2, 3)
            shape = [random_.choice(sizes) for _ in range(rank)]
            some = random_.choice((None, None, int(np.prod(shape)), 8, 4))
            ids = None
            if some is not None:
                ids = random_.sample(range(8), min(8, some))
            if some is None and random_.random() < 0.5 and 8 % np.prod(shape) == 0:
                shape[0] *= 8 // int(np.prod(shape))
            cases.append((shape, names[: random_.choice((rank, rank, 2))], ids))
        for shape, axes, ids in cases:
            devices = ids and [f"cpu:{at}" if type(at) is int else at for at in ids]

            def make(shape: Any = shape, axes: Any = axes, devices: Any = devices):
                return kd.DeviceMesh(shape, axes, devices=devices)

            made = attempt(make)
            grid = attempt(lambda: made.backend_mesh)  # noqa: B023
            yield {
                "arguments": [shape, axes, devices],
                "made": made is not None,
                "shape": made and list(made.shape),
                "axis_names": made and list(made.axis_names),
                "ids": grid
                and np.vectorize(lambda device: device.id)(grid.devices).tolist(),
                "auto": grid and all("Auto" in str(kind) for kind in grid.axis_types),
            }

    def layouts() -> Iterator[Vector]:
        choices: list[Any] = [None, None, "data", "model", "x", ["data", "model"]]
        cases: list[Any] = ["model", "x", "", None, 3, [], ["data", "data"], [["data"]]]
        for rank in (1, 2):
            cases += [list(c) for c in itertools.product(choices[1:], repeat=rank)]
        random_ = random.Random(4)
        for _ in range(40):
            cases.append(
                [random_.choice(choices) for _ in range(random_.choice((3, 4)))]
            )
        for axes in cases:
            given = axes
            if isinstance(axes, list):
                given = [tuple(a) if isinstance(a, list) else a for a in axes]
            late = attempt(lambda: kd.TensorLayout(given))  # noqa: B023
            vector: Vector = {"axes": axes, "without_mesh": late and list(late.axes)}
            now = attempt(lambda: kd.TensorLayout(given, mesh))  # noqa: B023
            vector["with_mesh"] = now and list(now.axes)

            def inject(late: Any = late) -> Any:
                late.device_mesh = mesh
                return list(late.axes)

            vector["late_mesh"] = attempt(inject)
            vector["spec"] = now and attempt(
                lambda: list(now.backend_layout.spec)  # noqa: B023
            )
            bare = attempt(lambda: kd.TensorLayout(given).backend_layout)  # noqa: B023
            vector["backend_without_mesh"] = bare and "made"
            yield vector

    # -------------------------------------------------------------- distribute_tensor

    def indices(array: Any) -> list[Any]:
        """Per device, by its id: start and end of its part in each dim."""
        shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
        return [
            [
                list(part.indices(size)[:2])
                for part, size in zip(shard.index, array.shape, strict=True)
            ]
            for shard in shards
        ]

    def tensors() -> Iterator[Vector]:
        random_ = random.Random(5)
        cases: list[tuple[int, Axes, list[int]]] = [
            (0, [None, "model"], [8, 8]),
            (0, ["model"], [8, 8]),  # of lower rank
            (0, ["data", "model"], [8]),  # of higher rank
            (0, [None, None], [8]),
            (0, ["model"], []),
            (0, [], [4, 4]),
            (0, [], []),
            (0, [None], [3]),
            (0, ["model", None], [6, 8]),  # indivisible
            (0, [None, "model"], [8, 2]),
            (0, ["data", "model"], [0, 4]),
            (0, ["data", "model"], [1, 4]),
        ]
        for at, axes, shape in itertools.product(
            (0, 1), LAYOUTS[:4], ([8, 8], [8, 4], [16, 8], [4, 6], [8], [2, 8, 4])
        ):
            cases.append((at, axes, shape))
        for _ in range(40):
            rank = random_.randint(1, 4)
            axes = [*random_.sample(["data", "model", None, None, None], rank)]
            shape = [random_.choice((1, 2, 4, 4, 8, 6)) for _ in range(rank)]
            cases.append((random_.randint(0, 1), axes, shape))
        for at, axes, shape in cases:
            layout = kd.TensorLayout(tuple(axes), mesh_of(*MESHES[at]))
            value = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)

            def put(x: Any, layout: Any = layout) -> Any:
                return kd.distribute_tensor(x, layout)

            yield {
                "mesh": MESHES[at],
                "axes": axes,
                "shape": shape,
                "eager": attempt(lambda: indices(put(value))),  # noqa: B023
                "jit": attempt(lambda: indices(jit_of(put)(value))),  # noqa: B023
            }

    def values() -> Iterator[Vector]:
        """What else is passed to distribute_tensor, and comes back as arrays."""
        layout = kd.TensorLayout(("data", "model"), mesh)
        ones = np.ones((4, 4), np.float32)
        kinds: list[tuple[str, Any, Any]] = [
            ("numpy", ones, layout),
            ("a pair", (ones, ones), layout),
            ("none", None, layout),
            ("no layout", ones, None),
            ("a tuple", ones, ("data", "model")),
            ("a spec", ones, jax.sharding.PartitionSpec("data")),
            ("a layout without mesh", ones, kd.TensorLayout(("data", "model"))),
            ("a sharding", ones, layout.backend_layout),
        ]
        for name, value, given in kinds:

            def put(value: Any = value, given: Any = given) -> Any:
                out = kd.distribute_tensor(value, given)
                return [indices(leaf) for leaf in jax.tree.leaves(out)]

            def jitted(value: Any = value, given: Any = given) -> Any:
                out = jit_of(lambda x: kd.distribute_tensor(x, given))(value)
                return [indices(leaf) for leaf in jax.tree.leaves(out)]

            yield {"kind": name, "eager": attempt(put), "jit": attempt(jitted)}

    # ------------------------------------------------------------- ModelParallel, Data

    layers: Any = keras.layers

    class Block(layers.Layer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.norm = layers.LayerNormalization(name="norm")
            self.attention = layers.MultiHeadAttention(4, 4, name="attention")
            self.gate = layers.Dense(16, name="ffw_gating")
            self.down = layers.Dense(8, name="ffw_linear")

        def call(self, x: Any) -> Any:
            y = self.norm(x)
            return x + self.down(self.gate(self.attention(y, y)))

    class Subclass(keras.Model):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.embed = layers.Embedding(16, 8, name="token_embedding")
            self.blocks = [Block(name=f"decoder_block_{at}") for at in range(2)]
            self.heads = [layers.Dense(8) for _ in range(2)]

        def call(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return [head(x) for head in self.heads]

    def functional() -> Any:
        given = layers.Input((8,))
        x = layers.Dense(16, name="d1")(given)
        return keras.Model(given, layers.Dense(4, name="d2")(x), name="fun")

    def nested() -> Any:
        inside = layers.Input((8,))
        inner = keras.Model(inside, layers.Dense(8, name="i1")(inside), name="inner")
        rest = keras.Sequential([layers.Input((8,)), layers.Dense(8, name="s1")])
        rest.name = "rest"
        given = layers.Input((8,))
        return keras.Model(given, rest(inner(given)), name="outer")

    def pictures() -> Any:
        return keras.Sequential(
            [
                layers.Input((8, 8, 4)),
                layers.Conv2D(8, 3, name="conv"),
                layers.BatchNormalization(name="bn"),
                layers.DepthwiseConv2D(3, name="depthwise"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(8, name="head"),
            ],
            name="pictures",
        )

    def subclass() -> Any:
        model = Subclass(name="mo")
        model(np.zeros((2, 4), np.int32))
        return model

    def einsum() -> Any:
        given = layers.Input((4, 8))
        x = layers.EinsumDense("btd,dhk->bthk", (None, 4, 2), name="query")(given)
        return keras.Model(given, layers.EinsumDense("bthk,hkd->btd", (None, 8))(x))

    models: dict[str, Callable[[], Any]] = {
        "functional": functional,
        "nested": nested,
        "pictures": pictures,
        "subclass": subclass,
        "einsum": einsum,
    }
    rule_sets: dict[str, list[Rules]] = {
        "functional": [
            [],
            [("d1/kernel", [None, "model"]), ("d1/bias", ["model"])],
            [(".*kernel", ["model", None]), (".*bias", [None])],
            [("d1/kernel", ["data", "model"]), ("d.*bias", ["data"])],
            [("d.*", ["model"]), ("d1/kernel", [None, "data"])],  # d2/kernel: a prefix
            [("kernel", ["model", None]), ("fun/d1/kernel", ["model", None])],
        ],
        "nested": [
            [("inner/i1/kernel", [None, "model"])],
            [("inner.*kernel", [None, "model"]), ("rest/s1/.*bias", ["model"])],
            [("i1/kernel", [None, "model"]), ("outer/.*kernel", ["model", None])],
        ],
        "pictures": [
            [
                ("conv/kernel", [None, None, None, "model"]),
                (".*(gamma|beta)", ["data"]),
            ],
            [(".*conv.*kernel", [None, None, "model", None])],
            [("head/.*", ["model"]), ("bn/moving_.*", ["model"])],
        ],
        "subclass": [
            [("mo/" + key if "/" in key else ".*" + key, a) for key, a in GEMMA],
            GEMMA,
            [
                (".*embeddings", ["model", None]),
                (".*attention/(query|key|value)/kernel", [None, "model", None]),
                (".*attention/attention_output/kernel", ["model", None, None]),
                (r"mo/dense(_\d+)?/kernel", [None, "model"]),
            ],
        ],
        "einsum": [
            [
                ("query/kernel", [None, "model", None]),
                ("einsum.*", [None, "data", None]),
            ]
        ],
    }
    optimizers: dict[str, Callable[[], Any]] = {
        "adam": lambda: keras.optimizers.Adam(0.1),
        "sgd momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        "lion": lambda: keras.optimizers.Lion(0.1),
        "adafactor": lambda: keras.optimizers.Adafactor(0.1),
    }

    @contextlib.contextmanager
    def under(rules: Rules, at: int) -> Iterator[Any]:
        """Keras's scope of these rules, with all names counted from the start."""
        keras.utils.clear_session()
        on = mesh_of(*MESHES[at])
        parallel = kd.ModelParallel(layout_map=filled(rules, on=on))
        with parallel.scope():
            yield parallel

    def spec_of(variable: Any) -> Axes:
        spec = tuple(variable.value.sharding.spec)
        return [*spec, *[None] * (len(variable.shape) - len(spec))]

    def built() -> Iterator[Vector]:
        """The variables of models, and the state of their optimizers."""
        for name, sets in rule_sets.items():
            for rules, at in itertools.product(sets, (0, 1)):
                with under(rules, at):
                    model = attempt(models[name])
                    vector: Vector = {"model": name, "rules": rules, "mesh": MESHES[at]}
                    variables = model.variables if model else []
                    random_state = ("seed_generator",)
                    vector["variables"] = model and [
                        [v.path, list(v.shape), spec_of(v), indices(v.value)]
                        for v in variables
                        if not any(word in v.path for word in random_state)
                    ]
                    slots: Vector = {}
                    for kind, make in optimizers.items():
                        slots[kind] = model and attempt(
                            lambda: slots_of(make(), model)  # noqa: B023
                        )
                    yield {**vector, "slots": slots}

    def slots_of(optimizer: Any, model: Any) -> Any:
        """Name of a slot → path of the parameter → the axes of its slot."""
        trained = model.trainable_variables
        optimizer.build(trained)
        slots: Vector = {}
        for name in ("momentums", "velocities"):
            found = getattr(optimizer, f"_{name}", getattr(optimizer, name, None))
            if found:
                slots[name] = {
                    own.path: spec_of(slot)
                    for own, slot in zip(trained, found, strict=True)
                }
        return slots

    def data() -> Iterator[Vector]:
        lib: Any = importlib.import_module("keras.src.backend.jax.distribution_lib")
        shapes: list[list[int]] = [[8], [8, 3], [16, 2, 2], [4, 4], [6, 2], [2, 8], []]
        for at, batch, shape in itertools.product(
            (0, 1), (None, "data", "model", "x"), shapes
        ):
            on = mesh_of(*MESHES[at])
            options = {} if batch is None else {"batch_dim_name": batch}

            def place(on: Any = on, options: Any = options, shape: Any = shape) -> Any:
                parallel = kd.ModelParallel(layout_map=kd.LayoutMap(on), **options)
                layout = parallel.get_data_layout(tuple(shape))
                rows = np.zeros(shape, np.float32)
                named = parallel.batch_dim_name
                return indices(lib.distribute_data_input(rows, layout, named))

            placed = attempt(place)
            yield {"mesh": MESHES[at], "batch": batch, "shape": shape, "placed": placed}

    def outputs() -> Iterator[Vector]:
        """Layouts of the outputs of two layers, d1 and d2."""
        sets: list[Rules] = [
            [],
            [("d1/output", ["data", "model"])],
            [("d2/output", ["model", None])],
            [("d./output", ["data", None])],
            [("d1/output", ["data", "model"]), ("d2/output", [None, "data"])],
            [(".*/output", [None, "model"])],
            [("d1/kernel", [None, "model"]), ("d1/output", ["model", None])],
            [("d1", ["data", None]), ("d2", ["data", None])],
            [("d1/output", ["data", "model"]), (".*output", ["data", "model"])],
            [("d1/output", ["data", "model"]), (".*outpu.", ["data", None])],
            [("d1.output", ["data", "model"])],
            [(".*output", ["data", None])],
            [("d1/output", ["data"])],  # of lower rank
            [("d1/output", ["data", None, None])],  # of higher rank
            [("d[12]/output", ["data", None]), ("d[2]/output", ["data", None])],
            [(".*d1.*", ["model"])],  # the kernel, the bias and the output
        ]
        for rules in sets:
            with under(rules, 0):

                def run() -> Any:
                    first = layers.Dense(16, name="d1")
                    second = layers.Dense(4, name="d2")
                    x = np.ones((8, 8), np.float32)
                    return [indices(first(x)), indices(second(x))]

                yield {"rules": rules, "outputs": attempt(run)}

    def devices() -> Iterator[Vector]:
        for kind in (None, "cpu", "CPU", "gpu", "tpu", "nonsense", ""):
            yield {
                "type": kind,
                "list": attempt(lambda: kd.list_devices(kind)),  # noqa: B023
                "count": attempt(lambda: kd.get_device_count(kind)),  # noqa: B023
            }

    write("devices", devices())
    ours = itertools.chain(
        lookups("fullmatch", filled),
        lookups("search", lambda rules: filled(rules, searching)),
    )
    write("lookup", ours)
    write("operations", itertools.chain(operations(), sequences()))
    write("insertions", insertions())
    write("bad_keys", bad_keys())
    write("meshes", meshes())
    write("layouts", layouts())
    write("tensors", tensors())
    write("values", values())
    write("data", data())
    write("outputs", outputs())
    write("models", built())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    tf_keras() if sys.argv[1:] == ["tf-keras"] else keras_3()
