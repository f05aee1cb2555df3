"""Compare rules, settings and values across processes before a collective."""

import collections
import hashlib
import json
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_layoutmap._core.errors import ProcessError, warn
from flax_layoutmap._core.fetch import is_eager
from flax_layoutmap._core.mesh import DeviceMesh

# A process that waits longer warns; one that failed stops waiting.
PATIENCE_SECONDS = 60.0
# After this long it raises.
LIMIT_SECONDS = 1800.0

# The characters of a differing line in the error.
_LINE_CHARACTERS = 300

# The size of every message: a collective needs equal sizes.
_BYTES = 8192

_SETTINGS = (
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
)

Message = dict[str, Any]
Parts = Mapping[str, str | Sequence[str]]


class Agreement:
    """A block that compares parts (name → text or lines) over all processes of a mesh.

    At its end the processes exchange hashes of their parts, of the mesh and of the
    settings of JAX that change values; if some differ, every process raises
    ProcessError, with the first line that differs. If the block raises in one process,
    the others raise too. Nothing is exchanged where the mesh has only this process or
    no devices, or inside a trace. All processes of the mesh must enter it, as for every
    collective.

    `what` names the next step in messages: `"creating the model"`. After `patience`
    seconds (a minute) a process warns that it waits, and a process whose block raised
    stops waiting; after half an hour it raises.

    >>> with Agreement("creating the model", None) as agreement:
    ...     agreement.add(lambda: {"rules": "(gate|up)/kernel: (None, 'model')"})
    """

    def __init__(
        self, what: str, mesh: DeviceMesh | None, *, patience: float | None = None
    ) -> None:
        self._what = what
        self._mesh = mesh
        self._patience = patience
        self._parts: list[Callable[[], Parts]] = []

    def __enter__(self) -> "Agreement":
        return self

    def add(self, parts: Callable[[], Parts]) -> None:
        """Add parts; the function is called only if there is a comparison."""
        self._parts.append(parts)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        mesh = self._mesh
        if mesh is None or jax.process_count() == 1 or not is_eager():
            return
        members = _device_of_each(mesh)
        if len(members) == 1:
            return
        if error is None:
            every = [*self._parts, _settings]
            parts = {name: text for part in every for name, text in part().items()}
            message = _message(self._what, mesh, parts)
            messages = _exchange(message, members, self._what, patience=self._patience)
            problems = differences(messages)
            if problems:
                name = _listed(messages)
                where = _first_line(parts, name, messages, members, self._what)
                raise _disagreement(problems, messages, self._what, where)
        elif isinstance(error, Exception):
            message = _message(self._what, mesh, {})
            message["error"] = f"{type(error).__name__}: {error}"[:1000]
            patience = self._patience or PATIENCE_SECONDS
            _exchange(message, members, self._what, gives_up_after=patience)


def tell_of_others(
    error: BaseException | None,
    go_on: Callable[[], str] = lambda: ", from the last checkpoint",
) -> None:
    """Add a note about the other processes to an error of JAX's runtime."""
    count = jax.process_count()
    failed_running = isinstance(error, jax.errors.JaxRuntimeError)
    if error is not None and failed_running and count > 1:
        error.add_note(
            f"This is process {jax.process_index()} of {count}. When one of them ends "
            "or cannot be reached, the collectives of the others fail like this: look "
            "for the first error in the logs of all, and start all of them again"
            + go_on()
        )


def digest_of_values(leaves: Iterable[Any]) -> str:
    """A checksum of shapes, dtypes and values on the host; skips everything else."""
    return repr([text for leaf in leaves if (text := digest_of_value(leaf))])


def digest_of_value(leaf: Any) -> str:
    """A checksum of shape, dtype and value; empty for values of several processes."""
    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_addressable:
            return ""
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
    numbers = int | float | complex | np.ndarray | np.generic
    if not isinstance(leaf, jax.Array | numbers):
        return ""
    value = np.ascontiguousarray(leaf)
    check = zlib.crc32(value.reshape(-1).view(np.uint8).data)
    return f"{np.shape(leaf)} {value.dtype} {check:08x}"


def differences(messages: Mapping[int, Message]) -> list[str]:
    """List the processes whose message is not that of the majority, one text each."""
    problems = [
        f"process {process} failed: {message['error']}"
        for process, message in messages.items()
        if message["error"]
    ]
    well = {p: m for p, m in messages.items() if not m["error"]}
    if not well:
        return problems
    texts = collections.Counter(json.dumps(message) for message in well.values())
    # With equal counts, the message of the lowest process is first.
    usual = json.loads(texts.most_common(1)[0][0])
    for process, message in well.items():
        if message["what"] != usual["what"]:
            problems.append(
                f"process {process} is at {message['what']}, not at {usual['what']}"
            )
            continue
        parts = [
            name
            for name in {**usual["parts"], **message["parts"]}
            if message["parts"].get(name) != usual["parts"].get(name)
        ]
        if message["mesh"] != usual["mesh"]:
            parts.insert(0, _mesh_part(message, usual))
        if parts:
            problems.append(f"process {process} differs in its {', '.join(parts)}")
    return problems


def _mesh_part(message: Message, usual: Message) -> str:
    mine, theirs = message["mesh"][0], usual["mesh"][0]
    if mine == theirs:
        return f"mesh (other devices, or another order of them, in {mine})"
    return f"mesh ({mine} instead of {theirs})"


def _disagreement(
    problems: Sequence[str], messages: Mapping[int, Message], what: str, where: str
) -> ProcessError:
    said = "; ".join(problems)
    if len(problems) == sum(bool(message["error"]) for message in messages.values()):
        return ProcessError(f"not all processes are ready for {what}: {said}")
    return ProcessError(
        f"the processes disagree before {what}: {said}{where}. Build mesh, rules, "
        "model, seeds and global batch from the same values in every process"
    )


def _listed(messages: Mapping[int, Message]) -> str | None:
    """The last part that differs and is given as lines in all processes, if any.

    The last one follows from the others: the table differs where the rules do.
    """
    if any(message["error"] for message in messages.values()):
        return None
    if len({json.dumps([m["what"], m["mesh"]]) for m in messages.values()}) > 1:
        return None  # these explain all other differences
    first, *others = messages.values()
    return next(
        (
            name
            for name in reversed(first["parts"])
            if all(name in message["lines"] for message in messages.values())
            and any(other["parts"][name] != first["parts"][name] for other in others)
        ),
        None,
    )


def _first_line(
    parts: Parts,
    name: str | None,
    messages: Mapping[int, Message],
    members: Mapping[int, Any],
    what: str,
) -> str:
    """Find, with all processes, the first line of a part in which they differ."""
    if name is None:
        return ""
    lines = parts[name]
    most = max(message["lines"][name] for message in messages.values())
    low, high = 0, most  # the first `low` lines agree, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        prefix = _short_hash("\n".join(lines[:middle]))
        received = _exchange({"prefix": prefix}, members, what)
        if len({message["prefix"] for message in received.values()}) == 1:
            low = middle
        else:
            high = middle
    own = lines[low][:_LINE_CHARACTERS] if low < len(lines) else "nothing"
    received = _exchange({"line": own}, members, what)
    texts = {process: message["line"] for process, message in received.items()}
    usual = collections.Counter(texts.values()).most_common(1)[0][0]
    odd = next((p for p, text in texts.items() if text != usual), None)
    if odd is None:  # they differ beyond the shown characters
        return f"; the first difference in the {name} is in {usual!r}"
    other = next(p for p, text in texts.items() if text == usual)
    return (
        f"; the first difference in the {name}: process {odd} has {texts[odd]!r}, "
        f"where process {other} has {usual!r}"
    )


def _message(what: str, mesh: DeviceMesh, parts: Parts) -> Message:
    order = [device.id for device in mesh.devices.flat]
    return {
        "what": what[:200],
        "mesh": [repr(mesh)[:200], _short_hash(f"{mesh!r} {order}")],
        "parts": {
            name: _short_hash(text if isinstance(text, str) else "\n".join(text))
            for name, text in parts.items()
            if name != "mesh"
        },
        "lines": {n: len(t) for n, t in parts.items() if not isinstance(t, str)},
        "error": "",
    }


def _settings() -> Parts:
    """Settings of JAX that change values; the last part, as the others follow it."""
    return {"settings of JAX": [f"{n}={getattr(jax.config, n)}" for n in _SETTINGS]}


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _device_of_each(mesh: DeviceMesh) -> dict[int, Any]:
    """One device for each process of a mesh, the same ones in every process.

    By id, as the processes may differ in the order of the mesh.
    """
    if mesh.is_abstract:
        return {jax.process_index(): None}
    wanted = {device.process_index for device in mesh.devices.flat}
    every = jax.devices(mesh.devices.flat[0].platform)
    lowest = {d.process_index: d for d in sorted(every, key=lambda d: -d.id)}
    return {process: lowest[process] for process in sorted(wanted)}


def _exchange(
    message: Message,
    members: Mapping[int, Any],
    what: str,
    *,
    gives_up_after: float | None = None,
    patience: float | None = None,
) -> dict[int, Message]:
    """The message of each process; waits for all, or for some seconds."""
    sent = json.dumps(message, ensure_ascii=False).encode()
    assert len(sent) <= _BYTES, f"{len(sent)} bytes do not fit in {_BYTES}"
    row = np.frombuffer(sent.ljust(_BYTES), np.uint8)
    received: list[np.ndarray] = []
    failed: list[Exception] = []

    def gather() -> None:
        try:
            received.append(_gather(row, list(members.values())))
        except Exception as error:  # broad: those of the runtime have no common kind
            failed.append(error)

    # A thread of its own is out of reach of the caller's mesh, transfer guard and other
    # settings, and can be abandoned when no process answers.
    thread = threading.Thread(target=gather, daemon=True)
    thread.start()
    patience = patience or PATIENCE_SECONDS
    limit = max(LIMIT_SECONDS, 4 * patience)
    thread.join(gives_up_after or patience)
    if thread.is_alive() and gives_up_after is None:
        warn(
            f"process {jax.process_index()} has waited {patience:.0f} s before "
            f"{what} and is still waiting: the processes {list(members)} of the mesh "
            "must all get here, and at least one has not"
        )
        thread.join(limit - patience)
        if thread.is_alive():
            raise ProcessError(
                f"process {jax.process_index()} has waited {limit:.0f} s "
                f"before {what}, and gives up: of the processes {list(members)} at "
                "least one has not got here; see the last output of each"
            )
    if received:
        rows = (json.loads(bytes(row).decode(errors="replace")) for row in received[0])
        return dict(zip(members, rows, strict=True))
    if gives_up_after is not None:
        return {}
    raise ProcessError(
        f"process {jax.process_index()} could not reach the other processes before "
        f"{what}: one of them has ended (see the last output of each), or the "
        f"network between them fails: {failed[0]}"
    ) from failed[0]


def _gather(row: np.ndarray, devices: Sequence[Any]) -> np.ndarray:
    """The rows of all processes, one device of each taking part."""
    mesh = Mesh(np.asarray(devices, dtype=object), ("process",))
    own = next(d for d in devices if d.process_index == jax.process_index())
    rows = jax.make_array_from_single_device_arrays(
        (len(devices), row.size),
        NamedSharding(mesh, PartitionSpec("process")),
        [jax.device_put(row[None], own)],
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    return np.asarray(jax.jit(_unchanged, out_shardings=everywhere)(rows))


def _unchanged(x: Any) -> Any:
    return x
