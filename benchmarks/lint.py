"""Benchmark lint against resolving the same model.

    python benchmarks/lint.py [leaves]

Prints one Markdown table in CPU milliseconds, medians of several; every row is measured
in the same run. The first lint of rules reads their patterns; later ones of equal rules
remember what was found of them. The last column is what the text of a report takes. A
first call in a process also imports what lint is made of: the last line says how long
that took here, without bytecode where Python may keep none.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterable

from _trees import Pairs, dict_tree, regex_rules
from jax.sharding import PartitionSpec

import flax_layoutmap as flm

MESH = "data=8,model=8"
TIMES = 15

_SHARDED, _REPLICATED = PartitionSpec("data", "model"), PartitionSpec()
_OF_A_LAYER = [
    ("self_attn/(q|k)_proj/kernel", _SHARDED),
    ("self_attn/v_proj/.*kernel", _SHARDED),
    ("self_attn/o_proj/kernel", _SHARDED),
    ("mlp/gate_proj/k.*", _SHARDED),
    ("mlp/up_proj/[^/]+", _SHARDED),
    ("mlp/down_proj/kernel$", _SHARDED),
    ("input_layernorm/scale", _REPLICATED),
    ("post_attention_layernorm/(scale|bias)", _REPLICATED),
]


def unused(count: int) -> Pairs:
    """Rules of many families of models, of which one is here."""
    return regex_rules(count)


def for_fullmatch(count: int) -> Pairs:
    """The same as they are written where a pattern has to match the whole path."""
    return [(f".*/{key}" if key != ".*" else key, s) for key, s in regex_rules(count)]


def used(count: int) -> Pairs:
    """Rules of single layers, all of which match something."""
    found = [
        (f"layers/{layer}/{pattern}", spec)
        for layer in range(count)
        for pattern, spec in _OF_A_LAYER
    ]
    return [*found[: count - 1], (".*", _REPLICATED)]


def cost(function: Callable[[], object]) -> float:
    """CPU milliseconds."""
    began = time.process_time()
    function()
    return (time.process_time() - began) * 1e3


def forget() -> None:
    """Lint as if it had read no pattern yet."""
    from flax_layoutmap._lint import lint as _lint  # not before its import is timed
    from flax_layoutmap._rules import automata as _automata
    from flax_layoutmap._rules import pattern_cost as _pattern_cost
    from flax_layoutmap._rules import patterns as _patterns

    for cached in (
        _patterns.read,
        _patterns._mask,
        _pattern_cost._counted,
        _automata.automaton,
        _automata.difference,
        _lint._of_rules,
    ):
        cached.cache_clear()


def measured(pairs: Pairs, tree: object) -> tuple[flm.Resolution, list[float]]:
    """The medians of resolve, of lint (first, equal rules, again), and of its text."""

    def fresh() -> flm.LayoutMap:
        mesh = flm.DeviceMesh.abstract(MESH)
        return flm.LayoutMap.from_rules(pairs, mesh)

    rows = []
    resolution = fresh().resolve(tree)
    for _ in range(TIMES):
        layout_map = fresh()
        resolve = cost(lambda m=layout_map: m.resolve(tree))
        forget()
        resolution = layout_map.resolve(tree)
        first = cost(lambda r=resolution: flm.lint(r))
        equal = fresh().resolve(tree)
        later = cost(lambda r=equal: flm.lint(r))
        again = cost(lambda r=equal: flm.lint(r))
        found = flm.lint(equal)
        text = cost(lambda f=found: str(f))
        rows.append((resolve, first, later, again, text))
    return resolution, [statistics.median(column) for column in zip(*rows, strict=True)]


def main() -> int:
    leaves = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    tree = dict_tree(leaves)
    imports = cost(lambda: flm.lint)
    print(f"{leaves} leaves, in CPU milliseconds\n")
    print("| rules | kind | unused | resolve | lint, first | equal | again | text |")
    print("|--:|:--|--:|--:|--:|--:|--:|--:|")
    beyond = []
    for name, make in (
        ("of other models", unused),
        ("begin with .*/", for_fullmatch),
        ("of single layers", used),
    ):
        measured(make(10), tree)  # what a process does once
        for count in (10, 100, 1000):
            resolution, times = measured(make(count), tree)
            cells = " | ".join(f"{value:.1f}" for value in times)
            print(f"| {count} | {name} | {len(resolution.unused_rules)} | {cells} |")
            beyond += over(f"{count} {name}", times)
    verdict = f"FAIL: {', '.join(beyond)}" if beyond else "PASS"
    print(f"\nlint takes at most as long as the resolve: {verdict}")
    print(f"importing lint, once in a process: {imports:.1f}")
    return 1 if beyond else 0


def over(name: str, times: Iterable[float]) -> list[str]:
    """Where lint takes longer, and how many times as long."""
    resolve, *lints, _ = times
    return [
        f"{name} {kind} ({lint / resolve:.1f}×)"
        for kind, lint in zip(("first", "equal", "again"), lints, strict=True)
        if lint > resolve
    ]


if __name__ == "__main__":
    sys.exit(main())
