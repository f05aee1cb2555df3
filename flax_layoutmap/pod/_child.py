"""The child process of `flm.pod.plan`, which runs XLA on one program.

It runs as a file, `python -P _child.py FOLDER`, and does not import this package.
libtpu may end the process at any moment. The folder has `request.json` and
`module.mlirbc`; the answer is in `program.txt`, `given.txt` and finally `result.json`,
which is written atomically.

The module is passed to the compiler through the client, the only use of `jaxlib` in
this package: `jax.export` would lose donated arguments, and needs `flatbuffers`.

Most of the time of a compile is code generation. XLA writes its programs to files
before that, so the process ends as soon as the wanted file exists.
"""

import functools
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The compiler writes these in order; when the last exists, the others are complete.
_GIVEN = "before_optimizations.txt"
_PARTITIONED = ".after_spmd-partitioning."
_PROGRAM = "after_optimizations.txt"
_BUFFERS = "after_optimizations-buffer-assignment.txt"
_ASSIGNED = "after_optimizations_after_buffer_assignment.txt"
# libtpu 0.0.50 (jax 0.12) writes "page 0, " before the kind.
_ALLOCATION = re.compile(
    r"^allocation \d+: size (\d+), (?!color)(?:page \d+, )?(.*)", re.MULTILINE
)


def main(folder: Path) -> None:
    sys.excepthook = functools.partial(_fail, folder)
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    (_partition if request["topology"] is None else _compile)(folder, request)


def _fail(folder: Path, kind: type, error: BaseException, trace: Any) -> None:
    """Answer with an error, for example from the compiler."""
    _end(folder, {"error": f"{kind.__name__}: {error}"})


def _partition(folder: Path, request: dict[str, Any]) -> None:
    """Run XLA's partitioner with the CPU client of jaxlib."""
    import numpy as np
    from jaxlib import xla_client

    client = xla_client.make_cpu_client(num_devices=request["devices"])
    devices = client.devices()
    options = {"xla_dump_hlo_pass_re": "^spmd-partitioning$", **_dump_to(folder)}
    made = _options(np.arange(len(devices))[None], options, request)
    build = made.executable_build_options
    build.device_assignment = made.device_assignment
    code = (folder / "module.mlirbc").read_bytes()
    partitioned = functools.partial(_partitioned, devices=len(devices))
    given = code, xla_client.DeviceList(tuple(devices)), made
    _answer_early(folder, {}, partitioned, lambda: client.compile_and_load(*given))


def _partitioned(dump: Path, devices: int) -> dict[str, str] | None:
    """The partitioned program; None until it is complete (the entry is last)."""
    # XLA does not partition for one device.
    for path in dump.glob(f"*{_GIVEN if devices == 1 else _PARTITIONED}*"):
        text = path.read_text(encoding="utf-8")
        if "\nENTRY " in text and text.endswith("}\n\n"):
            return {"program": text, "given": _dumped(dump, _GIVEN)}
    return None


def _compile(folder: Path, request: dict[str, Any]) -> None:
    """Compile a lowered module ahead of time with libtpu, without devices."""
    import numpy as np
    from jax.experimental import topologies
    from jax.interpreters import mlir
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    options = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in request["options"].items()
    }
    described = topologies.get_topology_desc(request["topology"], "tpu", **options)
    answer: dict[str, Any] = {}
    devices = tuple(np.ravel(_grid(described.devices, request, answer)))
    with mlir.make_ir_context():
        module = ir.Module.parse((folder / "module.mlirbc").read_bytes())
    ids = np.array([[device.id for device in devices]])
    options = request["compiler_options"] | _dump_to(folder)
    made, where = _options(ids, options, request), xla_client.DeviceList(devices)
    given = devices[0].client.compile, module, where, made
    _answer_early(folder, answer, _assigned, functools.partial(*given))


def _dump_to(folder: Path) -> dict[str, Any]:
    """Options that make XLA write its programs to files."""
    dump = folder / "dump"
    dump.mkdir()
    return {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}


def _answer_early(
    folder: Path,
    answer: dict[str, Any],
    written: Callable[[Path], Any],
    compile_all: Callable[[], Any],
) -> None:
    """Compile, and answer as soon as `written` returns the dumped program.

    `written` returns the texts by name, with further entries of the answer, or None
    while they do not exist.
    """
    is_compiled = threading.Event()

    def look() -> None:
        texts, is_last = None, False
        while texts is None and not is_last:
            is_last = is_compiled.wait(0.02)
            texts = written(folder / "dump")
        if texts is not None:
            for name in {"program", "given"} & {*texts}:
                _write(folder / f"{name}.txt", texts.pop(name))
            _end(folder, answer | texts)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        compile_all()
    finally:
        is_compiled.set()
        thread.join()
    raise RuntimeError("the compiler wrote no program; is the disk full?")


def _assigned(dump: Path) -> dict[str, Any] | None:
    """The final program and its memory; None until buffers are assigned."""
    if not any(dump.glob(f"*.{_ASSIGNED}")):
        return None
    texts = {"program": _dumped(dump, _PROGRAM), "given": _dumped(dump, _GIVEN)}
    return {"memory": allocated(_dumped(dump, _BUFFERS)), **texts}


def _dumped(dump: Path, name: str) -> str:
    """A text of the compiler; the largest file of this name is the step's."""
    paths = sorted(dump.glob(f"*.{name}"), key=lambda path: path.stat().st_size)
    return paths[-1].read_text(encoding="utf-8")


def allocated(buffers: str) -> dict[str, int]:
    """Bytes of a device's memory by kind, from the text of a buffer assignment.

    Allocations with a color are in other memories, such as vector memory or the host's;
    thread-local allocations belong to computations within the program.
    """
    sizes = {"temporary": 0, "allocated": 0}
    for size, kind in _ALLOCATION.findall(buffers):
        if kind.startswith("thread-local"):
            continue
        sizes["allocated"] += int(size)
        if kind.startswith("preallocated-temp"):
            sizes["temporary"] += int(size)
    return sizes


def _end(folder: Path, answer: dict[str, Any]) -> None:
    """Write the answer, and exit without waiting for the library's threads."""
    _write(folder / "result.json", json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)


def _grid(devices: Any, request: dict[str, Any], answer: dict[str, Any]) -> Any:
    """The devices in mesh order, along the links if JAX has such an order."""
    import numpy as np
    from jax.experimental import mesh_utils

    within, between = request["within"], request["between"]
    shape = [size * times for size, times in zip(within, between, strict=True)]
    try:
        if request["options"].get("num_slices", 1) > 1:
            return mesh_utils.create_hybrid_device_mesh(
                within, between, devices, allow_split_physical_axes=True
            )
        return mesh_utils.create_device_mesh(
            shape, devices, allow_split_physical_axes=True
        )
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        # The order changes the cost of collectives, but not their axes.
        answer["note"] = (
            "the devices are in the order of their numbers, because JAX has no order "
            f"along the links: {error}"
        )
        return np.array(list(devices), dtype=object).reshape(shape)


def _options(ids: Any, options: dict[str, Any], request: dict[str, Any]) -> Any:
    """Options for one program on devices with these ids, of shape [1, devices]."""
    from jaxlib import xla_client

    made = xla_client.CompileOptions()
    made.num_replicas = 1
    made.num_partitions = ids.size
    made.device_assignment = xla_client.DeviceAssignment.create(ids)
    made.env_option_overrides = list(options.items())
    build = made.executable_build_options
    build.num_replicas = 1
    build.num_partitions = ids.size
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = True
    build.allow_spmd_sharding_propagation_to_output = request["free_results"]
    return made


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
