"""The result table and targets of `resolve.py`, from measured cells."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

FLOOR = "floor: `tree_flatten_with_path`"
MODULE_FLOOR = "floor: `nnx.state(module)`"
COLD = "**flax_layoutmap**, cold"
COLD_BUILD = "**flax_layoutmap**, cold, with building the map"
REPEATED = "**flax_layoutmap**, repeated call"
RESOLVE = "flax_layoutmap, `resolve` alone, cold"
RESOLVE_AGAIN = "flax_layoutmap, `resolve` alone, repeated call"
UNFLATTEN = "part of ours: `jax.tree.unflatten` of the shardings"
KINDS = {
    "dict": "plain dicts",
    "state": "`nnx.State`",
    "module": "NNX module",
    "digits": "plain dicts, rules with digits",
    "layers": "plain dicts, a rule for each layer",
}


@dataclass(frozen=True)
class Cell:
    """One measured value, with the floor of the same tree measured in the same rounds.

    Attributes:
        seconds: Median CPU seconds of one call.
        floor: Median CPU seconds of the floor.
        estimated: Whether it was extrapolated from a smaller tree.
        error: Why there is no value, if there is none.
    """

    seconds: float
    floor: float
    estimated: bool = False
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return "—"
        mark = "≈" if self.estimated else ""
        return f"{mark}{duration(self.seconds)} ({mark}{times(self.ratio)})"

    @property
    def ratio(self) -> float:
        """How many times the floor."""
        return self.seconds / self.floor


Key = tuple[str, str, int, int]
Results = dict[Key, Cell]


def duration(seconds: float) -> str:
    """Seconds for people: three digits and a unit."""
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.{1 if seconds >= 0.01 else 2}f} ms"


def times(ratio: float) -> str:
    """A ratio for people."""
    return f"{ratio:,.0f}×" if ratio >= 100 else f"{ratio:.2g}×"


def table(results: Results, failed: dict[str, str], sizes: list[int]) -> str:
    """All cells as one Markdown table; in brackets, how many times the floor."""
    lines = [
        "| tree | row | rules | " + " | ".join(f"{size:,}" for size in sizes) + " |",
        "|---|---|--:|" + "--:|" * len(sizes),
    ]
    seen = dict.fromkeys(key[:3] for key in results)
    for kind, name, count in seen:
        cells = [results.get((kind, name, count, size)) for size in sizes]
        shown = " | ".join("not run" if cell is None else str(cell) for cell in cells)
        lines.append(f"| {KINDS[kind]} | {name} | {count:,} | {shown} |")
    empty = " | ".join("—" for _ in sizes)
    for name, error in failed.items():
        lines.append(f"| all | {name}: not importable ({error}) | — | {empty} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Check:
    """One target over the cells it applies to: (value, limit, where) each."""

    text: str
    cells: list[tuple[float, float, str]]

    def __str__(self) -> str:
        if not self.cells:
            return f"- not measured: {self.text}"
        value, limit, where = max(self.cells, key=lambda cell: cell[0] / cell[1])
        missed = sum(value > limit for value, limit, _ in self.cells)
        word = "FAIL" if missed else "PASS"
        return (
            f"- {word}: {self.text} — worst {value:.3g} of {limit:.3g} allowed "
            f"({where}); {len(self.cells) - missed} of {len(self.cells)} cells reach it"
        )


def checks(results: Results, regex_peers: list[str]) -> Iterable[Check]:
    """The targets, computed from the table."""
    kinds = ("dict", "state")
    for row in (COLD, RESOLVE):
        yield Check(
            f"{plain(row)}, 30,000 leaves and more: ≤ 3 × the floor (≤ 5 × with 1,000 "
            "rules)",
            floor_cells(results, row, kinds, lambda n: 5 if n >= 1000 else 3, 30_000),
        )
    yield Check(
        f"{plain(COLD)}, rules with digits, 30,000 leaves and more: ≤ 5 × the floor",
        floor_cells(results, COLD, ("digits", "layers"), lambda _: 5, 30_000),
    )
    for row in (COLD, COLD_BUILD):
        yield Check(
            f"{plain(row)}: faster than the fastest regex peer in every cell (share of "
            "its time)",
            peer_cells(results, row, regex_peers, kinds, 1.0),
        )
        yield Check(
            f"{plain(row)}, from 3,000 leaves and 100 rules: 4 × faster than that peer "
            "(share of its time)",
            peer_cells(results, row, regex_peers, kinds, 0.25, 3000, 100),
        )
    yield Check(
        f"{plain(RESOLVE_AGAIN)} with the same structure: ≤ 0.5 × the floor",
        floor_cells(results, RESOLVE_AGAIN, kinds, lambda _: 0.5),
    )
    yield Check(
        "NNX module, cold: ≤ 1.5 × `nnx.state(module)` on top of it (so 2.5 × in all)",
        floor_cells(results, COLD, ("module",), lambda _: 2.5),
    )


def plain(row: str) -> str:
    """The name of one of our rows without the package."""
    return row.replace("**", "").removeprefix("flax_layoutmap, ")


def floor_cells(
    results: Results,
    row: str,
    kinds: tuple[str, ...],
    limit: Callable[[int], float],
    from_size: int = 0,
) -> list[tuple[float, float, str]]:
    """The cells of one of our rows as multiples of the floor."""
    return [
        (cell.ratio, limit(count), f"{KINDS[kind]}, {size:,} leaves, {count:,} rules")
        for (kind, name, count, size), cell in results.items()
        if name == row and kind in kinds and size >= from_size
    ]


def peer_cells(
    results: Results,
    row: str,
    regex_peers: list[str],
    kinds: tuple[str, ...],
    limit: float,
    from_size: int = 0,
    from_rules: int = 0,
) -> list[tuple[float, float, str]]:
    """The cells of one of our rows as shares of the fastest regex peer's time."""
    found = []
    for (kind, name, count, size), cell in results.items():
        peers = [
            (results[key].seconds, peer)
            for peer in regex_peers
            if (key := (kind, peer, count, size)) in results
        ]
        applies = kind in kinds and size >= from_size and count >= from_rules
        if name == row and applies and peers:
            seconds, peer = min(peers)
            where = f"{KINDS[kind]}, {size:,} leaves, {count:,} rules, {peer}"
            found.append((cell.seconds / seconds, limit, where))
    return found
