"""What lint costs beside the resolve of the same model.

    python benchmarks/lint.py [leaves]

Prints one Markdown table; every row is measured in the same run, the best of several.
The first lint of rules reads their patterns; later ones remember.
"""

import sys
import time
from collections.abc import Callable

from _trees import dict_tree, regex_rules

import flax_layoutmap as flm
from flax_layoutmap import _languages, _pattern_cost

MESH = "data=8,model=8"


def milliseconds(function: Callable[[], object], times: int = 5) -> float:
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - began)
    return best * 1e3


def forget() -> None:
    """Lint as in a new process."""
    for cached in (
        _languages.parse,
        _languages.automaton,
        _languages._mask,
        _pattern_cost._judged,
    ):
        cached.cache_clear()


def main() -> int:
    leaves = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    tree = dict_tree(leaves)
    print(f"{leaves} leaves, in milliseconds\n")
    print("| rules | unused | resolve | lint, first | lint, again | rules alone |")
    print("|--:|--:|--:|--:|--:|--:|")
    passed = False
    for count in (10, 100, 1000):
        pairs = regex_rules(count)

        def fresh(pairs: list = pairs) -> flm.LayoutMap:
            return flm.LayoutMap.from_rules(pairs, flm.DeviceMesh.abstract(MESH))

        maps = iter([fresh() for _ in range(5)])
        resolve = milliseconds(lambda maps=maps: next(maps).resolve(tree))
        resolution = fresh().resolve(tree)

        def first(resolution: flm.Resolution = resolution) -> None:
            forget()
            flm.lint(resolution)

        again = milliseconds(lambda r=resolution: flm.lint(r))
        alone = milliseconds(lambda r=resolution: flm.lint(r.rules))
        row = (resolve, milliseconds(first), again, alone)
        cells = " | ".join(f"{value:.1f}" for value in row)
        print(f"| {count} | {len(resolution.unused_rules)} | {cells} |")
        if count == 10:
            passed = row[1] <= row[0]
    verdict = "PASS" if passed else "FAIL"
    print(f"\nlint of 10 rules takes at most as long as the resolve: {verdict}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
