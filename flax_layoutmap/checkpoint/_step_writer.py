"""Write the steps of a training loop with Orbax in the background.

A step holds the state, and one JSON file per process with the state of its data
iterators.
"""

import base64
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from flax_layoutmap._core.checksums import json_digest
from flax_layoutmap._core.errors import CheckpointError, visible
from flax_layoutmap.checkpoint._orbax import TURN, saving_context, translated
from flax_layoutmap.checkpoint._places import is_url

# Orbax's own name for the tree of a step.
_STATE = "state"

# How long a save may go on after the end of the main thread.
_LAST_SECONDS = 20.0
# How often the end of the main thread is polled.
_LOOK_SECONDS = 0.25

# Saves that run, or whose failure was not raised yet; and the thread that guards them.
_UNREPORTED: set["_Pending"] = set()
_guard: threading.Thread | None = None


def steps_in(directory: str) -> list[int]:
    """The complete steps below a directory, in order; reads only names.

    Orbax renames a step to its number when it is complete.
    """
    if is_url(directory):
        from orbax.checkpoint import v1

        # On storage services a file marks a finished step.
        found = v1.path.step.standard_name_format().find_all(directory)
        return sorted(metadata.step for metadata in found)
    try:
        entries = os.scandir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    with entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    # Orbax names a step by its number, without leading zeros.
    return sorted(int(n) for n in names if n.isdecimal() and str(int(n)) == n)


# --------------------------------------------------------------------- saving


def _takes_work(pool: ThreadPoolExecutor) -> bool:
    """Whether executors still accept work; they do not while the program exits."""
    try:
        pool.submit(int)
    except RuntimeError:
        return False
    return True


class _Pending(threading.Thread):
    """Waits for a save, and keeps its failure until it is raised."""

    def __init__(self, what: str, response: Any) -> None:
        super().__init__(name=what, daemon=True)
        self._response = response
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def start(self) -> None:
        """Start to wait, and the exit guard if needed."""
        _guard_the_end()
        _UNREPORTED.add(self)
        super().start()

    def run(self) -> None:
        """Wait for the save."""
        try:
            self._response.result()
        except BaseException as error:
            # Of any kind: it is raised again in the thread that saves.
            self.error = error
        else:
            _UNREPORTED.discard(self)
        self.ended.set()


def _guard_the_end() -> None:
    """Start one thread that keeps the program from exiting with code 0 and a lost save.

    Orbax cannot finish a save once the main thread has ended: the save is lost, after
    five minutes and with exit code 0. `atexit` runs too late; a non-daemon thread is
    joined before. The main thread may itself be waiting for Orbax's threads at exit, so
    the first sign is that executors refuse new work.
    """
    global _guard
    if _guard is None:
        _guard = threading.Thread(target=_at_the_end, name="flax_layoutmap saves")
        _guard.start()


def _at_the_end() -> None:
    main = threading.main_thread()
    with ThreadPoolExecutor(1) as pool:
        while main.is_alive() and _takes_work(pool):
            main.join(_LOOK_SECONDS)
    until = time.monotonic() + _LAST_SECONDS
    for pending in list(_UNREPORTED):
        pending.ended.wait(max(0.0, until - time.monotonic()))
    lost = list(_UNREPORTED)
    for pending in lost:
        print(
            visible(
                f"flax_layoutmap: {pending.name} is lost, as the program ended before "
                "it was complete; leave the `with` block of the Checkpointer, or call "
                f"its close(), before that ({pending.error!r})"
            ),
            file=sys.stderr,
            flush=True,
        )
    if lost:
        os._exit(1)


class StepWriter:
    """`orbax.checkpoint.v1.training.Checkpointer`, with at most one save in progress.

    The first save, and the next one after a failure, remove what interrupted saves
    left, which only the one program that writes may do. `every`, `keep` and
    `keep_every` are as in `Checkpointer`.
    """

    def __init__(
        self, directory: str, every: Any, keep: Any, keep_every: int | None
    ) -> None:
        self._directory = directory
        self._every, self._keep, self._keep_every = every, keep, keep_every
        self._inner: Any = None
        self._is_clean = False
        self._pending: _Pending | None = None

    def is_due(self, step: int) -> bool:
        """Whether the policy saves a step."""
        if isinstance(self._every, int):
            return step % self._every == 0
        with TURN, translated("the save policy failed"), saving_context():
            return bool(self._opened(clean=False).should_save(step))

    def start(
        self, step: int, values: Mapping[str, Any], custom: Any, data: str | None
    ) -> None:
        """Start to write a step; return when all values are copied.

        `custom` is the custom metadata, `data` the text of this process's iterators.
        """
        self.wait()
        what = self._what(step)
        parts: dict[str, Any] = {_STATE: values}
        if data is not None:
            parts[DATA_FOLDER] = StateFiles(data)
        metrics = (
            custom.get("metadata") if hasattr(self._keep, "should_preserve") else None
        )
        try:
            with translated(f"cannot save {what}"), saving_context():
                response = self._opened(clean=True).save_checkpointables_async(
                    step, parts, force=True, metrics=metrics, custom_metadata=custom
                )
        except CheckpointError:
            self._inner = None
            raise
        self._pending = _Pending(f"the save of {what}", response)
        self._pending.start()

    def check(self) -> None:
        """Raise the failure of a save that has ended, without waiting."""
        if self._pending is not None and self._pending.ended.is_set():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in progress, and raise its failure."""
        pending = self._pending
        if pending is None:
            return
        pending.ended.wait()
        with TURN:
            if self._pending is pending:  # not the next save, of another thread
                self._pending = None
        _UNREPORTED.discard(pending)
        if pending.error is not None:
            # It does not know any more which steps there are; a new one removes what
            # has been written of this one.
            self._inner = None
            with translated(f"{pending.name} failed, and nothing was kept"):
                raise pending.error

    def close(self) -> None:
        """Wait for the save in progress, and close Orbax's Checkpointer."""
        self.wait()
        inner, self._inner = self._inner, None
        if inner is not None:
            with translated(f"cannot finish the saves to {self._directory}"):
                inner.close()

    def _what(self, step: int) -> str:
        return f"step {step} to {self._directory}"

    def _opened(self, *, clean: bool) -> Any:
        """Orbax's object; `clean` if this is the one program that writes."""
        from orbax.checkpoint import v1

        if self._inner is None or clean > self._is_clean:
            is_number = isinstance(self._every, int)
            self._inner = v1.training.Checkpointer(
                self._directory,
                context=saving_context(),
                save_decision_policy=None if is_number else self._every,
                preservation_policy=self._preservation(),
                cleanup_tmp_directories=clean,
            )
            self._is_clean = clean
        return self._inner

    def _preservation(self) -> Any:
        from orbax.checkpoint import v1

        policies = v1.training.preservation_policies
        if not isinstance(self._keep, int):
            return self._keep
        latest = policies.LatestN(self._keep)
        if self._keep_every is None:
            return latest
        return policies.AnyPreservationPolicy(
            [latest, policies.EveryNSteps(self._keep_every)]
        )


# ------------------------------------------------- the state of data iterators


# The folder of a step that holds the files.
DATA_FOLDER = "data"

# Name of the method that returns a state → name of the one that sets it.
_METHODS = {"get_state": "set_state", "state_dict": "load_state_dict"}

_BYTES, _TUPLE, _ARRAY = "__bytes__", "__tuple__", "__array__"


def data_text(data: Any) -> str:
    """Encode the state of `save(data=…)` for this process."""
    state = _encoded(_state_of(data), "data")
    held = {"processes": jax.process_count(), "state": state}
    return json.dumps({**held, "digest": json_digest(held)})


def data_states(texts: Mapping[int, str], path: str) -> list[Any]:
    """Decode the states of the processes whose files were read."""
    try:
        read = {at: _intact(json.loads(text)) for at, text in texts.items()}
        states = [_decoded(one["state"]) for one in read.values()]
        counts = {one["processes"] for one in read.values()}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the states of data in {path} are damaged: {error!r}"
        ) from error
    own = len(texts) == 1 and counts == {jax.process_count()}
    if not own and counts != {len(texts)}:
        raise CheckpointError(
            f"the states of data in {path} are damaged: there are files of the "
            f"processes {sorted(texts)}, written by {sorted(counts)}"
        )
    return states


def _intact(read: dict[str, Any]) -> dict[str, Any]:
    """Compare a process's file with its digest; older versions wrote none."""
    held = {"processes": read["processes"], "state": read["state"]}
    if read.keys() > held.keys() and read.get("digest") != json_digest(held):
        raise ValueError("it differs from what was saved")
    return read


def own_data_state(states: Sequence[Any], path: str) -> Any:
    """The state for this process."""
    if all(_encoded(one, "") == _encoded(states[0], "") for one in states):
        return states[0]
    if len(states) == jax.process_count():
        return states[jax.process_index()]
    raise CheckpointError(
        f"the states of data in {path} are those of {len(states)} processes, each of "
        f"which was somewhere else, and there {_are(jax.process_count())} now: restore "
        "without data=, look at them with checkpointer.data_states(step), and set the "
        "iterator to where all of them together were"
    )


def check_data(data: Any, state: Any, where: str = "data") -> None:
    """Check that a saved state has the structure of `data`."""
    if _taker(data) is not None or not isinstance(data, dict):
        return
    if not isinstance(state, dict) or set(state) != set(data):
        have = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(
            f"{where} was saved as {have}, and is to be restored into {sorted(data)}"
        )
    for key, part in data.items():
        check_data(part, state[key], f"{where}[{key!r}]")


def put_data(data: Any, state: Any) -> None:
    """Set the state of the objects in `data`."""
    taker = _taker(data)
    if taker is not None:
        getattr(data, taker)(state)
    elif isinstance(data, dict):
        for key, part in data.items():
            put_data(part, state[key])


def plain_json(value: Any, where: str) -> Any:
    """Convert to JSON values; arrays without dims become numbers."""
    if isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0:
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain_json(part, f"{where}[{at}]") for at, part in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {
            key: plain_json(part, f"{where}[{key!r}]") for key, part in value.items()
        }
    raise CheckpointError(
        f"{where} is {_a(value)}; use numbers, strings, lists, dicts with strings as "
        "keys; arrays belong in the tree"
    )


# ------------------------------------------------------------------- pieces


def _taker(data: Any) -> str | None:
    """The name of the method that sets a state, for objects that can also return it."""
    for give, take in _METHODS.items():
        if callable(getattr(data, give, None)) and callable(getattr(data, take, None)):
            return take
    return None


def _state_of(data: Any) -> Any:
    taker = _taker(data)
    if taker is not None:
        give = next(give for give, take in _METHODS.items() if take == taker)
        return getattr(data, give)()
    if isinstance(data, dict):
        return {key: _state_of(part) for key, part in data.items()}
    return data


def _encoded(value: Any, where: str) -> Any:
    """Encode a value as JSON, with tags for kinds that JSON lacks."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcSU":
        raw = base64.b64encode(value.tobytes()).decode()
        return {_ARRAY: [value.dtype.str, list(value.shape), raw]}
    if isinstance(value, list | tuple):
        parts = [_encoded(part, f"{where}[{at}]") for at, part in enumerate(value)]
        return parts if isinstance(value, list) else {_TUPLE: parts}
    marks = {_BYTES, _TUPLE, _ARRAY}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        if not marks & value.keys():
            return {k: _encoded(part, f"{where}[{k!r}]") for k, part in value.items()}
    raise CheckpointError(
        f"{where} is {_a(value)}, which cannot be saved; give an object with get_state "
        "and set_state, or state_dict and load_state_dict, whose state is made of "
        "numbers, strings, bytes, lists, tuples, NumPy arrays and dicts with strings "
        "as keys"
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_BYTES}:
        return base64.b64decode(value[_BYTES])
    if value.keys() == {_TUPLE}:
        return tuple(_decoded(part) for part in value[_TUPLE])
    if value.keys() == {_ARRAY}:
        dtype, shape, raw = value[_ARRAY]
        array = np.frombuffer(base64.b64decode(raw), dtype).reshape(shape)
        return array.copy()
    return {key: _decoded(part) for key, part in value.items()}


def _a(value: Any) -> str:
    if isinstance(value, dict):
        return "a dict with other keys than strings, or with a key of ours"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"


# ----------------------------------------------------------- files in a step


class StateFiles:
    """One text file per process, as an Orbax stateful checkpointable."""

    def __init__(self, text: str = "", wanted: int | None = None) -> None:
        self._text = text
        self._wanted = wanted
        self.texts: dict[int, str] = {}

    async def save(self, directory: Any) -> Any:
        """Write the file of this process, once the directory exists."""
        name, text = f"process_{jax.process_index()}.json", self._text

        async def write() -> None:
            ((await directory.await_creation()) / name).write_text(text)

        return write()

    async def load(self, directory: Any) -> Any:
        """Read the file of one process; all files if the process count differs."""

        async def read() -> None:
            names = {
                int(place.stem.removeprefix("process_")): place
                for place in directory.iterdir()
                if place.name.startswith("process_")
            }
            if self._wanted in names and len(names) == jax.process_count():
                names = {self._wanted: names[self._wanted]}
            self.texts = {at: names[at].read_text() for at in sorted(names)}

        return read()


def has_data(path: str) -> bool:
    """Whether a step holds states of data iterators."""
    from etils import epath

    return (epath.Path(path) / DATA_FOLDER).exists()


def read_data(path: str, process: int | None = None) -> dict[int, str]:
    """Process → its text; only `process` if the number of processes is the same."""
    from orbax.checkpoint import v1

    files = StateFiles(wanted=process)
    failing = f"cannot read the states of data in {path}"
    with TURN, translated(failing), v1.Context():
        v1.load_checkpointables(path, {DATA_FOLDER: files})
    return files.texts
