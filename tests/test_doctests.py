"""Runs the examples in the docstrings of the package.

Not `pytest --doctest-modules`: public classes say that they live in `flax_layoutmap`,
so its finder passes over them in the files that define them.
"""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import flax_layoutmap as flm

PACKAGE = Path(__file__).parents[1] / "flax_layoutmap"
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


def test_no_example_is_passed_over() -> None:
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    written = sum(len(re.findall(r"^\s*>>> ", s, re.MULTILINE)) for s in sources)
    assert written == sum(len(test.examples) for test in EXAMPLES)
