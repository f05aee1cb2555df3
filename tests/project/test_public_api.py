"""The public API: names, `__module__`, docstrings and pickling."""

import ast
import importlib
import importlib.metadata
import inspect
import pickle
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

import flax_layoutmap as flm

ROOT = Path(__file__).parents[2]

CLASSES = [
    "DeviceMesh",
    "LayoutError",
    "LayoutMap",
    "LayoutWarning",
    "Resolution",
    "Rule",
    "RuleSet",
    "Suggestion",
    "TensorLayout",
]
FUNCTIONS = [
    "accumulate",
    "activation_scope",
    "create",
    "create_optimizer",
    "distribute_batch",
    "distribute_tensor",
    "jit",
    "layout_map_scope",
    "lint",
    "pad_batch",
    "relayout",
    "relayout_like",
    "reshard",
    "resolve",
    "suggest",
]
NAMESPACES = {
    "checkpoint": [
        "CheckpointInfo",
        "Checkpointer",
        "LeafInfo",
        "inspect",
        "mappings",
        "plan",
        "resolve",
        "restore",
        "restore_safetensors",
        "save",
        "save_safetensors",
        "verify",
    ],
    "draw": ["Drawing", "array", "mesh", "model"],
    "dtensor": [
        "call_with_layout",
        "check_layout",
        "copy_to_mesh",
        "default_mesh",
        "fetch_layout",
        "get_default_mesh",
        "is_distributed",
        "pack",
        "unpack",
    ],
    "errors": [
        "CheckpointError",
        "LayoutError",
        "LayoutWarning",
        "MeshError",
        "ProcessError",
        "ResolveError",
        "RuleError",
        "StructureError",
    ],
    "keras": ["get_device_count", "initialize", "list_devices"],
    "convert": [
        "from_keras",
        "from_logical",
        "from_partition_rules",
        "from_shardings",
        "from_tp_plan",
    ],
    "pod": [
        "Collective",
        "Generation",
        "Memory",
        "PodReport",
        "Topology",
        "compile",
        "plan",
        "topology",
    ],
    "presets": [
        "detect",
        "family_of",
        "fsdp",
        "load",
        "names",
        "zero1",
    ],
    "testing": ["assert_covers", "assert_golden", "write_golden"],
}


def public_members(owner: object) -> list[str]:
    """The names of a class or module that are its own and not private.

    Those of a class that it inherits within the package are its own too.
    """
    names = dict.fromkeys(vars(owner))
    for base in inspect.getmro(owner)[1:] if inspect.isclass(owner) else ():
        if base.__module__.startswith("flax_layoutmap"):
            names.update(dict.fromkeys(vars(base)))
    return [name for name in names if not name.startswith("_")]


def documented() -> Iterator[tuple[str, object]]:
    """Every public class, function, method and property, with its full name."""
    for name in CLASSES:
        cls = getattr(flm, name)
        yield name, cls
        for member in public_members(cls):
            value = inspect.getattr_static(cls, member)
            if isinstance(value, classmethod | staticmethod):
                value = value.__func__
            # A dataclass's fields are described in the docstring of the class.
            if inspect.isfunction(value) or isinstance(value, property):
                yield f"{name}.{member}", value
    for name in FUNCTIONS:
        yield name, getattr(flm, name)
    for namespace, names in NAMESPACES.items():
        for name in names:
            yield f"{namespace}.{name}", getattr(getattr(flm, namespace), name)


def test_golden_list() -> None:
    assert sorted(flm.__all__) == sorted([*CLASSES, *FUNCTIONS, *NAMESPACES])


def test_dir_is_the_golden_list_and_the_version() -> None:
    assert sorted(dir(flm)) == sorted([*flm.__all__, "__version__"])


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_golden_list_of_a_namespace(namespace: str) -> None:
    module = getattr(flm, namespace)
    assert inspect.ismodule(module)
    # These only give names to what other files define.
    gathers = namespace in ("dtensor", "errors")
    prefix = "flax_layoutmap" if gathers else module.__name__
    own = [
        name
        for name in public_members(module)
        if getattr(vars(module)[name], "__module__", "").startswith(prefix)
        or getattr(vars(module)[name], "__package__", "") == module.__name__
    ]
    assert sorted(own) == NAMESPACES[namespace]


@pytest.mark.parametrize("namespace", [None, *NAMESPACES])
def test_the_reference_has_every_name(namespace: str | None) -> None:
    page = (ROOT / f"docs/api/{namespace or 'index'}.md").read_text("utf-8")
    found = re.findall(r"^ *(?:- |::: flax_layoutmap\.)([\w.]+)$", page, re.MULTILINE)
    if namespace is None:
        others = {*NAMESPACES, *NAMESPACES["errors"]}
        assert sorted(found) == sorted({*CLASSES, *FUNCTIONS} - others)
    else:
        names = {name for name in NAMESPACES[namespace] if name != "mappings"}
        assert names <= set(found)


@pytest.mark.parametrize("name", CLASSES)
def test_classes_say_that_they_live_in_the_facade(name: str) -> None:
    cls = getattr(flm, name)
    assert (cls.__module__, cls.__qualname__) == ("flax_layoutmap", name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_callable_under_their_name(name: str) -> None:
    assert callable(getattr(flm, name))
    assert getattr(flm, name).__name__ == name


def test_names_for_type_checkers_are_those_at_run_time() -> None:
    """The imports under TYPE_CHECKING and the table of homes say the same."""
    tree = ast.parse((ROOT / "flax_layoutmap/__init__.py").read_text("utf-8"))
    written = {
        (alias.asname, node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert sorted(name for name, _, _ in written if name) == sorted(flm.__all__)
    for name, module, original in written:
        assert module and name == original
        assert getattr(importlib.import_module(module), original) is getattr(flm, name)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError) as caught:
        _ = flm.LayoutMaps  # pyright: ignore[reportAttributeAccessIssue]
    assert str(caught.value) == (
        "module 'flax_layoutmap' has no attribute 'LayoutMaps'"
    )


def test_version_is_that_of_the_package() -> None:
    try:
        installed = importlib.metadata.version("flax-layoutmap")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("The package runs from a checkout here and is not installed.")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert flm.__version__ == installed == project["version"]


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "flax_layoutmap/py.typed").is_file()


@pytest.mark.parametrize(
    "thing", [pytest.param(value, id=name) for name, value in documented()]
)
def test_docstring(thing: object) -> None:
    text = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    assert text and text.strip()
    # A dataclass without a docstring is given its signature for one.
    assert not text.startswith(f"{getattr(thing, '__name__', '')}(")


@pytest.mark.parametrize("name", NAMESPACES["errors"])
def test_errors_are_one_tree(name: str) -> None:
    cls = getattr(flm.errors, name)
    if name in CLASSES:
        assert cls is getattr(flm, name)
    else:
        assert (cls.__module__, cls.__qualname__) == ("flax_layoutmap.errors", name)
    wanted = UserWarning if name == "LayoutWarning" else flm.LayoutError
    assert issubclass(cls, wanted)
    assert issubclass(flm.LayoutError, ValueError)


def frozen_rules() -> flm.RuleSet:
    """Rules on an abstract mesh, with a section."""
    mesh = flm.DeviceMesh.abstract((2, 4), ("data", "model"))
    layout_map = flm.LayoutMap(mesh)
    layout_map["kernel"] = (None, "model")
    layout_map["embedding"] = [("data", "model"), ...]
    layout_map.activations["mlp"] = ("data", ..., None)
    return layout_map.freeze()


# Values that may go to another process; one with devices, where they are there too.
PICKLABLE: dict[str, Callable[[], object]] = {
    "DeviceMesh with devices": lambda: flm.DeviceMesh((2, 4), ("data", "model")),
    "TensorLayout with devices": lambda: flm.TensorLayout(
        ("x",), flm.DeviceMesh("x=8")
    ),
    "DeviceMesh": lambda: flm.DeviceMesh.abstract((2, 4), ("data", "model")),
    "DeviceMesh, explicit": lambda: flm.DeviceMesh.abstract(
        "data=2", axis_types="explicit"
    ),
    "TensorLayout": lambda: flm.TensorLayout(
        ("data", ("model",), None), flm.DeviceMesh.abstract("data=2,model=4")
    ),
    "TensorLayout, no mesh": lambda: flm.TensorLayout((..., "model")),
    "Rule": lambda: flm.Rule("up/kernel", flm.TensorLayout((None, "x")), rank="skip"),
    "RuleSet": frozen_rules,
}


@pytest.mark.parametrize("name", PICKLABLE)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickling(name: str, protocol: int) -> None:
    value = PICKLABLE[name]()
    again = pickle.loads(pickle.dumps(value, protocol))
    assert type(again) is type(value)
    assert again == value and hash(again) == hash(value)


def test_pickled_rules_resolve_as_before() -> None:
    rules = frozen_rules()
    tree = {"mlp": {"kernel": jax.ShapeDtypeStruct((8, 8), "float32")}}
    again = pickle.loads(pickle.dumps(rules))
    assert flm.resolve(tree, again).specs == flm.resolve(tree, rules).specs


def test_what_only_results_have_pickles_too() -> None:
    """Values without a name at the top: a leaf, a difference and its changes."""
    tree = {"kernel": jax.ShapeDtypeStruct((8, 8), "float32")}
    before = flm.resolve(tree, frozen_rules())
    other = flm.DeviceMesh.abstract((4, 2), ("data", "model"))
    after = flm.resolve(tree, flm.LayoutMap.from_rule_set(frozen_rules()).on(other))
    difference = before.diff(after)
    for value in (before["kernel"], difference, *difference.changes):
        assert pickle.loads(pickle.dumps(value)) == value


def test_errors_keep_their_problems_when_pickled() -> None:
    error = flm.errors.ResolveError("two problems", ("a: wrong", "b: wrong"))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.problems) == (str(error), error.problems)
