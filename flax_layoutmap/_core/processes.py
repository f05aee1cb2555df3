"""Compare rules, settings and values across processes before a collective."""

import contextlib
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from flax_layoutmap._core.errors import ProcessError, warn
from flax_layoutmap._core.fetch import is_eager
from flax_layoutmap._core.mesh import DeviceMesh

Parts = Mapping[str, str | Sequence[str]]

_SETTINGS = (
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
)
# The size of what each process sends: a gather needs equal sizes.
_BYTES = 4096
# How many processes that differ a message lists.
_LISTED = 8


class Agreement:
    """Compare parts (name → text or lines) across processes at the end of a block.

    The processes exchange digests of the parts, of the mesh and of the JAX settings
    that change values. If any differ, or if the block or a part raised in one process,
    all processes raise. Like every collective, all processes must enter it; nothing is
    exchanged inside a trace, or for a mesh that lacks devices of some process.

    `step` tells in messages what comes next: `"creating the model"`.

    >>> with Agreement("creating the model", None) as agreement:
    ...     agreement.add(lambda: {"rules": "(gate|up)/kernel: (None, 'model')"})
    """

    def __init__(self, step: str, mesh: DeviceMesh | None) -> None:
        self._step = step
        self._mesh = mesh
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
        if mesh is None or not _spans_the_job(mesh) or not is_eager():
            return
        if isinstance(error, Exception):
            self._tell(error)
        elif error is None:  # an interrupt ends this process at once
            try:
                digests = self._digests(mesh)
            except Exception as failure:  # of any kind: the other processes wait
                self._tell(failure)
                raise
            self._compare(digests)

    def _tell(self, error: Exception) -> None:
        """Send an error, which is raised afterwards, to the other processes."""
        text = f"{type(error).__name__}: {error}"
        warn(
            f"process {jax.process_index()} failed before {self._step} and waits to "
            f"tell the others: {text}"
        )
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            _exchange(self._step, {}, text)

    def _compare(self, digests: dict[str, str]) -> None:
        try:
            rows = _exchange(self._step, digests, "")
        except jax.errors.JaxRuntimeError as cause:
            raise ProcessError(
                f"process {jax.process_index()} could not reach the other processes "
                f"before {self._step}: one of them has ended (see the last output of "
                f"each), or the network between them fails: {cause}"
            ) from cause
        _raise_if_different(rows, self._step)

    def _digests(self, mesh: DeviceMesh) -> dict[str, str]:
        parts: dict[str, Any] = {"mesh": ""}  # listed first
        for function in self._parts:
            parts |= function()
        ids = [device.id for device in mesh.devices.flat]
        parts["mesh"] = f"{mesh!r} {ids}"
        parts["settings of JAX"] = [str(getattr(jax.config, n)) for n in _SETTINGS]
        return {name: _digest(part) for name, part in parts.items()}


def tell_of_others(
    error: BaseException | None,
    go_on: Callable[[], str] = lambda: ", from the last checkpoint",
) -> None:
    """Add a note about the other processes to an error of JAX's runtime."""
    count = jax.process_count()
    failed = isinstance(error, jax.errors.JaxRuntimeError)
    if error is not None and failed and count > 1:
        error.add_note(
            f"This is process {jax.process_index()} of {count}. When one of them ends "
            "or cannot be reached, the collectives of the others fail like this: look "
            "for the first error in the logs of all, and start all of them again"
            + go_on()
        )


def digest_of_values(leaves: Iterable[Any]) -> str:
    """The checksums of the leaves that have one."""
    return repr([text for leaf in leaves if (text := digest_of_value(leaf))])


def digest_of_value(leaf: Any) -> str:
    """A checksum of shape, dtype and value; empty for arrays that span processes."""
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


def _spans_the_job(mesh: DeviceMesh) -> bool:
    count = jax.process_count()
    if count == 1 or mesh.is_abstract:
        return False
    return len({device.process_index for device in mesh.devices.flat}) == count


def _digest(part: str | Sequence[str]) -> str:
    text = part if isinstance(part, str) else "\n".join(part)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _exchange(step: str, digests: dict[str, str], error: str) -> list[Any]:
    """Step, digests of the parts and error of each process, in order."""
    row = json.dumps([step[:200], digests, error[:600]], ensure_ascii=False)
    sent = row.encode(errors="replace").ljust(_BYTES)
    # The caller's JAX settings must not affect the gather.
    with jax.transfer_guard("allow"), jax.disable_jit(False):
        rows = multihost_utils.process_allgather(np.frombuffer(sent, np.uint8))
    return [json.loads(row.tobytes()) for row in rows]


def _raise_if_different(rows: Sequence[Any], step: str) -> None:
    """Raise if a process failed, or has another step or digest than process 0."""
    failed = [
        f"process {p} failed: {error}" for p, (*_, error) in enumerate(rows) if error
    ]
    if failed:
        raise ProcessError(f"not all processes are ready for {step}: {_listed(failed)}")
    (first_step, first, _), problems = rows[0], []
    for process, (its_step, digests, _) in enumerate(rows):
        parts = [n for n in first | digests if first.get(n) != digests.get(n)]
        if its_step != first_step:
            problems.append(f"process {process} is at {its_step}, not at {first_step}")
        elif parts:
            text = f"differs from process 0 in its {', '.join(parts)}"
            problems.append(f"process {process} {text}")
    if problems:
        raise ProcessError(
            f"the processes disagree before {step}: {_listed(problems)}. Build mesh, "
            "rules, model, seeds and global batch from the same values in every process"
        )


def _listed(problems: Sequence[str]) -> str:
    more = [f"… and {len(problems) - _LISTED} more"] if problems[_LISTED:] else []
    return "; ".join([*problems[:_LISTED], *more])
