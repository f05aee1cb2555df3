"""The state of a data iterator in a step: encoded as JSON, one file per process."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap.checkpoint._checksums import json_digest
from flax_layoutmap.checkpoint._orbax import TURN, translated

# The folder of a step that holds the files.
DATA_FOLDER = "data"

# Name of the method that returns a state → name of the one that sets it.
_METHODS = {"get_state": "set_state", "state_dict": "load_state_dict"}

_BYTES, _TUPLE, _ARRAY = "__bytes__", "__tuple__", "__array__"


def text_of(data: Any) -> str:
    """Encode the state of what `save(data=…)` was given, for this process.

    Raises:
        CheckpointError: a state holds what is neither a JSON value, bytes, a tuple nor
            a NumPy array.
    """
    state = _encoded(_state_of(data), "data")
    held = {"processes": jax.process_count(), "state": state}
    return json.dumps({**held, "digest": json_digest(held)})


def states_of(texts: Mapping[int, str], path: str) -> list[Any]:
    """Decode the states of the processes that were read.

    Raises:
        CheckpointError: texts are missing or damaged.
    """
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
    """Compare what one process wrote with its digest; older versions wrote none."""
    held = {"processes": read["processes"], "state": read["state"]}
    if read.keys() > held.keys() and read.get("digest") != json_digest(held):
        raise ValueError("it is not what was saved")
    return read


def own_state(states: Sequence[Any], path: str) -> Any:
    """The state for this process.

    Raises:
        CheckpointError: they were saved by another number of processes, and differ.
    """
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


def check(data: Any, state: Any, where: str = "data") -> None:
    """Check that a state can be given back to the objects that it came from.

    Raises:
        CheckpointError: `data` is of another structure than what was saved.
    """
    if _taker(data) is not None or not isinstance(data, dict):
        return
    if not isinstance(state, dict) or set(state) != set(data):
        have = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(
            f"{where} was saved as {have}, and is to be restored into {sorted(data)}"
        )
    for key, part in data.items():
        check(part, state[key], f"{where}[{key!r}]")


def put(data: Any, state: Any) -> None:
    """Give a state back to the objects that it came from."""
    taker = _taker(data)
    if taker is not None:
        getattr(data, taker)(state)
    elif isinstance(data, dict):
        for key, part in data.items():
            put(part, state[key])


def plain(value: Any, where: str) -> Any:
    """A JSON value; arrays without dims become numbers.

    Raises:
        CheckpointError: it is none.
    """
    if isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0:
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(part, f"{where}[{at}]") for at, part in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain(part, f"{where}[{key!r}]") for key, part in value.items()}
    raise CheckpointError(
        f"{where} is {_a(value)}; use numbers, strings, lists, dicts with strings as "
        "keys; arrays belong in the tree"
    )


# ------------------------------------------------------------------- pieces


def _taker(data: Any) -> str | None:
    """The method that takes a state, of an object that has both."""
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
    """A value as JSON values, with tags for kinds that JSON lacks."""
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
    """One text file for each process, in the form of Orbax's stateful objects."""

    def __init__(self, text: str = "", wanted: int | None = None) -> None:
        self._text = text
        self._wanted = wanted
        self.texts: dict[int, str] = {}

    async def save(self, directory: Any) -> Any:
        """Write the file of this process, once the directory is there."""
        name, text = f"process_{jax.process_index()}.json", self._text

        async def write() -> None:
            ((await directory.await_creation()) / name).write_text(text)

        return write()

    async def load(self, directory: Any) -> Any:
        """Read the file of the wanted process; all files for another process count."""

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
    """Process → text that it wrote; only `process`, if as many wrote as there are."""
    from orbax.checkpoint import v1

    files = StateFiles(wanted=process)
    failing = f"cannot read the states of data in {path}"
    with TURN, translated(failing), v1.Context():
        v1.load_checkpointables(path, {DATA_FOLDER: files})
    return files.texts
