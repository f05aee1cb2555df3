"""flm.checkpoint.Checkpointer."""

import contextlib
import json
import operator
import os
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax

from flax_layoutmap._birth.create import create
from flax_layoutmap._core.errors import CheckpointError, warn
from flax_layoutmap._core.processes import tell_of_others
from flax_layoutmap.checkpoint import _data_states, _metadata, _orbax
from flax_layoutmap.checkpoint._options import rules_of
from flax_layoutmap.checkpoint._places import (
    METADATA_FILE,
    absolute,
    cannot_name,
    check_shared,
)
from flax_layoutmap.checkpoint._restore import restore
from flax_layoutmap.checkpoint._save import prepare

# The user's own metadata, beside our record in the custom metadata of a step.
_USER = "metadata"


class Checkpointer:
    """The checkpoints of a training loop, one for each saved step.

    A save copies the values and returns; Orbax writes them while training goes on. Its
    errors are raised by the next `save` that is due, by `wait`, or at the end of the
    `with` block. Without a `with` block each save is complete when it returns.

    In a job that called `jax.distributed.initialize`, SIGTERM (preemption) makes the
    next `save` one that is due in all processes, and `reached_preemption` then says
    that the loop should end. For that, call `save` in every step.

    Every process calls the methods with the same arguments. Each step is a checkpoint
    of its own (`directory/1000`). An unfinished one is ignored, and removed by the next
    save; only one program at a time may save.

    Args:
        directory: where the steps are; it is made by the first save.
        layout_map: the rules, on a mesh of devices. They may differ from run to run.
        every: save each step that is a multiple of this; or one of the policies in
            `orbax.checkpoint.v1.training.save_decision_policies`.
        keep: how many of the latest steps to keep; None for all; or one of the policies
            in `….preservation_policies` (which see `metadata` as the metrics).
        keep_every: also keep the steps that are multiples of this.
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
        keep_every: int | None = None,
        checksums: bool = True,
    ) -> None:
        self._directory = absolute(directory)
        self._rules = rules_of(layout_map)
        if reason := cannot_name(self._directory):
            raise CheckpointError(f"cannot save to {self._directory}: {reason}")
        if os.path.isfile(os.path.join(self._directory, METADATA_FILE)):
            raise CheckpointError(
                f"{self._directory} is a checkpoint itself; give the one above it"
            )
        _check_policies(every, keep, keep_every)
        self._policies = (every, keep, keep_every)
        self._checksums = checksums
        self._is_inside = self._reached_preemption = False
        self._writer: Any = None  # Orbax's Checkpointer, opened by the first save
        self._pending: tuple[int, Any] | None = None  # step, and Orbax's response
        self._last: int | None = None  # the latest step, saved or being saved

    @property
    def directory(self) -> str:
        """The directory of the steps."""
        return self._directory

    @property
    def steps(self) -> list[int]:
        """The finished steps, in order, without one that is still being saved."""
        return _orbax.steps_below(self._directory)

    @property
    def latest(self) -> int | None:
        """The latest finished step, as in `steps`, or None."""
        return max(self.steps, default=None)

    @property
    def reached_preemption(self) -> bool:
        """Whether the job was asked to end, and the last save is for that."""
        return self._reached_preemption

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
        self._reached_preemption |= preempted
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
            with _orbax.translated(f"cannot save step {step} to {self._directory}"):
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
                with _orbax.translated(f"cannot finish the saves to {self._directory}"):
                    writer.close()

    def __enter__(self) -> Self:
        self._is_inside = True
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        where = f"; the latest step saved in {self._directory}: "
        tell_of_others(error, lambda: f"{where}{self.latest}")
        self.close()

    def _next(self, step: Any) -> int:
        if self._last is None:
            self._last = max(self.steps, default=-1)
        number = operator.index(step)
        if number <= self._last:
            raise CheckpointError(
                f"step {number} does not come after step {self._last}, the latest in "
                f"{self._directory}; to go back, remove the later steps"
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
        items: dict[str, Any] = {}

        # Runs within the Agreement, so that all processes learn of an error in one.
        def obstacle() -> str | None:
            custom[_USER] = None if metadata is None else _plain_json(metadata)
            if data is not None:
                items[_data_states.FOLDER] = _data_states.StateFile(data)
            return _orbax.cannot_write(place, overwrite=False)

        with _orbax.TURN:
            # "state" is Orbax's own name for the tree of a step.
            items["state"], custom[_metadata.KEY] = prepare(
                place, state, self._rules, self._checksums, obstacle
            )
            if self._writer is None:
                check_shared(place)
            has_metrics = hasattr(self._policies[1], "should_preserve")
            with _orbax.translated(f"cannot save to {place}"), _orbax.saving_context():
                writer, self._writer = self._opened(), None
                response = writer.save_checkpointables_async(
                    step,
                    items,
                    force=True,
                    metrics=custom[_USER] if has_metrics else None,
                    custom_metadata=_metadata.sealed(custom),
                )
        self._writer, self._pending = writer, (step, response)

    def _opened(self) -> Any:
        if self._writer is None:
            self._writer = _orbax.open_steps(self._directory, *self._policies)
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
        latest = self.latest
        if latest is not None:
            make = create_fn if self._rules is not None else create_fn()
            return self.restore(make, latest, data=data, **options), latest + 1
        if self._rules is None:
            return create_fn(), 0
        return create(create_fn, self._rules), 0

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
        states = None if data is None else _data_states.read_states(place)
        restored = restore(place, target, layout_map=self._rules, **options)
        if states is not None:
            _data_states.set_states(data, states, place)
        elif _data_states.has_states(place):
            warn(f"step {step} holds the state of data; to restore it too, pass data=")
        return restored

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """Return the metadata that a step was saved with; None is the latest step."""
        _, place = self._existing(step)
        custom = _orbax.read_metadata(place, tree_of=lambda _: {}).custom
        _metadata.check_intact(custom, place)
        return custom.get(_USER) or {}

    def data_states(self, step: int | None = None) -> list[Any]:
        """Return the data state that each process saved; None is the latest step."""
        return _data_states.read_states(self._existing(step)[1])

    def _place(self, step: int) -> str:
        return f"{self._directory.rstrip('/')}/{step}"

    def _existing(self, step: int | None) -> tuple[int, str]:
        self.wait()
        steps = self.steps
        chosen = max(steps, default=-1) if step is None else operator.index(step)
        if chosen not in steps:
            which = "step" if step is None else f"step {step}, the last: {steps[-5:]}"
            raise CheckpointError(f"{self._directory} has no {which}")
        return chosen, self._place(chosen)


def _check_policies(every: Any, keep: Any, keep_every: Any) -> None:
    numbers = [] if hasattr(every, "should_save") else [every]
    numbers += [] if keep is None or hasattr(keep, "should_preserve") else [keep]
    numbers += [] if keep_every is None else [keep_every]
    are_right = all(isinstance(number, int) and number > 0 for number in numbers)
    if not are_right or (keep is None and keep_every is not None):
        raise CheckpointError(
            f"every={every!r}, keep={keep!r}, keep_every={keep_every!r}: give positive "
            "whole numbers of steps; keep_every= goes with keep="
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
