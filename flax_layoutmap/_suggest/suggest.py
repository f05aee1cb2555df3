"""flm.suggest: rules for a step on a mesh, found by search."""

import contextlib
import dataclasses
import functools
import math
import numbers
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType

from flax_layoutmap._core.errors import LayoutError, MeshError, RuleError
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.topologies import Topology
from flax_layoutmap._core.topologies import topology as topology_of
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.progress import shown_progress
from flax_layoutmap._step.arguments import first_four, signature_of, slots_of
from flax_layoutmap._suggest.compare import compared, first_of
from flax_layoutmap._suggest.memory import peak_bytes
from flax_layoutmap._suggest.price import ASSUMED, Pricer, cost_of_report
from flax_layoutmap._suggest.problem import Problem, seed_rules
from flax_layoutmap._suggest.rules import layout_text
from flax_layoutmap._suggest.search import Search
from flax_layoutmap._suggest.suggestion import Choice, Suggestion
from flax_layoutmap._tree.flax_internals import is_nnx_object
from flax_layoutmap.pod._aot import check_libtpu
from flax_layoutmap.pod._estimate import Planner
from flax_layoutmap.pod._lower import lower_step, rules_and_mesh
from flax_layoutmap.pod._lowered import Lowered
from flax_layoutmap.pod._passes import prepare
from flax_layoutmap.pod._plan import compile as compile_step
from flax_layoutmap.pod._plan import planned
from flax_layoutmap.pod._report import PodReport
from flax_layoutmap.pod._report_text import seconds_text

# Seconds after which the partitioner is ended.
_TIMEOUT = 300.0


def suggest(
    step: Any,
    *args: Any,
    mesh: Any = None,
    topology: Any = None,
    slices: int | None = None,
    hbm: int | None = None,
    layout_map: Any = None,
    donate_argnames: str | Iterable[str] = (),
    check: bool | Literal["compile"] = True,
    limit_seconds: float | None = None,
    progress: bool | None = None,
    **kwargs: Any,
) -> Suggestion:
    """Suggest rules for a step on a mesh, found by search, without devices.

    The step is lowered once. Which dims belong together is learned from Shardy's
    propagation, not from names. Candidates are priced as `with_layout` of a plan does
    it: the time of the collectives on the links, that of the matrix products, and an
    estimate of memory, which has to stay below the limit. XLA's partitioner plans the
    best two, full sharding and the current rules, and its order counts.

    Args:
        step: a function, or what `flm.jit`, `jax.jit` or `nnx.jit` made of one.
        *args: its arguments, as for `flm.pod.plan`; shapes are enough. Data that has a
            sharding on axes of the mesh keeps it, as in a plan.
        mesh: as for `flm.pod.plan`; its axes are Auto. None takes that of the rules.
        topology: as for `flm.pod.topology`, such as `"v5p:4x4x4"`; None assumes links,
            products and memory of v5p.
        slices: how many slices of it.
        hbm: bytes of one device that the step may use; None takes what the compiler
            allows on the topology.
        layout_map: the current rules, for comparison; None takes those of a function
            of `flm.jit`.
        donate_argnames: arguments that are state, beside NNX objects, optimizer states,
            what the step donates, and containers of floating-point arrays that have no
            rows of a batch in common. State counts as donated, but for a function of
            `jax.jit`, which has its own.
        check: whether XLA's partitioner plans what is compared; `"compile"`: whether
            the compiler for TPUs compiles it, which needs a topology and libtpu, as
            `flm.pod.compile` does.
        limit_seconds: when to end the search with the best so far, as Ctrl-C does.
        progress: whether to show the best so far; None: on a terminal or in a
            notebook, once it has taken 2 seconds.
        **kwargs: arguments of the step by name.

    Returns:
        The suggestion: print it.

    Raises:
        LayoutError: the step cannot be lowered; it has no state; the axes are Explicit.
        MeshError: there is no mesh, or it does not fill the topology.

    Example:
        >>> import jax, jax.numpy as jnp, flax_layoutmap as flm
        >>> def step(params, x):
        ...     def loss(params):
        ...         return (jnp.tanh(x @ params["up"]) @ params["down"]).sum()
        ...     return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))
        >>> params = {"up": jax.ShapeDtypeStruct((2048, 8192), jnp.bfloat16)}
        >>> params["down"] = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)
        >>> x = jax.ShapeDtypeStruct((65536, 2048), jnp.bfloat16)
        >>> given = {"donate_argnames": "params", "check": False}
        >>> found = flm.suggest(step, params, x, mesh="data=2,model=8", **given)
        >>> found.layout_map["down"].axes
        ('model', None)
    """
    start = time.perf_counter()
    is_number = isinstance(hbm, numbers.Real) and not isinstance(hbm, bool)
    if hbm is not None and not (is_number and 0 < hbm < math.inf):
        raise LayoutError(f"hbm={hbm!r} is no number of bytes: hbm=16 * 2**30")
    hbm = None if hbm is None else round(hbm)
    if check not in (True, False, "compile"):
        raise LayoutError(f'check must be True, False or "compile", got {check!r}')
    if layout_map is not None:
        layout_map = rule_set_of(layout_map, "layout_map=")
    where = None if topology is None else topology_of(topology, slices=slices)
    if where is None and slices is not None:
        raise MeshError('slices of which topology? pass topology="v5p:4x4x4" too')
    if check == "compile":
        if where is None:
            raise MeshError('check="compile" needs a topology: topology="v5p:4x4x4"')
        check_libtpu()
    named = [donate_argnames] if isinstance(donate_argnames, str) else donate_argnames
    named = tuple(named)
    shaped = _parameters(step, args, kwargs)
    by_shape = [name for name in shaped if name not in named]
    state = (*named, *by_shape)
    given = step, args, kwargs, mesh
    notes: list[str] = []
    try:
        rules, own = rules_and_mesh(*given, layout_map, where)
    except RuleError as error:
        if mesh is None:
            raise
        notes.append(f"the current rules do not fit this mesh: {first_of(error)}")
        rules, own = None, rules_and_mesh(None, args, kwargs, mesh, None, where)[1]
    lower = functools.partial(_lower, step, args, kwargs, state, own, where)
    report = functools.partial(_planned, lower)
    if check == "compile":
        options = {"topology": where, "mesh": own, "donate_argnames": state}
        if hbm is not None:
            options["compiler_options"] = {"xla_tpu_max_hbm_size_mib": hbm >> 20}
        report = functools.partial(compile_step, step, *args, **kwargs, **options)
    name, today = getattr(step, "__name__", "the step"), None
    with shown_progress(f"lowering {name}", None, progress), _unused_donations():
        search = _search(lower, own, where, hbm)
        try:
            today = None if rules is None else _of_today(lower(rules), rules)
        except LayoutError as error:
            notes.append(f"the current rules do not fit this step: {first_of(error)}")
    if limit_seconds is not None:
        search.is_over = lambda: time.perf_counter() - start > limit_seconds
    with shown_progress(functools.partial(_so_far, search), None, progress):
        search.run()
    comparing = shown_progress(f"comparing rules for {name}", None, progress)
    with comparing, _unused_donations():
        found = compared(search, today, report if check else None)
    notes += _taken(search.problem)
    if by_shape:
        notes.append(
            f"state by shape alone: {', '.join(by_shape)}; flm.jit and flm.pod.plan "
            "take what no rule shards for data, unless it is placed (flm.create, "
            "flm.reshard) or named (donate_argnames)"
        )
    notes += found.notes
    took = time.perf_counter() - start
    return dataclasses.replace(found, notes=tuple(notes), took_seconds=took)


def _parameters(
    step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[str]:
    """Containers of floating-point arrays that have no rows of a batch in common."""
    try:
        slots = slots_of(signature_of(step).bind(*args, **kwargs))
    except TypeError:  # which lowering the step explains
        return
    for slot, value in slots:
        if is_nnx_object(value):
            continue
        arrays = [one for one in jax.tree.leaves(value) if np.ndim(one)]
        rows = {np.shape(one)[0] for one in arrays} - {1}
        if len(rows) > 1 and all(
            jax.numpy.issubdtype(one.dtype, np.inexact) for one in arrays
        ):
            yield slot.name


@contextlib.contextmanager
def _unused_donations() -> Iterator[None]:
    """Without JAX's warning: what was taken for state need not be returned."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        yield


def _lower(
    step: Any,
    args: Any,
    kwargs: Any,
    donated: Any,
    mesh: DeviceMesh,
    topology: Topology | None,
    rules: RuleSet,
) -> Planner:
    """The step under some rules, ready for an estimate or a plan."""
    lowered = lower_step(step, args, kwargs, rules, donated, "tpu", mesh)
    return Planner(lowered, mesh, topology, prepare(lowered.lowered), "tpu", rules)


def _search(
    lower: Any, mesh: DeviceMesh, topology: Topology | None, hbm: int | None
) -> Search:
    if AxisType.Explicit in mesh.axis_types:
        raise LayoutError(
            f"the axes of {mesh} are explicit: layouts are part of the types that the "
            f'step is traced with; suggest rules for a mesh of auto axes: mesh="{mesh}"'
        )
    if mesh.size == 1:
        raise MeshError(f"the mesh {mesh} has one device; name one with more")
    lowered: Lowered = lower(seed_rules(mesh).freeze()).lowered
    problem = Problem(lowered, mesh)
    if not any(group.dims for group in problem.groups):
        raise LayoutError(_without_state(lowered))
    chip = ASSUMED if topology is None else topology.generation
    limit = chip.hbm_limit_bytes if hbm is None else hbm
    return Search(problem, Pricer(problem, topology), limit)


def _without_state(lowered: Lowered) -> str:
    """Which arguments are taken for data, containers first, and what to do."""
    parts = [leaf.path.partition("/") for leaf in lowered.leaves if leaf.role == "data"]
    parts.sort(key=lambda part: not part[1])
    names = [*dict.fromkeys(name for name, *_ in parts)]
    if not names:
        return f"{lowered.name} has no array to lay out: pass its parameters"
    return (
        f"{lowered.name} has no state to lay out: each of {', '.join(names)} is taken "
        f'for data; say what is state: donate_argnames="{names[0]}"'
    )


def _taken(problem: Problem) -> Iterator[str]:
    """What was taken for state, which rules lay out, and what for data."""
    roles: dict[str, dict[str, None]] = {"state": {}, "data": {}}
    leaves = problem.lowered.leaves
    for leaf in leaves:
        role = "data" if leaf.role == "data" else "state"
        roles[role][leaf.path.partition("/")[0]] = None
    state, data = (", ".join(names) or "none" for names in roles.values())
    yield f"taken for state: {state}; for data: {data}"
    kept = [
        f"{leaves[at].path} {layout_text(spec) if any(spec) else 'replicated'}"
        for at, spec in problem.kept.items()
    ]
    if kept:
        yield f"kept: the shardings that data came with, {first_four(kept)}"


def _so_far(search: Search) -> str:
    """What is shown while a search runs."""
    name, best = search.problem.lowered.name, search.best
    if not search.trail:
        return f"suggesting rules for {name}"
    # Priced before, so that nothing is computed in the thread that shows it.
    seconds = seconds_text(search.price.of(best).seconds)
    return (
        f"suggesting rules for {name}: {seconds} a step, {search.price.count} layouts "
        "tried"
    )


def _of_today(planner: Planner, rules: RuleSet) -> Choice:
    """Rules that were not found by the search, with their estimate."""
    cost = cost_of_report(planner.estimate(time.perf_counter()))
    prepared, pairs = planner.prepared, planner.lowered.pairs
    more = peak_bytes(prepared.lay_out(None, pairs), prepared.attributes)
    cost = dataclasses.replace(cost, peak_bytes=cost.at_rest_bytes + more)
    return Choice(LayoutMap.from_rule_set(rules), cost)


def _planned(lower: Any, layout_map: LayoutMap) -> PodReport:
    """The plan by XLA's partitioner."""
    planner, start = lower(layout_map.freeze()), time.perf_counter()
    return planned(planner, start, _TIMEOUT)
