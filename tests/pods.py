"""Steps, rules and program texts shared by the tests of flm.pod."""

import contextlib
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

import flax_layoutmap as flm
from flax_layoutmap.pod._hlo import Program, read_program

MESH = "data=2,model=4"


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def rules(batch: Any = "data", **layouts: Any) -> flm.LayoutMap:
    made = flm.LayoutMap(batch=batch)
    made.update(layouts)
    return made


MEGATRON = {"up": (None, "model"), "down": ("model", None)}
FULLY = {"up": ("data", "model"), "down": ("model", "data")}
PARAMS = {"up": struct(16, 32), "down": struct(32, 16)}
# More than the parameters, so that these are moved and not the data.
X = struct(512, 16)
SQUARE, ROWS = {"w": struct(16, 16)}, {"w": ("model", None)}


def loss_of(params: Any, x: Any) -> Any:
    return ((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2).mean()


def sgd(params: Any, x: Any) -> Any:
    loss, gradients = jax.value_and_grad(loss_of)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def tied(p: Any, tokens: Any) -> Any:
    """A step of a table that is looked up, and multiplied for the logits."""

    def loss(p: Any) -> Any:
        return ((jnp.tanh(p["w"][tokens]) @ p["w"].T) ** 2).mean()

    return {"w": p["w"] - jax.grad(loss)(p)["w"]}


def plan(step: Any, *args: Any, **options: Any) -> flm.pod.PodReport:
    return flm.pod.plan(step, *args, **{"mesh": MESH, **options})


def kinds(report: flm.pod.PodReport) -> Counter[tuple[Any, ...]]:
    """How often each kind runs over some axes for a leaf."""
    found: Counter[tuple[Any, ...]] = Counter()
    for one in report.collectives:
        found[one.kind, one.axes, one.path] += one.executions
    return found


def payload(collectives: Any) -> Counter[Any]:
    """Bytes in a step by kind and axes, as XLA for CPUs does it.

    It sums all of a gradient and takes its slice.
    """
    found: Counter[Any] = Counter()
    for one in collectives:
        kind = "all-reduce" if one.kind == "reduce-scatter" else one.kind
        found[kind, one.axes] += one.bytes_per_step
    return found


def compiled(step: Any, *args: Any, mesh: flm.DeviceMesh) -> Any:
    """The collectives of a function of jax.jit or flm.jit, on 8 CPU devices."""
    lowered = step.lower(*args)
    context: Any = contextlib.nullcontext()
    if AxisType.Explicit in mesh.axis_types:  # where a call finds this program again
        jax_mesh: Any = mesh.jax_mesh
        context = jax.sharding.use_abstract_mesh(jax_mesh.abstract_mesh)
    with context:
        text = lowered.compile().as_text()
    found = read_program(text, mesh.axis_sizes)
    assert not found.unread
    return found.collectives


# ------------------------------------------------------------- texts of programs

WHOLE = "replica_groups=[2,4]<=[8]"
SUM = """\
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def entry(*lines: str, before: str = "", devices: int = 8) -> str:
    """A program with these lines, after an argument `%p`."""
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule m, num_partitions={devices}\n\n{SUM}\n{before}\n"
        f"ENTRY %main (p: f32[8,4]) -> f32[8,4] {{\n"
        f"  %p = f32[8,4]{{1,0}} parameter(0)\n{body}\n}}\n"
    )


def computation(name: str, *lines: str) -> str:
    """A computation of one argument `%q`; the last line is its result."""
    *above, last = lines
    body = "\n".join(f"  {line}" for line in (*above, f"ROOT {last}"))
    return (
        f"%{name} (q: f32[8,4]) -> f32[8,4] {{\n"
        f"  %q = f32[8,4] parameter(0)\n{body}\n}}\n"
    )


def read(text: str, **options: Any) -> Program:
    """Reads a program for two rows ('data') of four devices ('model')."""
    return read_program(text, {"data": 2, "model": 4}, **options)
