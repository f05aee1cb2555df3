"""flm.checkpoint.Checkpointer."""

import base64
import contextlib
import json
import operator
import os
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import numpy as np

from flax_layoutmap._birth.create import create
from flax_layoutmap._core.errors import CheckpointError, warn
from flax_layoutmap._core.processes import tell_of_others
from flax_layoutmap.checkpoint import _metadata, _orbax
from flax_layoutmap.checkpoint._leaves import rules_of
from flax_layoutmap.checkpoint._places import (
    METADATA_FILE,
    absolute,
    check_shared,
)
from flax_layoutmap.checkpoint._restore import restore
from flax_layoutmap.checkpoint._save import prepare

# The user's own metadata and the states of data, beside our record in the custom
# metadata of a step. Older versions wrote the states into a folder of this name.
_USER, _DATA = "metadata", "data"


class Checkpointer:
    """The checkpoints of a training loop, one for each saved step.

    A save copies the values and returns; Orbax writes them while training goes on. Its
    errors are raised by the next `save` that is due, by `wait`, or at the end of the
    `with` block. Without a `with` block each save is complete when it returns.

    Every process calls the methods with the same arguments, and `save` in every step.
    After `jax.distributed.initialize`, SIGTERM (preemption) makes the next one due in
    all processes, and `reached_preemption` then says that the loop should end.

    Each step is a checkpoint of its own (`directory/1000`). An unfinished one is
    ignored, and removed by the next save; only one program at a time may save.

    Args:
        directory: where the steps are; it is made by the first save.
        layout_map: the rules, on a mesh of devices. They may differ from run to run.
        every: save each step that is a multiple of this; or one of the policies in
            `orbax.checkpoint.v1.training.save_decision_policies`.
        keep: how many of the latest steps to keep; None for all; or one of the policies
            in `….preservation_policies` (which see `metadata` as the metrics).
        checksums: as in `flm.checkpoint.save`; they are computed before `save` returns.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> options = {"layout_map": flm.LayoutMap("data=-1", strict=False), "every": 2}
        >>> with flm.checkpoint.Checkpointer(tempfile.mkdtemp(), **options) as saved:
        ...     state, start = saved.restore_or_init(lambda: {"w": jnp.zeros(8)})
        ...     for step in range(start, 4):
        ...         _ = saved.save(step, state, force=step == 3)
        >>> saved.steps
        [0, 2, 3]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        layout_map: Any = None,
        every: Any = 1,
        keep: Any = None,
        checksums: bool = True,
    ) -> None:
        self.directory = absolute(directory)
        self._rules = rules_of(layout_map)
        if os.path.isfile(os.path.join(self.directory, METADATA_FILE)):
            raise CheckpointError(
                f"{self.directory} is a checkpoint itself; give the one above it"
            )
        _check_policies(every, keep)
        self._policies = (every, keep)
        self._checksums = checksums
        self._is_inside = False
        self.reached_preemption = False  # whether the last save was due to SIGTERM
        self._writer: Any = None  # Orbax's Checkpointer, opened by the first save
        self._pending: tuple[int, Any] | None = None  # step, and Orbax's response
        self._last: int | None = None  # the latest step, saved or being saved

    @property
    def steps(self) -> list[int]:
        """The finished steps, in order, without one that is still being saved."""
        return _orbax.steps_below(self.directory)

    @property
    def latest(self) -> int | None:
        """The latest finished step, as in `steps`, or None."""
        return max(self.steps, default=None)

    # ------------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        state: Any,
        *,
        data: Any = None,
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Save a step if it is due; call it after each step.

        All values are those at the time of the call: `state` may be donated or
        overwritten at once. A save that is still under way is waited for.

        Args:
            step: its number, larger than that of the latest one.
            state: any tree that `flm.checkpoint.save` takes.
            data: an iterator with `get_state()` and `set_state(state)`, or a dict of
                them. Each process saves the state of its own.
            metadata: JSON values, and arrays without dims (the loss), for people.
            force: save it even if it is not due, as the last one of a run.

        Returns:
            Whether this step is being saved.
        """
        step = self._next(step)
        preempted = _is_preempted(step)
        if not (force or preempted or self._is_due(step)):
            return False
        self.wait()
        self._start(step, state, data, metadata)
        self._last = step
        self.reached_preemption |= preempted
        if preempted or not self._is_inside:
            self.wait()
        return True

    def wait(self) -> None:
        """Wait until the save in progress is complete; raise its error."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        step, response = pending
        try:
            with _orbax.translated(f"cannot save step {step} to {self.directory}"):
                response.result()
        except CheckpointError:
            # A new one reads again which steps are there, and removes what is left.
            self._writer = self._last = None
            raise

    def close(self) -> None:
        """Finish the save in progress; called at the end of a `with` block."""
        self._is_inside = False
        try:
            self.wait()
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                with _orbax.translated(f"cannot finish the saves to {self.directory}"):
                    writer.close()

    def __enter__(self) -> Self:
        self._is_inside = True
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        where = f"; the latest step saved in {self.directory}: "
        tell_of_others(error, lambda: f"{where}{self.latest}")
        self.close()

    def _next(self, step: Any) -> int:
        if self._last is None:
            self._last = max(self.steps, default=-1)
        number = operator.index(step)
        if number <= self._last:
            raise CheckpointError(
                f"step {number} does not come after step {self._last}, the latest in "
                f"{self.directory}; to go back, remove the later steps"
            )
        return number

    def _is_due(self, step: int) -> bool:
        every = self._policies[0]
        if isinstance(every, int):
            return step % every == 0  # without asking the storage in every step
        with _orbax.TURN, _orbax.translated("the save policy failed"):
            return bool(self._opened().should_save(step))

    def _start(
        self, step: int, state: Any, data: Any, metadata: Mapping[str, Any] | None
    ) -> None:
        place = self._place(step)
        custom: dict[str, Any] = {_USER: None}

        # Runs within the Agreement, so that all processes learn of an error in one.
        def obstacle() -> str | None:
            custom[_USER] = None if metadata is None else _plain_json(metadata)
            if data is not None:
                custom[_DATA] = _encoded_state(data)
            return _orbax.cannot_write(place, overwrite=False)

        with _orbax.TURN:
            tree, custom[_metadata.KEY] = prepare(
                place, state, self._rules, self._checksums, obstacle
            )
            if data is not None:
                states = _gathered(custom[_DATA])
                custom[_DATA] = {"is_dict": isinstance(data, dict), "states": states}
            if self._writer is None:
                check_shared(place)
            has_metrics = hasattr(self._policies[1], "should_preserve")
            with _orbax.translated(f"cannot save to {place}"), _orbax.saving_context():
                writer, self._writer = self._opened(), None
                response = writer.save_checkpointables_async(
                    step,
                    {"state": tree},  # Orbax's own name for the tree of a step
                    force=True,
                    metrics=custom[_USER] if has_metrics else None,
                    custom_metadata=_metadata.sealed(custom),
                )
        self._writer, self._pending = writer, (step, response)

    def _opened(self) -> Any:
        if self._writer is None:
            self._writer = _orbax.open_steps(self.directory, *self._policies)
        return self._writer

    # --------------------------------------------------------------- restoring

    def restore_or_init(
        self, create_fn: Callable[[], Any], *, data: Any = None, **options: Any
    ) -> tuple[Any, int]:
        """Restore the latest step, or initialize the state if there is none.

        With rules, `create_fn` is traced, and its values are initialized in their
        shards, or read into them. `data` is as in `save`; its state is set where a step
        is restored. `options` are those of `flm.checkpoint.restore`.

        Returns:
            The state, and the step to go on with: the latest one plus 1, or 0. If the
            latest one is damaged that is an error; an earlier one is not taken.
        """
        self.wait()
        rules, latest = self._rules, self.latest
        if latest is None:
            return create_fn() if rules is None else create(create_fn, rules), 0
        make = create_fn() if rules is None else create_fn
        return self.restore(make, latest, data=data, **options), latest + 1

    def restore(
        self,
        target: Any = None,
        step: int | None = None,
        *,
        data: Any = None,
        **options: Any,
    ) -> Any:
        """Restore a step (None for the latest), as `flm.checkpoint.restore` does.

        `data` is as in `save`; its state is set.
        """
        step, place = self._existing(step)
        states = [] if data is None else _states_for(data, place)
        restored = restore(place, target, layout_map=self._rules, **options)
        for iterator, state in states:
            iterator.set_state(state)
        if data is None and _data_of(place):
            warn(f"step {step} holds the state of data; to restore it too, pass data=")
        return restored

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """Return the metadata that a step was saved with; None is the latest step."""
        return _custom_of(self._existing(step)[1]).get(_USER) or {}

    def data_states(self, step: int | None = None) -> list[Any]:
        """Return the data state that each process saved; None is the latest step."""
        states = _data_of(self._existing(step)[1]).get("states", [])
        return [*map(_decode, states)]

    def _place(self, step: int) -> str:
        return f"{self.directory.rstrip('/')}/{step}"

    def _existing(self, step: int | None) -> tuple[int, str]:
        self.wait()
        steps = self.steps
        step = max(steps, default=-1) if step is None else operator.index(step)
        if step not in steps:
            which = f" {step}, the last are {steps[-5:]}" if steps else ""
            raise CheckpointError(f"{self.directory} has no step{which}")
        return step, self._place(step)


def _check_policies(every: Any, keep: Any) -> None:
    numbers = [] if hasattr(every, "should_save") else [every]
    numbers += [] if keep is None or hasattr(keep, "should_preserve") else [keep]
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        raise CheckpointError(
            f"every={every!r}, keep={keep!r}: give positive whole numbers of steps, or "
            "Orbax's policies"
        )


def _is_preempted(step: int) -> bool:
    """Whether to save this step and end, the same on all processes."""
    if not jax.distributed.is_initialized():
        return False
    from jax.experimental import multihost_utils

    with contextlib.suppress(RuntimeError):  # jax_enable_preemption_service is off
        return bool(multihost_utils.reached_preemption_sync_point(step))
    return False


def _plain_json(metadata: Mapping[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(dict(metadata), default=lambda x: x.item()))
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"metadata= cannot be written as JSON: {error}; use numbers, strings, "
            "lists and dicts; arrays belong in the state"
        ) from error


# ------------------------------------------------------------------ states of data


def _custom_of(place: str) -> dict[str, Any]:
    custom = _orbax.read_metadata(place, tree_of=lambda _: {}).custom
    _metadata.check_intact(custom, place)
    return custom


def _encoded_state(data: Any) -> str:
    states = {name: part.get_state() for name, part in _iterators(data).items()}
    return json.dumps(_encode(states if isinstance(data, dict) else states[""], "data"))


def _gathered(text: str) -> list[Any]:
    """The JSON values of all processes."""
    if jax.process_count() == 1:
        return [json.loads(text)]
    from jax.experimental import multihost_utils

    raw = text.encode()
    size = int(multihost_utils.process_allgather(np.int32(len(raw))).max())
    sent = np.frombuffer(raw.ljust(size), np.uint8)
    return [json.loads(x.tobytes()) for x in multihost_utils.process_allgather(sent)]


def _data_of(place: str) -> dict[str, Any]:
    """What a step holds of data: the state of each process; empty if nothing."""
    if held := _custom_of(place).get(_DATA):
        return held
    from etils import epath

    folder = epath.Path(place) / _DATA
    count = len([*folder.glob("process_*.json")])
    with _orbax.translated(f"the states of data in {place} are damaged"):
        names = [folder / f"process_{number}.json" for number in range(count)]
        files = [json.loads(name.read_text()) for name in names]
        if any(file["processes"] != count for file in files):
            raise ValueError(f"there are {count} of {files[0]['processes']} files")
        return {"states": [file["state"] for file in files]} if files else {}


def _states_for(data: Any, place: str) -> list[tuple[Any, Any]]:
    """Each iterator, with the state that this process saved.

    Other numbers of processes can restore what all processes saved alike.
    """
    parts, held = _iterators(data), _data_of(place)
    if not held:
        raise CheckpointError(f"{place} has no state of data; restore it without data=")
    states = held["states"]
    is_alike = len({json.dumps(state) for state in states}) == 1
    if len(states) != jax.process_count() and not is_alike:
        raise CheckpointError(
            f"{len(states)} processes saved different states of data in {place}, and "
            f"this job has {jax.process_count()}: restore without data=, and set the "
            "iterator from checkpointer.data_states(step)"
        )
    state = _decode(states[0 if is_alike else jax.process_index()])
    is_dict = isinstance(data, dict)
    # Older versions did not write whether it was a dict.
    by_name = state if held.get("is_dict", is_dict) else {"": state}
    if not isinstance(by_name, dict) or by_name.keys() != parts.keys():
        which = f"a dict of {sorted(parts)}" if is_dict else "one iterator"
        raise CheckpointError(f"{place} was not saved with data= of {which}")
    return [(part, by_name[name]) for name, part in parts.items()]


def _iterators(data: Any) -> dict[str, Any]:
    parts = data if isinstance(data, dict) else {"": data}
    for name, part in parts.items():
        if not (hasattr(part, "get_state") and hasattr(part, "set_state")):
            raise CheckpointError(
                f"data{f'[{name!r}]' if name else ''} is a {type(part).__qualname__}: "
                "give an object with get_state and set_state, or a dict of such objects"
            )
    return parts


def _encode(value: Any, where: str) -> Any:
    """Encode a value as JSON, with tags for bytes, tuples and NumPy arrays."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return {"__bytes__": base64.b64encode(value).decode()}
        case np.ndarray() | np.generic() if value.dtype.kind in "biufcSU":
            raw = base64.b64encode(value.tobytes()).decode()
            return {"__array__": [value.dtype.str, list(value.shape), raw]}
        case list() | tuple():
            parts = [_encode(part, f"{where}[{at}]") for at, part in enumerate(value)]
            return parts if isinstance(value, list) else {"__tuple__": parts}
        case dict() if all(isinstance(key, str) for key in value):
            return {k: _encode(part, f"{where}[{k!r}]") for k, part in value.items()}
    raise CheckpointError(
        f"the state of {where} is a {type(value).__qualname__}; it can hold numbers, "
        "strings, bytes, lists, tuples, NumPy arrays and dicts with strings as keys"
    )


def _decode(state: Any) -> Any:
    return json.loads(json.dumps(state), object_hook=_untagged)


def _untagged(value: dict[str, Any]) -> Any:
    match value:
        case {"__bytes__": text}:
            return base64.b64decode(text)
        case {"__tuple__": parts}:
            return tuple(parts)
        case {"__array__": [dtype, shape, text]}:
            return np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
    return value
