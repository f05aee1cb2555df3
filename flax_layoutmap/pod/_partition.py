"""Find the collectives of a step with XLA's SPMD partitioner, without devices.

The CPU client of jaxlib has the partitioner of every backend. What the compiler for
TPUs does before and after it, as far as measured, is in `_tpu.py` and `_merge.py`.

The client takes at most 2,048 devices. The program has the same operations on any
number of devices; only sizes of arrays depend on it. So a step for a larger mesh is
partitioned on two meshes with one axis shortened, the largest if possible. Sizes that
are equal on both are constant; those that change with the axis are scaled.
"""

import contextlib
import dataclasses
import io
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flax_layoutmap._core.topologies import Topology
from flax_layoutmap.pod._aot import Answer, Code, Compiled, partition_for
from flax_layoutmap.pod._early import inline_calls, rewrite_for_tpus
from flax_layoutmap.pod._hlo import Program, members_of, read_program, wire_bytes
from flax_layoutmap.pod._hlo_text import Module
from flax_layoutmap.pod._lowered import Lowered
from flax_layoutmap.pod._merge import merge
from flax_layoutmap.pod._mlir import functions
from flax_layoutmap.pod._placement import dcn_axes
from flax_layoutmap.pod._records import Collective
from flax_layoutmap.pod._tpu import as_compiled, scatters

_NOT_SCALED = "collectives whose size does not follow from two smaller meshes, left out"
_MIXED = "collectives over parts of axes that cross slices, counted as if all crossed"


class NotScaled(Exception):
    """The reason why smaller meshes cannot be scaled to a mesh."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shortened:
    """A mesh and two smaller ones, which differ in the size of one axis."""

    sizes: Mapping[str, int]
    axis: str
    short: int  # its size on the larger of the two
    shorter: int

    def on(self, size: int) -> dict[str, int]:
        """The sizes with another size of that axis."""
        return {**self.sizes, self.axis: size}

    @property
    def factor(self) -> int:
        """The size of the axis over that on the larger of the two."""
        return self.sizes[self.axis] // self.short


def shortened(sizes: Mapping[str, int], most: int) -> Shortened:
    """Shorten a mesh to at most so many devices, or raise NotScaled.

    >>> mesh = shortened({"data": 3, "fsdp": 256, "tensor": 8}, 2048)
    >>> mesh.axis, mesh.short, mesh.shorter
    ('fsdp', 64, 32)
    """
    for axis in sorted(sizes, key=lambda name: -sizes[name]):
        size, rest = sizes[axis], math.prod(sizes.values()) // sizes[axis]
        for short in range(size // 2, 3, -1):
            if size % short == 0 and short * rest <= most:
                for shorter in range(short // 2, 1, -1):
                    if short % shorter == 0:
                        return Shortened(sizes, axis, short, shorter)
    raise NotScaled("no axis has two smaller sizes")


def scaled(large: Program, small: Program, mesh: Shortened) -> Program:
    """Scale the programs on two smaller meshes, the larger first, to the whole mesh.

    Raises NotScaled if they are different programs. Single collectives that cannot be
    scaled are in `unrecognised`.
    """
    pairs = list(zip(large.collectives, small.collectives, strict=False))
    same = len(large.collectives) == len(small.collectives) and all(
        _what(one) == _what(other) for one, other in pairs
    )
    if not same:
        raise NotScaled("the program is another on smaller meshes")
    found = [_scaled(one, other, mesh) for one, other in pairs]
    unread = (*large.unrecognised, *[_NOT_SCALED for one in found if one is None])
    kept = tuple(one for one in found if one is not None)
    return dataclasses.replace(large, collectives=kept, unrecognised=unread)


def _what(one: Collective) -> tuple[object, ...]:
    return one.kind, one.axes, one.dtype, one.executions, one.path, len(one.shape)


def _scaled(one: Collective, other: Collective, mesh: Shortened) -> Collective | None:
    ratio, shape = mesh.short // mesh.shorter, list[int]()
    for size, before in zip(one.shape, other.shape, strict=True):
        if size == before:
            shape.append(size)
        elif size * ratio == before and size % mesh.factor == 0:
            shape.append(size // mesh.factor)
        elif size == before * ratio:
            shape.append(size * mesh.factor)
        else:
            return None
    before, after = math.prod(one.shape), math.prod(shape)
    size = one.bytes * after // before if before else one.bytes
    members = members_of(one, mesh.on(mesh.short))
    fewer = members_of(other, mesh.on(mesh.shorter))
    if members is None or fewer is None or members not in (fewer, fewer * ratio):
        return None
    if members != fewer:
        members *= mesh.factor
    sent = wire_bytes(one.kind, size, members)
    return dataclasses.replace(one, bytes=size, wire_bytes=sent, shape=tuple(shape))


_MANUAL = "sdy.manual_computation"
# Most devices of the CPU client of jaxlib; it rejects 4,096.
MOST_DEVICES = 2048


@contextlib.contextmanager
def partitioning(
    lowered: Lowered,
    code: Code,
    sizes: Mapping[str, int],
    topology: Topology | None,
    *,
    timeout: float,
) -> Iterator[Callable[[], Program]]:
    """Partition a step by XLA while the context is open.

    Yields a function that waits for the program. Both raise NotScaled if the mesh is
    too large and the program cannot be scaled from smaller ones.
    """
    mesh = None
    if math.prod(sizes.values()) > MOST_DEVICES:
        if code.has_manual:
            raise NotScaled("in a shard_map, sizes are those of single devices")
        mesh = shortened(sizes, MOST_DEVICES)
    with contextlib.ExitStack() as children:

        def begin(own: Mapping[str, int]) -> Answer:
            written = code
            if mesh is not None:
                bytecode = on_mesh(code.bytecode, own)
                written = dataclasses.replace(code, bytecode=bytecode)
            count = math.prod(own.values())
            return children.enter_context(
                partition_for(written, count, timeout=timeout)
            )

        meshes = [sizes]
        if mesh is not None:
            meshes = [mesh.on(mesh.short), mesh.on(mesh.shorter)]
        answers = [begin(own) for own in meshes]

        def found() -> Program:
            programs = [
                _read(answer(), lowered, own, topology, mesh)
                for answer, own in zip(answers, meshes, strict=True)
            ]
            if mesh is None:
                (program,) = programs
            else:
                large, small = programs
                program = scaled(large, small, mesh)
            return _as_compiled(program, sizes, topology)

        yield found


def _read(
    done: Compiled,
    lowered: Lowered,
    sizes: Mapping[str, int],
    topology: Topology | None,
    mesh: Shortened | None,
) -> Program:
    """Read the program on a mesh, which may be a shortened one."""
    assert done.text is not None
    longer = (1, 1)
    if mesh is not None:
        size = sizes[mesh.axis]
        longer = size, mesh.sizes[mesh.axis] // size
    rules = None if topology is None else scatters(topology, longer)
    merged = merge(done.text, rules, for_tpus=topology is not None)
    return read_step(merged, lowered, sizes)


def _as_compiled(
    program: Program, sizes: Mapping[str, int], topology: Topology | None
) -> Program:
    """The collectives as the compiler makes them, within slices and between them."""
    apart = [[*as_compiled(one, sizes, topology)] for one in program.collectives]
    crosses = dcn_axes(sizes, topology)
    mixed = [
        _MIXED
        for first, *more in apart
        if first.over_dcn and not more
        if members_of(first, sizes) != math.prod(crosses.get(n, 1) for n in first.axes)
    ]
    return dataclasses.replace(
        program,
        collectives=tuple(part for parts in apart for part in parts),
        unrecognised=(*program.unrecognised, *mixed),
    )


def read_step(
    program: str | Module,
    lowered: Lowered,
    sizes: Mapping[str, int],
    slice_of: Any = (),
) -> Program:
    """Read a program of XLA with the paths of a step's leaves."""
    leaves = enumerate(lowered.leaves)
    parameters = {at for at, leaf in leaves if leaf.role == "parameter"}
    return read_program(
        program,
        sizes.keys(),
        sizes.values(),
        slice_of=slice_of,
        paths=[leaf.path for leaf in lowered.leaves],
        results={r: lowered.leaves[at].path for r, at in lowered.state()},
        parameters=parameters,
        new_parameters=[r for r, at in lowered.pairs.items() if at in parameters],
    )


def code_to_partition(lowered: Any, *, as_tpus: bool) -> Code:
    """The code for the partitioner, with `as_tpus` rewritten as for TPUs."""
    module = lowered.compiler_ir("stablehlo").operation
    with module.context:
        module = module.clone()
        names = inline_calls(functions(module))
        if as_tpus:
            block = functions(module)["main"].regions[0].blocks[0]
            rewrite_for_tpus(block, products=True)
        return dataclasses.replace(code_of(module), has_manual=_MANUAL in names)


def on_mesh(bytecode: bytes, sizes: Mapping[str, int]) -> bytes:
    """The same program on a mesh of other sizes."""
    from jax.extend.mlir import ir
    from jax.interpreters import mlir

    written = ", ".join(f'"{name}"={size}' for name, size in sizes.items())
    count, made = math.prod(sizes.values()), io.BytesIO()
    with mlir.make_ir_context():
        module = ir.Module.parse(bytecode)
        for op in module.body.operations:
            if op.operation.name == "sdy.mesh":
                op.attributes["mesh"] = ir.Attribute.parse(f"#sdy.mesh<[{written}]>")
        attributes = module.operation.attributes
        attributes["mhlo.num_partitions"] = ir.Attribute.parse(f"{count} : i32")
        module.operation.write_bytecode(made)
    return made.getvalue()


def code_of(module: Any) -> Code:
    """The code of a module, for another process."""
    with module.context:
        main, made = functions(module)["main"], io.BytesIO()
        module.write_bytecode(made)
        kind = main.attributes["function_type"].value
        return Code(
            made.getvalue(),
            _without_sharding(main, "arg_attrs", len(kind.inputs)),
            _without_sharding(main, "res_attrs", len(kind.results)),
        )


def _without_sharding(main: Any, name: str, count: int) -> list[bool]:
    if name not in main.attributes:
        return [True] * count
    return ["sdy.sharding" not in one for one in main.attributes[name]]
