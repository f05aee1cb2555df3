"""flm.suggest: rules for a step on a mesh, found by search."""

import contextlib
import dataclasses
import functools
import time
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
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.progress import shown_progress
from flax_layoutmap._step.arguments import signature_of, slots_of
from flax_layoutmap._suggest.candidate import Candidate
from flax_layoutmap._suggest.memory import peak_bytes
from flax_layoutmap._suggest.moves import fully_sharded, single
from flax_layoutmap._suggest.price import ASSUMED, Cost, Pricer, cost_of_report
from flax_layoutmap._suggest.problem import Problem, seed_rules
from flax_layoutmap._suggest.rules import layout_text, rules_of
from flax_layoutmap._suggest.search import Search
from flax_layoutmap._suggest.suggestion import Suggestion, best_other
from flax_layoutmap._tree.flax_internals import is_nnx_object
from flax_layoutmap.pod._aot import check_libtpu
from flax_layoutmap.pod._estimate import Planner
from flax_layoutmap.pod._lower import lower_step, rules_and_mesh
from flax_layoutmap.pod._lowered import Lowered
from flax_layoutmap.pod._passes import prepare
from flax_layoutmap.pod._plan import compile as compile_step
from flax_layoutmap.pod._plan import planned
from flax_layoutmap.pod._report import PodReport

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
    best two and full sharding, and its order counts.

    Args:
        step: a function, or what `flm.jit`, `jax.jit` or `nnx.jit` made of one.
        *args: its arguments, as for `flm.pod.plan`; shapes are enough.
        mesh: as for `flm.pod.plan`; its axes are Auto. None takes that of the rules.
        topology: as for `flm.pod.topology`, such as `"v5p:4x4x4"`; None assumes links,
            products and memory of v5p.
        slices: how many slices of it.
        hbm: bytes of one device that the step may use; None takes what the compiler
            allows on the topology.
        layout_map: the rules of today, for comparison; None takes those of a function
            of `flm.jit`.
        donate_argnames: arguments that are state, beside those that are taken for it:
            NNX objects, optimizer states, what the step donates, and containers of
            floating-point arrays that have no rows of a batch in common. These count
            as donated.
        check: whether XLA's partitioner plans the best two and full sharding;
            `"compile"`: whether the compiler for TPUs compiles them, which needs a
            topology and libtpu, as `flm.pod.compile`.
        limit_seconds: when to end the search with the best so far, as Ctrl-C does.
        progress: whether to show that it is at work; None: on a terminal or in a
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
    if hbm is not None and (not isinstance(hbm, int | float) or hbm <= 0):
        raise LayoutError(f"hbm={hbm!r} is no number of bytes: hbm=16 * 2**30")
    where = None if topology is None else topology_of(topology, slices=slices)
    if check == "compile":
        if where is None:
            raise MeshError('check="compile" needs a topology: topology="v5p:4x4x4"')
        check_libtpu()
    named = [donate_argnames] if isinstance(donate_argnames, str) else donate_argnames
    state = *named, *_parameters(step, args, kwargs)
    given = step, args, kwargs, mesh
    notes: tuple[str, ...] = ()
    try:
        today, own = rules_and_mesh(*given, layout_map, where)
    except RuleError as error:
        if mesh is None:
            raise
        notes = (f"the rules of today do not fit this mesh: {error}",)
        today, own = None, rules_and_mesh(None, args, kwargs, mesh, None, where)[1]
    lower = functools.partial(_lower, step, args, kwargs, state, own, where)
    report = functools.partial(_planned, lower)
    if check == "compile":
        options = {"topology": where, "mesh": own, "donate_argnames": state}
        if hbm is not None:
            options["compiler_options"] = {"xla_tpu_max_hbm_size_mib": int(hbm) >> 20}
        report = functools.partial(compile_step, step, *args, **kwargs, **options)
    search = _search(lower, own, where, hbm)
    cost = None
    try:
        cost = None if today is None else _cost(lower(today))
    except LayoutError as error:
        notes = (f"the rules of today do not fit this step: {error}",)
    if limit_seconds is not None:
        search.is_over = lambda: time.perf_counter() - start > limit_seconds
    what = f"suggesting rules for {search.problem.lowered.name}"
    with shown_progress(what, None, progress):
        search.run()
        found = _suggestion(search, report if check else None, cost, start)
    return dataclasses.replace(found, notes=(*notes, _roles(search.problem.lowered)))


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
        rows = {np.shape(one)[0] for one in arrays}
        if len(rows) > 1 and all(
            jax.numpy.issubdtype(one.dtype, np.inexact) for one in arrays
        ):
            yield slot.name


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
        names = sorted({leaf.path.partition("/")[0] for leaf in lowered.leaves})
        raise LayoutError(
            f"{lowered.name} has no state to lay out: each of {', '.join(names)} is "
            f'taken for data; say what is state: donate_argnames="{names[0]}"'
        )
    chip = ASSUMED if topology is None else topology.generation
    limit = chip.hbm_limit_bytes if hbm is None else hbm
    return Search(problem, Pricer(problem, topology), limit)


def _roles(lowered: Lowered) -> str:
    """What was taken for state, which rules lay out, and what for data."""
    roles: dict[str, dict[str, None]] = {"state": {}, "data": {}}
    for leaf in lowered.leaves:
        role = "data" if leaf.role == "data" else "state"
        roles[role][leaf.path.partition("/")[0]] = None
    return "; ".join(
        f"{role}: {', '.join(names) or 'none'}" for role, names in roles.items()
    )


def _suggestion(
    search: Search, report: Any, today: Cost | None, start: float
) -> Suggestion:
    """What a search has found; `report` makes that of a map, or is None."""
    problem, price = search.problem, search.price
    assert search.best is not None and search.limit_bytes is not None
    ordered = [search.best]
    reports: dict[Candidate, PodReport] = {}
    if search.is_complete:
        ordered += search.rivals()
    if search.is_complete and report is not None:
        with contextlib.suppress(KeyboardInterrupt):  # the search is not lost
            reports = {
                one: report(layout_map=rules_of(problem, one)) for one in ordered
            }
    too_large = [one for one, own in reports.items() if own.fits is False]
    costs = {one: price.of(one) for one in ordered}
    costs |= {one: cost_of_report(report) for one, report in reports.items()}
    ordered.sort(
        key=lambda one: (one in too_large, search.excess(one), costs[one].seconds)
    )
    chosen, *others = ordered
    cost, limit = price.with_peak(chosen), search.limit_bytes
    start_again = fully_sharded(problem)
    if search.is_complete:  # as rules give it, which costs more layouts to price
        start_again = search.with_rules(start_again)
    second = others[0] if others else None
    return Suggestion(
        layout_map=rules_of(problem, chosen),
        cost=cost,
        fully_sharded=price.with_peak(start_again),
        second=None if second is None else price.with_peak(second),
        today=today,
        second_layout_map=None if second is None else rules_of(problem, second),
        report=reports.get(chosen),
        step=problem.lowered.name,
        mesh=problem.mesh,
        topology=price.topology,
        limit_bytes=limit,
        fits=(cost.peak_bytes or 0) <= limit and chosen not in too_large,
        trail=tuple(search.trail),
        is_complete=search.is_complete,
        took_seconds=time.perf_counter() - start,
        explained=functools.partial(_explained, search, chosen),
    )


def _planned(lower: Any, layout_map: LayoutMap) -> PodReport:
    """The plan by XLA's partitioner."""
    start = time.perf_counter()
    return planned(lower(layout_map.freeze()), start, _TIMEOUT)


def _cost(planner: Planner) -> Cost:
    """The cost of rules that were not found by the search."""
    cost = cost_of_report(planner.estimate(time.perf_counter()))
    prepared, pairs = planner.prepared, planner.lowered.pairs
    more = peak_bytes(prepared.lay_out(None, pairs), prepared.attributes)
    return dataclasses.replace(cost, peak_bytes=cost.at_rest_bytes + more)


def _explained(search: Search, chosen: Candidate, path: str) -> str:
    """`Suggestion.explain`: price the other layouts of one group."""
    problem = search.problem
    number = next(
        (
            number
            for number, group in enumerate(problem.groups)
            if any(one == path or one.endswith(f"/{path}") for one in group.paths)
        ),
        None,
    )
    if number is None:
        known = [one for group in problem.groups for one in group.paths]
        raise KeyError(f"no parameter has the path {path!r}; some are {known[:3]}")
    group = problem.groups[number]
    found = dict.fromkeys(
        single(problem, number, axis, dim, chosen)
        for axis in problem.sizes
        for dim in (None, *group.dims)
    )
    others = [one for one in found if one != chosen]
    fitting = [one for one in others if not search.excess(one)] or others
    return best_other(
        path,
        layout_text(chosen.specs[number]),
        search.price.of(chosen),
        [(layout_text(one.specs[number]), search.price.of(one)) for one in fitting],
    )
