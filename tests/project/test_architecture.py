"""Imports between rooms go down the table, and use only public names of JAX and Flax.

The table is in CONTRIBUTING.md. A file in no room fails, so that a new folder is given
its place deliberately. Files of one room import each other without cycles.
"""

import ast
import graphlib
import re
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]

# Rooms of one layer do not import each other.
LAYERS = (
    ("_core",),
    ("_tree", "errors", "keras"),
    ("_rules",),
    ("_show",),
    ("draw",),
    ("_resolve",),
    ("_lint", "_place"),
    ("_birth", "dtensor"),
    ("_step", "checkpoint"),
    ("_layout_map",),
    ("convert", "testing"),
    ("presets",),
    ("_pytest_plugin", "pod"),
    ("_suggest",),
    ("__init__",),
    ("_cli",),
    ("__main__",),
)
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}

Sources = dict[str, str]  # path below the package ("checkpoint/_save.py") → its text


def dotted(path: str) -> str:
    """`checkpoint/_save.py` → `flax_layoutmap.checkpoint._save`."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(("flax_layoutmap", *(part for part in parts if part != "__init__")))


def house(path: str) -> str:
    """The name in the table: that of the folder, or of a module in none."""
    return PurePosixPath(path).parts[0].removesuffix(".py")


def imported_names(path: str, source: str) -> list[str]:
    """Absolute dotted names of everything imported, inside functions too."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                # One dot is the folder that the file is in.
                folder = dotted(str(PurePosixPath(path).parent / "__init__.py"))
                above = folder.split(".")[: len(folder.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names


def imported_files(path: str, sources: Sources) -> set[str]:
    """The files of the package that a file imports."""
    files = {dotted(other): other for other in sources}
    found = set()
    for name in imported_names(path, sources[path]):
        while name and name not in files:
            name = name.rpartition(".")[0]
        if name:
            found.add(files[name])
    return found


def layer_problems(sources: Sources) -> list[str]:
    """One line for each unknown module, for each import that does not go down, and
    for a cycle."""
    problems = [
        f"{path} is in no layer of the table"
        for path in sources
        if house(path) not in LAYER_OF
    ]
    graph = {path: imported_files(path, sources) - {path} for path in sources}
    for path, imports in graph.items():
        for other in sorted(imports):
            here, there = house(path), house(other)
            if here == there or not {here, there} <= LAYER_OF.keys():
                continue
            if LAYER_OF[there] >= LAYER_OF[here]:
                problems.append(
                    f"{path} (layer {LAYER_OF[here]}) imports {other}"
                    f" (layer {LAYER_OF[there]})"
                )
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        problems.append(f"cycle: {' → '.join(error.args[1])}")
    return problems


def private_uses(path: str, source: str) -> list[str]:
    """Imports of, and attributes on, the `_src` folders of other libraries."""
    if "_src" not in source:
        return []
    names = [name for name in imported_names(path, source) if "_src" in name.split(".")]
    attributes = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr == "_src"
    ]
    return [f"{path}: {name}" for name in names + attributes]


def read(folder: Path) -> Sources:
    """The Python files below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.py"))
    }


def test_imports_go_down_the_table() -> None:
    sources = read(ROOT / "flax_layoutmap")
    assert "_resolve/resolve.py" in sources
    assert layer_problems(sources) == []


def test_every_module_of_the_table_exists() -> None:
    existing = {house(path) for path in read(ROOT / "flax_layoutmap")}
    assert sorted(LAYER_OF.keys() - existing) == []


@pytest.mark.parametrize(
    "folder", ["flax_layoutmap", "tests", "examples", "benchmarks"]
)
def test_no_private_folder_of_another_library_is_used(folder: str) -> None:
    sources = read(ROOT / folder)
    assert sources
    assert [use for path in sources for use in private_uses(path, sources[path])] == []


# What `_core/jax_internals.py` lists, and what tests once read.
PRIVATE_NAMES_OF_JAX = {
    *("to_concrete_value", "unsafe_buffer_pointer", "parent_trace", "traced_for"),
    *("_trace", "_npartitions", "_value", "_eqns", "_consts", "_outvars", "_src"),
}


@pytest.mark.parametrize("folder", ["flax_layoutmap", "tests", "benchmarks"])
def test_private_names_of_jax_are_in_one_file(folder: str) -> None:
    sources = read(ROOT / folder)
    assert sources.pop("_core/jax_internals.py", "") or folder != "flax_layoutmap"
    assert [
        f"{path}: {ast.unparse(node)}"
        for path, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_NAMES_OF_JAX
    ] == []


def test_contributing_has_the_same_table() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", text, re.MULTILINE)
    written = {
        name: int(layer)
        for layer, names in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    assert written == LAYER_OF


CLEAN = {
    "__init__.py": "from flax_layoutmap import checkpoint as checkpoint\n",
    "_core/errors.py": "import re\n",
    "_rules/rules.py": "from flax_layoutmap._core.errors import RuleError\n",
    "_resolve/resolve.py": "def f():\n    from .._rules.rules import Rule\n",
    "checkpoint/__init__.py": "from flax_layoutmap.checkpoint import _save\n",
    "checkpoint/_save.py": "from .._resolve import resolve\n",
}


def goes_up(path: str, other: str) -> str:
    """The problem that is found where one file imports another above it."""
    here, there = LAYER_OF[house(path)], LAYER_OF[house(other)]
    return f"{path} (layer {here}) imports {other} (layer {there})"


def test_control_clean_imports_pass() -> None:
    assert layer_problems(CLEAN) == []


@pytest.mark.parametrize(
    ("path", "planted", "problem"),
    [
        (
            "_rules/rules.py",
            "def f():\n    from flax_layoutmap._resolve.resolve import resolve\n",
            goes_up("_rules/rules.py", "_resolve/resolve.py"),
        ),
        (
            "_rules/rules.py",
            "from .. import checkpoint\n",
            goes_up("_rules/rules.py", "checkpoint/__init__.py"),
        ),
        (
            "_core/grid.py",
            "import flax_layoutmap._rules.rules\n",
            goes_up("_core/grid.py", "_rules/rules.py"),
        ),
        (
            "_rules/rules.py",
            "import flax_layoutmap as flm\n",
            goes_up("_rules/rules.py", "__init__.py"),
        ),
        (
            "_rules/rules.py",
            "from flax_layoutmap import LayoutMap\n",
            goes_up("_rules/rules.py", "__init__.py"),
        ),
        (
            "checkpoint/_save.py",
            "from flax_layoutmap.checkpoint import restore\n",
            "cycle: checkpoint/",
        ),
        (
            "checkpoint/_save.py",
            "from ..__init__ import LayoutMap\n",
            goes_up("checkpoint/_save.py", "__init__.py"),
        ),
        ("_utils.py", "", "_utils.py is in no layer of the table"),
        ("utils/__init__.py", "", "utils/__init__.py is in no layer of the table"),
    ],
)
def test_control_violations_are_caught(path: str, planted: str, problem: str) -> None:
    problems = layer_problems(CLEAN | {path: planted})
    assert [line for line in problems if line.startswith(problem)], problems


@pytest.mark.parametrize(
    "planted",
    [
        "import jax._src.core",
        "def f():\n    from jax._src import core",
        "from jax import _src",
        "from flax.core._src import spmd as s",
        "from orbax.checkpoint.experimental.v1._src.tree import types",
        "import jax\njax._src.core",
    ],
)
def test_control_private_uses_are_caught(planted: str) -> None:
    assert private_uses("_rules/rules.py", planted)


def test_control_public_uses_pass() -> None:
    assert (
        private_uses("_rules/rules.py", "import jax\nfrom jax.extend import core") == []
    )
