"""The states of data iterators in a step: one JSON file for each process."""

import base64
import json
from typing import Any

import jax
import numpy as np

from flax_layoutmap._core.checksums import json_digest
from flax_layoutmap._core.errors import CheckpointError

# The folder of a step that holds the files.
FOLDER = "data"


class StateFile:
    """An Orbax `StatefulCheckpointable`: the state of this process in a file."""

    def __init__(self, data: Any) -> None:
        states = {name: part.get_state() for name, part in _iterators(data).items()}
        state = _encode(states if isinstance(data, dict) else states[""], "data")
        held = {"processes": jax.process_count(), "state": state}
        self.text = json.dumps({**held, "digest": json_digest(held)})

    async def save(self, directory: Any) -> Any:
        async def write() -> None:
            name = f"process_{jax.process_index()}.json"
            (await directory.await_creation() / name).write_text(self.text)

        return write()

    async def load(self, directory: Any) -> Any:
        raise NotImplementedError


def has_states(path: str) -> bool:
    return _folder(path).exists()


def read_states(path: str) -> list[Any]:
    if not has_states(path):
        raise CheckpointError(f"{path} has no state of data; restore it without data=")
    states: list[Any] = []
    try:
        count = len(list(_folder(path).glob("process_*.json")))
        for process in range(count):
            file = _folder(path) / f"process_{process}.json"
            held = json.loads(file.read_text())
            digest = held.pop("digest", None)  # older versions wrote none
            if digest not in (None, json_digest(held)):
                raise ValueError("it differs from what was saved")
            if held["processes"] != count:
                raise ValueError(f"there are {count} of {held['processes']} files")
            states.append(_decode(held["state"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        text = f"the states of data in {path} are damaged: {error!r}"
        raise CheckpointError(text) from error
    return states


def set_states(data: Any, states: list[Any], path: str) -> None:
    """Set the state that this process saved, or any if all saved the same one."""
    are_equal = all(
        json.dumps(_encode(state, "")) == json.dumps(_encode(states[0], ""))
        for state in states
    )
    if len(states) != jax.process_count() and not are_equal:
        raise CheckpointError(
            f"{len(states)} processes saved different states of data in {path}, and "
            f"this job has {jax.process_count()}: restore without data=, and set the "
            "iterator from checkpointer.data_states(step)"
        )
    state, parts = states[0 if are_equal else jax.process_index()], _iterators(data)
    state = state if isinstance(data, dict) else {"": state}
    if not isinstance(state, dict) or state.keys() != parts.keys():
        raise CheckpointError(f"{path} was not saved with data= of {sorted(parts)}")
    for name, part in parts.items():
        part.set_state(state[name])


def _folder(path: str) -> Any:
    from etils import epath

    return epath.Path(path) / FOLDER


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


def _decode(value: Any) -> Any:
    match value:
        case list():
            return [_decode(part) for part in value]
        case {"__bytes__": text}:
            return base64.b64decode(text)
        case {"__tuple__": parts}:
            return tuple(_decode(part) for part in parts)
        case {"__array__": [dtype, shape, text]}:
            return np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
        case dict():
            return {key: _decode(part) for key, part in value.items()}
    return value
