"""Run the examples in the docstrings of the package.

Not `pytest --doctest-modules`: the `__module__` of public classes is `flax_layoutmap`,
so its finder skips them in the files that define them.
"""

import doctest
import importlib
import inspect
import operator
import pkgutil
import re
from pathlib import Path

import pytest

import flax_layoutmap as flm

PACKAGE = Path(__file__).parents[2] / "flax_layoutmap"
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def find_examples() -> list[doctest.DocTest]:
    """Every docstring of the package that holds an example."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    prefix = "flax_layoutmap."
    names = [info.name for info in pkgutil.walk_packages([str(PACKAGE)], prefix)]
    modules = [importlib.import_module(name) for name in names]
    found = [test for module in (flm, *modules) for test in finder.find(module)]
    for name in flm.__all__:
        value = getattr(flm, name)
        if inspect.isclass(value):
            # module=False: look inside, wherever its members say that they live.
            found += finder.find(value, f"flax_layoutmap.{name}", module=False)
    return list({test.name: test for test in found if test.examples}.values())


EXAMPLES = find_examples()


@pytest.mark.parametrize("example", EXAMPLES, ids=[test.name for test in EXAMPLES])
def test_example(example: doctest.DocTest) -> None:
    printed: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    # The globals are copied: pytest-xdist or a second run may ask for them again.
    example.globs = dict(example.globs)
    results = runner.run(example, out=printed.append, clear_globs=False)
    assert results.failed == 0, "".join(printed)


NAMESPACES = ("", "checkpoint", "draw", "dtensor", "keras", "pod", "testing")


def public_functions() -> list[str]:
    """Dotted names of the functions that users call, below `flax_layoutmap`."""
    found = []
    for space in NAMESPACES:
        module = importlib.import_module(f"flax_layoutmap.{space}".rstrip("."))
        names = [name for name in dir(module) if not name.startswith("_")]
        for name in getattr(module, "__all__", names):
            value = getattr(module, name)
            if inspect.isfunction(value) and "flax_layoutmap" in value.__module__:
                found.append(f"{space}.{name}".lstrip("."))
    return found


@pytest.mark.parametrize("name", public_functions())
def test_every_public_function_has_an_example(name: str) -> None:
    value = operator.attrgetter(name)(flm)
    assert ">>> " in (inspect.getdoc(value) or "")


def test_no_example_is_passed_over() -> None:
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    written = sum(len(re.findall(r"^\s*>>> ", s, re.MULTILINE)) for s in sources)
    assert written == sum(len(test.examples) for test in EXAMPLES)
