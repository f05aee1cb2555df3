"""What a training loop may ask for: policies, directories, and one tree for all."""

import operator
import os
from typing import Any

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap.checkpoint._leaves import Leaf, leaf_of
from flax_layoutmap.checkpoint._places import METADATA_FILE, cannot_name, is_url


def check_numbers(every: Any, keep: Any, keep_every: Any) -> None:
    """Raises CheckpointError for policies that make no sense."""
    if not hasattr(every, "should_save") and not _is_count(every):
        raise CheckpointError(
            f"every={every!r}: give a number of steps, such as 1000, or one of "
            "orbax.checkpoint.v1.training.save_decision_policies"
        )
    if keep is not None and not hasattr(keep, "should_preserve"):
        if not _is_count(keep):
            raise CheckpointError(
                f"keep={keep!r}: give how many steps to keep, None for all, or one of "
                "orbax.checkpoint.v1.training.preservation_policies"
            )
    if keep_every is not None and not (_is_count(keep_every) and isinstance(keep, int)):
        raise CheckpointError(
            f"keep_every={keep_every!r}, keep={keep!r}: it is a number of steps, and "
            "goes with a number to keep: keep=3, keep_every=10_000"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_directory(directory: str) -> None:
    """Raises CheckpointError where no steps can be."""
    unnamed = cannot_name(directory)
    if unnamed:
        raise CheckpointError(f"cannot save to {directory}: {unnamed}")
    if is_url(directory):
        return
    if os.path.lexists(directory) and not os.path.isdir(directory):
        raise CheckpointError(
            f"{directory} is a file; the steps need a directory"
            if os.path.exists(directory)
            else f"{directory} is a link to what does not exist"
        )
    if os.path.isfile(os.path.join(directory, METADATA_FILE)):
        raise CheckpointError(
            f"{directory} is a checkpoint itself; a Checkpointer needs the directory "
            "that holds the steps: the one above it, or a new one"
        )


def described(tree: Any) -> dict[str, str]:
    """Path → what kind of leaf it is.

    Numbers and arrays without dims are one kind, as a restore takes either.
    """
    flat = flatten(tree)
    leaves = zip(flat.full_paths(), flat.leaves, strict=True)
    return {path: _kind(leaf_of(path, value), value) for path, value in leaves}


def _kind(leaf: Leaf | None, value: Any) -> str:
    if leaf is None:
        return str(type(value))
    is_number = leaf.shape == () and leaf.kind not in ("key", "string")
    return "a number" if is_number else str(leaf)


def difference(before: dict[str, str], now: dict[str, str]) -> str:
    """How two trees differ, where they do."""
    texts = [
        f"{path} was {before[path]}, and is {now[path]}"
        for path in before
        if path in now and before[path] != now[path]
    ]
    texts += [f"{path} is missing" for path in before if path not in now]
    texts += [f"{path} is new" for path in now if path not in before]
    more = f"; and {len(texts) - 5} more" if len(texts) > 5 else ""
    return (
        "the tree is not the one that was created, restored or saved before, so that "
        f"it could not be restored by the same program: {'; '.join(texts[:5])}{more}; "
        "let create_fn return what save gets"
    )


def listed(steps: list[int]) -> str:
    shown = ", ".join(str(step) for step in steps[-5:])
    return shown if len(steps) <= 5 else f"{len(steps)} steps, the last ones {shown}"


def add_context(failure: BaseException, error: BaseException) -> None:
    """Has a failure's traceback show what was going on when it came."""
    first: BaseException = failure
    while first.__cause__ is not None:
        first = first.__cause__
    if first is not error:
        first.__context__, first.__suppress_context__ = error, False


def next_step(step: Any, last: int, directory: str) -> int:
    """The number of a step that can come after the last one (-1 where there is none).

    Raises:
        CheckpointError: it is no number, or it does not come after it.
    """
    try:
        number = operator.index(step)
    except TypeError as error:
        raise CheckpointError(
            f"a step is a whole number, not {step!r}; a counter in an array is "
            "int(counter)"
        ) from error
    if number < 0:
        raise CheckpointError(f"a step is not negative, and {number} is")
    if number == last:
        raise CheckpointError(
            f"step {number} in {directory} is saved already; call save once in a "
            "step, with force=step == steps - 1 for the last one"
        )
    if number < last:
        raise CheckpointError(
            f"step {number} comes before {last}, which is saved in {directory}; "
            "restore_or_init says where to go on; to go back, remove the later steps, "
            "or use another directory"
        )
    return number


def existing_step(step: int | None, steps: list[int], directory: str) -> int:
    """The step that is meant, of those that are there; None is the latest.

    Raises:
        CheckpointError: it is not there.
    """
    if not steps:
        raise CheckpointError(f"there is no step in {directory}")
    chosen = steps[-1] if step is None else operator.index(step)
    if chosen not in steps:
        raise CheckpointError(
            f"there is no step {chosen} in {directory}, which has {listed(steps)}"
        )
    return chosen


def way_back(step: int, steps: list[int], directory: str) -> str:
    """What to do where a step cannot be restored."""
    earlier = [other for other in steps if other < step]
    if not earlier:
        return f"(step {step} is the first one in {directory})"
    return (
        f"(earlier steps in {directory}: {listed(earlier)}; nothing falls back to one "
        f"of them; if step {step} is damaged, remove {directory}/{step} to go on from "
        f"step {earlier[-1]})"
    )
