"""The words and the table of a Suggestion."""

from collections.abc import Callable, Iterator, Mapping

from flax_layoutmap._show.table import Grid, Line, human_bytes
from flax_layoutmap._suggest.price import Cost
from flax_layoutmap.pod._report_text import seconds_text

WIDTH = 80
# Times whose difference is a smaller share are called equal.
_EQUAL = 0.005
_HELD = {
    "parameter": "parameters",
    "optimizer": "optimizer state",
    "data": "data",
    "other": "other arguments",
}


def fits(cost: Cost, limit_bytes: int) -> bool:
    """Whether the estimated peak of memory is within a limit."""
    return peak_of(cost) <= limit_bytes


def peak_of(cost: Cost) -> int:
    """The estimated peak of memory, which each cost of a Suggestion has."""
    assert cost.peak_bytes is not None
    return cost.peak_bytes


# ------------------------------------------------------------------------ verdict


def verdict(
    costs: Mapping[str, Cost], limit_bytes: int, is_complete: bool
) -> Iterator[str]:
    """What was found, in a few lines; the costs are those of the table."""
    own = costs["suggested"]
    if is_today_better(costs, limit_bytes):
        yield "keep the current rules: nothing better was found"
    if not fits(own, limit_bytes):
        yield (
            f"does not fit: {human_bytes(peak_of(own))} per device is the least memory "
            f"that was found, and the limit is {human_bytes(limit_bytes)}"
        )
        yield from _held(own)
    yield from _estimates(costs, limit_bytes, is_complete)


def _estimates(
    costs: Mapping[str, Cost], limit_bytes: int, is_complete: bool
) -> Iterator[str]:
    """Time and memory beside those of today, or else of full sharding."""
    own, name = costs["suggested"], "full sharding"
    other = costs.get(name)
    if "today" in costs:
        name, other = "the current rules", costs["today"]
    time = f"estimated time: {seconds_text(own.seconds)} a step"
    memory = f"estimated memory: {human_bytes(peak_of(own))} per device"
    if other is None:
        time += "; this is full sharding" if is_complete else ""
    else:
        before = f" instead of {seconds_text(other.seconds)} with {name}"
        same = f", the same as {name}"
        time += same if _are_equal(own, other) else before + _change(own, other)
        memory += f" instead of {human_bytes(peak_of(other))}"
    yield time
    if fits(own, limit_bytes):
        yield f"{memory} (limit {human_bytes(limit_bytes)})"


def _are_equal(one: Cost, other: Cost) -> bool:
    """Whether two times are equal as far as estimates go."""
    return abs(one.seconds - other.seconds) <= _EQUAL * other.seconds


def _change(new: Cost, old: Cost) -> str:
    return f" ({new.seconds / old.seconds - 1:+.1%})"


def is_today_better(costs: Mapping[str, Cost], limit_bytes: int) -> bool:
    """Whether the current rules fit alone, or are faster, or need less memory."""
    if "today" not in costs:
        return False
    today, own = costs["today"], costs["suggested"]
    if not fits(today, limit_bytes) or not fits(own, limit_bytes):
        return fits(today, limit_bytes)
    if _are_equal(today, own):
        return peak_of(today) <= peak_of(own)
    return today.seconds < own.seconds


def _held(cost: Cost) -> Iterator[str]:
    """What takes the memory, and what would need less."""
    held = {_HELD[role]: size for role, size in cost.at_rest.items()}
    temporary = peak_of(cost) - cost.at_rest_bytes
    held["gradients and activations"] = temporary
    largest = sorted(held.items(), key=lambda pair: -pair[1])
    listed = ", ".join(f"{what} {human_bytes(size)}" for what, size in largest if size)
    yield f"it holds: {listed}"
    less = "more devices"
    if temporary > cost.at_rest_bytes:
        less += ", fewer rows in a batch, or, in training, jax.checkpoint in the model"
    elif cost.at_rest.get("optimizer"):
        less += ", or optimizer state in the memory of the host"
    yield f"for less: {less}"


# -------------------------------------------------------------------------- table


def table(costs: Mapping[str, Cost]) -> Grid:
    """A column for each cost."""
    axes = dict.fromkeys(
        axis
        for cost in costs.values()
        for axis, size in cost.sent_bytes.items()
        if size > cost.total_sent_bytes / 1000
    )
    reads: dict[str, Callable[[Cost], str]] = {
        "  or reading memory": lambda one: seconds_text(one.memory_seconds)
    }
    are_read = any(one.memory_seconds > one.compute_seconds for one in costs.values())
    rows: dict[str, Callable[[Cost], str]] = {
        "time of a step": lambda one: seconds_text(one.seconds),
        "  matrix products": lambda one: seconds_text(one.compute_seconds),
        **(reads if are_read else {}),
        "  sending": lambda one: seconds_text(one.link_seconds),
        "  starting collectives": lambda one: f"{one.collectives} × 2 µs",
        **{f"sent over {axis}": _sent_over(axis) for axis in axes},
        "memory for state and data": lambda one: human_bytes(one.at_rest_bytes),
        "memory at the peak": lambda one: human_bytes(peak_of(one)),
    }
    lines = (Line((name, *map(text, costs.values()))) for name, text in rows.items())
    right = (False, *[True] * len(costs))
    return Grid(("per device", *costs), right, tuple(lines))


def _sent_over(axis: str) -> Callable[[Cost], str]:
    return lambda cost: human_bytes(cost.sent_bytes.get(axis, 0))


# ------------------------------------------------------------------------ explain


def next_best(layout: str, other: Cost, own: Cost, is_over: bool) -> str:
    """What the best other layout of one parameter would change."""
    sent = _more(other.total_sent_bytes - own.total_sent_bytes)
    held = _more(other.at_rest_bytes - own.at_rest_bytes)
    before = seconds_text(own.seconds)
    time = f"an estimated {seconds_text(other.seconds)} a step instead of {before}"
    time += _change(other, own)
    if _are_equal(other, own):
        time = f"the same time, {before} a step"
    return (
        f"best other layout: {layout}: {time}; each device sends {sent} and holds "
        f"{held} for state and data{', and it does not fit' if is_over else ''}"
    )


def _more(count: int) -> str:
    if count == 0:
        return "as much"
    return f"{human_bytes(abs(count))} {'more' if count > 0 else 'less'}"
