"""Write `keras_*.json`: the results of the real Keras, for `tests/seeds/test_keras.py`.

Run by hand, where Keras is installed (its JAX backend), then where TensorFlow and
tf-keras are; the tests themselves need only the files:

    KERAS_BACKEND=jax python tests/golden/make_keras.py
    python tests/golden/make_keras.py tf-keras

Each line of a file is one vector: what is asked, and the answers. The questions are
read from the files and asked again; to add one, write its line with any answers. A
result of null: the original raised. Lookups have three meanings: `fullmatch` is asked
of Keras itself, `match` of tf-keras itself (which knows its layouts by their own
names), and `search`, which was the rule of Keras 3.0 to 3.13, of Keras's own
`__getitem__` with only the word `fullmatch` changed in its source.
"""

import ast
import contextlib
import importlib
import inspect
import json
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
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


def attempt(call: Callable[[], Any]) -> Any:
    """The result, or None where the original raises."""
    try:
        return call()
    except Exception:  # Of any kind: theirs are of many.
        return None


def lookup(vector: Vector, make: Callable[[Rules], Any]) -> Vector:
    """What a kind of map answers: axes, "none", or null where it raises."""
    asked, answers, hits = make(vector["rules"]), {}, {}
    for path in vector["answers"]:
        try:
            found = asked[path]
            answers[path] = "none" if found is None else axes_of(found)
        except ValueError as error:
            answers[path] = None
            listed = re.search(r"keys: (\[.*\])\. Please", str(error), re.DOTALL)
            assert listed is not None
            hits[path] = ast.literal_eval(listed[1])
    return {**vector, "answers": answers, "hits": hits}


def axes_of(layout: Any) -> Axes:
    """The axes of a layout of Keras or of tf-keras."""
    if hasattr(layout, "axes"):
        return list(layout.axes)
    return [None if spec == "unsharded" else spec for spec in layout.sharding_specs]


def ask_again(name: str, answered: Callable[[Vector], Vector]) -> None:
    """Writes a file anew, with the answers of today to its questions."""
    file = HERE / f"keras_{name}.json"
    vectors = [answered(vector) for vector in json.loads(file.read_text("utf-8"))]
    made = [json.dumps(vector, separators=(",", ":")) for vector in vectors]
    file.write_text("[\n" + ",\n".join(made) + "\n]\n", encoding="utf-8")
    print(f"{file.name}: {len(made)} vectors")


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

    ask_again("lookup", lambda v: lookup(v, make) if v["mode"] == "match" else v)


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

    def operation(vector: Vector) -> Vector:
        """Operations on a map, one after the other, and the keys it then has."""
        made = filled(vector["rules"])
        steps = [[call, answer(made, *call)] for call, _ in vector["steps"]]
        return {**vector, "steps": steps, "after": list(made)}

    def insertion(vector: Vector) -> Vector:
        """Values of all kinds; what the map then has, and the caller's own layout."""
        spec = jax.sharding.PartitionSpec(None, "model")
        named = jax.sharding.NamedSharding(mesh.backend_mesh, spec)
        other = mesh_of((8,), ("model",))
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
        made = kd.LayoutMap(mesh if vector["on"] == "mesh" else None)
        value = dict(values)[vector["kind"]]
        before = getattr(value, "device_mesh", None)

        def insert() -> Any:
            made["a"] = value
            return repr(made["a"].axes)

        return {
            **vector,
            "axes": attempt(insert),
            "after": len(made),
            "has_mesh": bool(len(made)) and made["a"].device_mesh is not None,
            "changed": getattr(value, "device_mesh", None) is not before,
        }

    def bad_key(vector: Vector) -> Vector:
        """A key that is no pattern: what is stored, and what a lookup then does."""
        made = kd.LayoutMap(mesh)
        stored = answer(made, "set", vector["key"], ["model"])
        found = attempt(lambda: made["other"] or "none")
        return {**vector, "stored": stored, "lookup": found}

    # ------------------------------------------------------- DeviceMesh, TensorLayout

    def mesh_vector(vector: Vector) -> Vector:
        shape, axes, devices = vector["arguments"]
        made = attempt(lambda: kd.DeviceMesh(shape, axes, devices=devices))
        grid = attempt(lambda: made.backend_mesh)
        return {
            **vector,
            "made": made is not None,
            "shape": made and list(made.shape),
            "axis_names": made and list(made.axis_names),
            "ids": grid
            and np.vectorize(lambda device: device.id)(grid.devices).tolist(),
            "auto": grid and all("Auto" in str(kind) for kind in grid.axis_types),
        }

    def layout_vector(vector: Vector) -> Vector:
        axes: Any = vector["axes"]
        if isinstance(axes, list):
            axes = [tuple(part) if isinstance(part, list) else part for part in axes]
        late = attempt(lambda: kd.TensorLayout(axes))
        now = attempt(lambda: kd.TensorLayout(axes, mesh))

        def inject() -> Any:
            late.device_mesh = mesh
            return list(late.axes)

        bare = attempt(lambda: kd.TensorLayout(axes).backend_layout)
        return {
            **vector,
            "without_mesh": late and list(late.axes),
            "with_mesh": now and list(now.axes),
            "late_mesh": attempt(inject),
            "spec": now and attempt(lambda: list(now.backend_layout.spec)),
            "backend_without_mesh": bare and "made",
        }

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

    def tensor(vector: Vector) -> Vector:
        layout = kd.TensorLayout(tuple(vector["axes"]), mesh_of(*vector["mesh"]))
        size = int(np.prod(vector["shape"]))
        value = np.arange(size, dtype=np.float32).reshape(vector["shape"])

        def put(x: Any) -> Any:
            return kd.distribute_tensor(x, layout)

        eager = attempt(lambda: indices(put(value)))
        jitted = attempt(lambda: indices(jit_of(put)(value)))
        return {**vector, "eager": eager, "jit": jitted}

    def value_vector(vector: Vector) -> Vector:
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
        rows = {name: (value, given) for name, value, given in kinds}
        value, given = rows[vector["kind"]]

        def put() -> Any:
            out = kd.distribute_tensor(value, given)
            return [indices(leaf) for leaf in jax.tree.leaves(out)]

        def jitted() -> Any:
            out = jit_of(lambda x: kd.distribute_tensor(x, given))(value)
            return [indices(leaf) for leaf in jax.tree.leaves(out)]

        return {**vector, "eager": attempt(put), "jit": attempt(jitted)}

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
    optimizers: dict[str, Callable[[], Any]] = {
        "adam": lambda: keras.optimizers.Adam(0.1),
        "sgd momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        "lion": lambda: keras.optimizers.Lion(0.1),
        "adafactor": lambda: keras.optimizers.Adafactor(0.1),
    }

    @contextlib.contextmanager
    def under(rules: Rules, on: Any) -> Iterator[Any]:
        """Keras's scope of these rules, with all names counted from the start."""
        keras.utils.clear_session()
        parallel = kd.ModelParallel(layout_map=filled(rules, on=mesh_of(*on)))
        with parallel.scope():
            yield parallel

    def spec_of(variable: Any) -> Axes:
        spec = tuple(variable.value.sharding.spec)
        return [*spec, *[None] * (len(variable.shape) - len(spec))]

    def built(vector: Vector) -> Vector:
        """The variables of a model, and the state of its optimizers."""
        with under(vector["rules"], vector["mesh"]):
            model = attempt(models[vector["model"]])
            variables = model and [
                [v.path, list(v.shape), spec_of(v), indices(v.value)]
                for v in model.variables
                if "seed_generator" not in v.path
            ]
            slots = {
                kind: model and attempt(lambda: slots_of(make(), model))  # noqa: B023
                for kind, make in optimizers.items()
            }
            return {**vector, "variables": variables, "slots": slots}

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

    def data(vector: Vector) -> Vector:
        lib: Any = importlib.import_module("keras.src.backend.jax.distribution_lib")
        batch, shape = vector["batch"], vector["shape"]
        options = {} if batch is None else {"batch_dim_name": batch}

        def place() -> Any:
            empty = kd.LayoutMap(mesh_of(*vector["mesh"]))
            parallel = kd.ModelParallel(layout_map=empty, **options)
            layout = parallel.get_data_layout(tuple(shape))
            rows = np.zeros(shape, np.float32)
            named = parallel.batch_dim_name
            return indices(lib.distribute_data_input(rows, layout, named))

        return {**vector, "placed": attempt(place)}

    def outputs(vector: Vector) -> Vector:
        """Layouts of the outputs of two layers, d1 and d2."""

        def run() -> Any:
            first = layers.Dense(16, name="d1")
            second = layers.Dense(4, name="d2")
            x = np.ones((8, 8), np.float32)
            return [indices(first(x)), indices(second(x))]

        with under(vector["rules"], [(2, 4), ("data", "model")]):
            return {**vector, "outputs": attempt(run)}

    def devices(vector: Vector) -> Vector:
        kind = vector["type"]
        return {
            **vector,
            "list": attempt(lambda: kd.list_devices(kind)),
            "count": attempt(lambda: kd.get_device_count(kind)),
        }

    def of_a_mode(vector: Vector) -> Vector:
        kinds = {"fullmatch": kd.LayoutMap, "search": searching}
        if vector["mode"] not in kinds:
            return vector
        return lookup(vector, lambda rules: filled(rules, kinds[vector["mode"]]))

    ask_again("devices", devices)
    ask_again("lookup", of_a_mode)
    ask_again("operations", operation)
    ask_again("insertions", insertion)
    ask_again("bad_keys", bad_key)
    ask_again("meshes", mesh_vector)
    ask_again("layouts", layout_vector)
    ask_again("tensors", tensor)
    ask_again("values", value_vector)
    ask_again("data", data)
    ask_again("outputs", outputs)
    ask_again("models", built)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    tf_keras() if sys.argv[1:] == ["tf-keras"] else keras_3()
