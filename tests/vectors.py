"""Compare results with those of TensorFlow's own DTensor (`golden/`)."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

import flax_layoutmap as flm

GOLDEN = Path(__file__).parent / "golden"
Vector = dict[str, Any]
Member = Callable[[Any, Vector], Any]


class Difference(NamedTuple):
    """Where we answer otherwise on purpose.

    Attributes:
        reason: why.
        where: whether it concerns a vector.
        ours: what we answer instead; None is a LayoutError.
    """

    reason: str
    where: Callable[[Vector], bool]
    ours: Callable[[Vector], Any]


def load(name: str) -> list[Vector]:
    """The vectors of one golden file."""
    text = (GOLDEN / f"dtensor_{name}.json").read_text(encoding="utf-8")
    return json.loads(text)


def refused(*_: Any) -> None:
    """What we answer where we raise a LayoutError."""
    return None


def or_refused(call: Callable[[], Any]) -> Any:
    """The result, or None where we raise a LayoutError; all else is a failure."""
    try:
        return call()
    except flm.LayoutError:
        return None


def mesh_of(vector: Vector) -> flm.DeviceMesh:
    """The mesh of a vector, abstract where it needs more devices than there are."""
    dims = [(name, size) for name, size in vector["dims"]]
    count = math.prod(size for _, size in dims)
    if count > jax.device_count():
        return flm.DeviceMesh.abstract(dict(dims))
    return flm.DeviceMesh.from_dtensor([f"CPU:{at}" for at in range(count)], dims)


def check(
    vectors: Iterable[Vector],
    things: Callable[[Vector], Any],
    members: Mapping[str, Member],
    different: Mapping[str, Difference],
) -> None:
    """Every member of every vector is theirs, or differs as the table says.

    Args:
        vectors: what the original answered.
        things: makes our thing of a vector.
        members: key of a vector → what we answer for it.
        different: name of a member (and what else, after a colon) → the difference.
    """
    wrong, met = [], set()
    for vector in vectors:
        thing = things(vector)
        for key, member in members.items():
            if key not in vector:
                continue
            expected, names = vector[key], []
            for name, difference in different.items():
                if name.split(":")[0] == key and difference.where(vector):
                    names.append(name)
                    expected = difference.ours(vector)
            answer = or_refused(lambda: member(thing, vector))  # noqa: B023
            # As JSON has it: no tuples.
            answer = json.loads(json.dumps(answer))
            said = {k: vector[k] for k in ("dims", "specs", "text") if k in vector}
            if answer != expected:
                wrong.append((key, said, answer, expected))
            if names and expected == vector[key]:
                wrong.append((names, said, "is no difference"))
            met.update(names)
    assert not wrong, wrong
    assert met == set(different), "a difference was not met"


def differing(
    vectors: Iterable[Vector], members: Mapping[str, Member]
) -> Iterator[tuple[Vector, str, Any]]:
    """The vector, the member and our answer, where it is not theirs."""
    for vector in vectors:
        for key, member in members.items():
            answer = or_refused(lambda: member(vector, vector))  # noqa: B023
            answer = json.loads(json.dumps(answer))
            if key in vector and answer != vector[key]:
                yield vector, key, answer
