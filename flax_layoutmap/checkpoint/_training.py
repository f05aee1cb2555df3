"""flm.checkpoint.Checkpointer."""

import os
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import jax

from flax_layoutmap._birth.create import create
from flax_layoutmap._core.errors import CheckpointError, warn
from flax_layoutmap._core.processes import Agreement, tell_of_others
from flax_layoutmap.checkpoint import _orbax, _record, _step_writer
from flax_layoutmap.checkpoint._leaves import mesh_of
from flax_layoutmap.checkpoint._loop import (
    Preemption,
    WriteLock,
    add_context,
    check_directory,
    check_numbers,
    described,
    difference,
    existing_step,
    next_step,
    way_back,
)
from flax_layoutmap.checkpoint._options import rules_of
from flax_layoutmap.checkpoint._places import absolute, is_url
from flax_layoutmap.checkpoint._restore import restore
from flax_layoutmap.checkpoint._save import prepare
from flax_layoutmap.checkpoint._step_writer import StepWriter, steps_in

# The user's own metadata, beside our record in the custom metadata of a step.
_USER = "metadata"


class Checkpointer:
    """The checkpoints of a training loop, one for each saved step.

    A save copies the values and returns; they are written while training goes on.
    Leaving the `with` block finishes the last one. Whatever ends the program, a save
    that failed is an error and no exit code 0: it is raised by the next `save`, or by
    the end of the block. Without a `with` block each save is complete when it returns.

    SIGTERM (a preempted job) makes the next `save` one that is due, and it is complete
    when it returns; `reached_preemption` then says that the loop should end. With
    several processes all of them save the same step; for that, call `save` in every
    step, and let the policy decide. A second SIGTERM ends the program as usual.

    Every process calls the methods with the same arguments. Below `directory` each step
    is a checkpoint of its own (`directory/1000`), which `restore` reads and which plain
    Orbax reads; an unfinished one is ignored, and removed by the next save. Only one
    program at a time may save there; any number may restore.

    Args:
        directory: where the steps are; it is made by the first save.
        layout_map: the rules, on a mesh of devices. They may differ from run to run.
        every: save each step that is a multiple of this; or one of the policies in
            `orbax.checkpoint.v1.training.save_decision_policies`.
        keep: how many of the latest steps to keep; None for all; or one of the policies
            in `….preservation_policies` (which see `metadata` as the metrics). Older
            ones are removed once a newer one is complete.
        keep_every: also keep the steps that are multiples of this.
        checksums: as in `flm.checkpoint.save`; they are computed before `save` returns.

    Raises:
        CheckpointError: the directory is a file or a checkpoint itself, or a number
            makes no sense.
        RuleError: `layout_map` is neither a LayoutMap nor a RuleSet.

    Example:
        >>> import tempfile, jax.numpy as jnp, optax, flax_layoutmap as flm
        >>> from flax import nnx
        >>> layout_map = flm.LayoutMap("data=-1")
        >>> layout_map["kernel"] = (None, "data")
        >>> layout_map["bias"] = None
        >>> def create_fn():
        ...     model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
        ...     return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        >>> @flm.jit(layout_map=layout_map, donate_argnames=("model", "optimizer"))
        ... def train_step(model, optimizer, batch):
        ...     loss_of = lambda model: jnp.mean(model(batch) ** 2)
        ...     loss, gradients = nnx.value_and_grad(loss_of)(model)
        ...     optimizer.update(model, gradients)
        ...     return loss
        >>> def run(directory, steps):
        ...     with flm.checkpoint.Checkpointer(
        ...         directory, layout_map=layout_map, every=2, keep=3
        ...     ) as checkpointer:
        ...         state, start = checkpointer.restore_or_init(create_fn)
        ...         for step in range(start, steps):
        ...             loss = train_step(*state, jnp.ones((8, 4)))
        ...             last = step == steps - 1
        ...             checkpointer.save(
        ...                 step, state, metadata={"loss": loss}, force=last
        ...             )
        ...             if checkpointer.reached_preemption:
        ...                 break
        ...     return start, checkpointer.steps
        >>> directory = tempfile.mkdtemp()
        >>> run(directory, 4), run(directory, 6)
        ((0, [0, 2, 3]), (4, [3, 4, 5]))

    Plain JAX: `orbax.checkpoint.v1.training.Checkpointer(directory)`.
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
        check_numbers(every, keep, keep_every)
        check_directory(self._directory)
        self._every, self._checksums = every, checksums
        self._writer = StepWriter(self._directory, every, keep, keep_every)
        self._lock = WriteLock(self._directory)
        self._preemption = Preemption()
        self._is_inside = self._is_closed = False
        self._last: int | None = None  # step that was saved last
        self._passed: int | None = None  # step that was no longer due after it
        self._tree: dict[str, str] | None = None

    @property
    def directory(self) -> str:
        """The directory of the steps."""
        return self._directory

    @property
    def steps(self) -> list[int]:
        """The finished steps, in order; one that is still being saved is not there yet.

        `wait()` before it, where that one counts.
        """
        return steps_in(self._directory)

    @property
    def latest(self) -> int | None:
        """The latest finished step, as in `steps`, or None."""
        return max(self.steps, default=None)

    @property
    def reached_preemption(self) -> bool:
        """Whether the program was asked to end, and the last save is for that."""
        return self._preemption.is_reached

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
            state: any tree that `flm.checkpoint.save` takes, the same in each step.
            data: what the batches come from: an object with `get_state()` and
                `set_state(state)`, or `state_dict()` and `load_state_dict(state)`; a
                JSON value; or a dict of these. Each process saves its own.
            metadata: JSON values, and arrays without dims (the loss), for people.
            force: save it even if it is not due, as the last one of a run.

        Returns:
            Whether this step is being saved.

        Raises:
            CheckpointError: an earlier save failed; the step cannot be saved now; or
                the tree is another one than before. Nothing was written of this step.
            ResolveError: leaves do not fit the rules.
        """
        if self._is_closed:
            raise CheckpointError(
                f"this Checkpointer of {self._directory} is closed; make a new one"
            )
        self._settle(self._writer.check)
        if self._last is None:
            self._last = max(self.steps, default=-1)
        step = next_step(step, self._last, self._directory)
        preempted = self._preemption.reached(step)
        if not (force or preempted or self._writer.is_due(step)):
            self._passed = step
            return False
        try:
            # Raises the failure of an earlier save before any problem of this step.
            self.wait()
            self._start(step, state, data, metadata)
            self._last, self._passed = step, None
            if preempted:
                self.wait()
        finally:
            if not self._is_inside:
                self._settle(self._let_go)
        return True

    def wait(self) -> None:
        """Wait until the save in progress is complete.

        Raises:
            CheckpointError: it failed.
        """
        self._settle(self._writer.wait)

    def close(self) -> None:
        """Finish the save in progress; called at the end of a `with` block.

        Raises:
            CheckpointError: it failed.
        """
        self._end(deliver=True)

    def __enter__(self) -> Self:
        if self._is_closed or self._is_inside:
            raise CheckpointError(
                f"this Checkpointer of {self._directory} was used already; make a new "
                "one for each `with` block"
            )
        self._is_inside = True
        self._preemption.watch()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tell_of_others(error, self._go_on)
        try:
            self._end(deliver=error is None)
        except CheckpointError as failure:
            if error is not None:
                add_context(failure, error)
            raise
        if error is None and self._passed is not None and not self.reached_preemption:
            warn(
                f"step {self._passed} was the last one, and it is not saved, as "
                f"every={self._every}; to save the last step of a run: "
                "checkpointer.save(step, state, force=step == steps - 1)"
            )

    def _go_on(self) -> str:
        last = self.latest
        saved = "nothing is saved" if last is None else f"step {last} is saved"
        return f"; {saved} in {self._directory}"

    # --------------------------------------------------------------- restoring

    def restore_or_init(
        self, create_fn: Callable[[], Any], *, data: Any = None, **options: Any
    ) -> tuple[Any, int]:
        """Restore the latest step, or initialize the state if there is none.

        Args:
            create_fn: makes the state, such as `(model, optimizer)`: what `save` gets.
                With rules it is traced; the values are initialized in their shards, or
                read directly into them on the current mesh.
            data: as in `save`; its state is set where a step is restored.
            **options: of `flm.checkpoint.restore`.

        Returns:
            The state, and the step to go on with: the latest one plus 1, or 0.

        Raises:
            CheckpointError: the latest step is damaged or does not fit; an earlier one
                is not taken in its place.
        """
        latest = self._agreed_latest()
        if latest is not None:
            make = create_fn if self._rules is not None else create_fn()
            state = self.restore(make, latest, data=data, **options)
        else:
            state = (
                create_fn() if self._rules is None else create(create_fn, self._rules)
            )
        self._tree = described(state)
        return state, 0 if latest is None else latest + 1

    def restore(
        self,
        target: Any = None,
        step: int | None = None,
        *,
        data: Any = None,
        **options: Any,
    ) -> Any:
        """Restore a step, as `flm.checkpoint.restore` does.

        Args:
            target: as there.
            step: which one; None for the latest.
            data: as in `save`; its state is set.
            **options: as there.

        Returns:
            What was restored.

        Raises:
            CheckpointError: there is no such step, it is damaged or it does not fit.
        """
        step, place = self._existing(step)
        try:
            states = None if data is None else self._own_data(place, data)
            restored = restore(place, target, layout_map=self._rules, **options)
            if states is not None:
                _step_writer.put_data(data, states[0])
        except CheckpointError as error:
            text = f"{error}\n{way_back(step, self.steps, self._directory)}"
            raise CheckpointError(text, error.problems) from error
        if data is None and _step_writer.has_data(place):
            warn(
                f"step {step} holds the state of data, and it is not restored; pass "
                f"data=, or read it with checkpointer.data_states({step})"
            )
        return restored

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """Return the metadata that a step was saved with; None is the latest step.

        Raises:
            CheckpointError: there is no such step, or it is damaged.
        """
        _, place = self._existing(step)
        custom = _orbax.read_metadata(place).custom
        _record.check_intact(custom, place)
        return custom.get(_USER) or {}

    def data_states(self, step: int | None = None) -> list[Any]:
        """Return the data state that each process saved; None is the latest step.

        Raises:
            CheckpointError: there is no such step, it has none, or they are damaged.
        """
        step, place = self._existing(step)
        if not _step_writer.has_data(place):
            raise CheckpointError(
                f"step {step} in {self._directory} has no state of data"
            )
        return _step_writer.data_states(_step_writer.read_data(place), place)

    # ----------------------------------------------------------------- details

    def _start(
        self, step: int, state: Any, data: Any, metadata: Mapping[str, Any] | None
    ) -> None:
        place = self._place(step)
        tree: dict[str, str] = {}
        custom: dict[str, Any] = {}
        text: str | None = None

        # Runs within the Agreement, so that all processes learn of an error in one.
        def obstacle() -> str | None:
            nonlocal text
            tree.update(described(state))
            text = None if data is None else _step_writer.data_text(data)
            user = None if metadata is None else dict(metadata)
            custom[_USER] = _step_writer.plain_json(user, "metadata")
            return self._obstacle(step, tree)

        with _orbax.TURN:
            ready = prepare(place, state, self._rules, obstacle, self._checksums)
            custom[_record.KEY] = ready.record
            self._writer.start(step, ready.values, _record.sealed(custom), text)
        self._tree = tree

    def _obstacle(self, step: int, tree: dict[str, str]) -> str | None:
        """Why a step cannot be written, or None."""
        last = self.latest
        if last is not None and step <= last:
            return f"step {last} was saved there by another program meanwhile"
        text = _orbax.cannot_write(self._place(step), overwrite=False)
        if text is not None:
            return text
        if self._tree is not None and tree != self._tree:
            return difference(self._tree, tree)
        owner = None
        if jax.process_index() == 0 and not is_url(self._directory):
            owner = self._lock.take()
        return owner and f"the directory is being saved to by {owner}"

    def _place(self, step: int) -> str:
        return f"{self._directory.rstrip('/')}/{step}"

    def _agreed_latest(self) -> int | None:
        """The latest step, which all processes must see."""
        self.wait()
        mesh = mesh_of(None, self._rules)
        with Agreement(f"restoring from {self._directory}", mesh) as agreement:
            latest = self.latest
            agreement.add(lambda: {"latest step": str(latest)})
        return latest

    def _existing(self, step: int | None) -> tuple[int, str]:
        """A step that is there, and its path."""
        self.wait()
        chosen = existing_step(step, self.steps, self._directory)
        return chosen, self._place(chosen)

    def _own_data(self, place: str, data: Any) -> list[Any]:
        """The state for data of this process, in a list, as it may be anything."""
        if not _step_writer.has_data(place):
            raise CheckpointError(
                f"{place} has no state of data; restore without data=, and set the "
                "iterator to where it belongs"
            )
        texts = _step_writer.read_data(place, jax.process_index())
        state = _step_writer.own_data_state(
            _step_writer.data_states(texts, place), place
        )
        _step_writer.check_data(data, state)
        return [state]

    def _end(self, *, deliver: bool) -> None:
        # At exit, from a generator that was never closed: the guard finishes the save.
        if self._is_closed or sys.is_finalizing():
            return
        self._is_closed, finished = True, False
        try:
            self._let_go()
            finished = True
        finally:
            self._preemption.stop(deliver=deliver and finished)

    def _settle(self, wait: Callable[[], None]) -> None:
        try:
            wait()
        except CheckpointError:
            self._last = None  # the step was not saved after all
            raise

    def _let_go(self) -> None:
        try:
            self._writer.close()
        finally:
            self._lock.release()
