"""flm.suggest: rules for a step on a mesh, found by search."""

import contextlib
import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType

from flax_layoutmap._core.errors import LayoutError, MeshError, RuleError, closest
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.topologies import Topology
from flax_layoutmap._core.topologies import topology as topology_of
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.progress import shown_progress
from flax_layoutmap._show.terminal import wrapped
from flax_layoutmap._step.arguments import signature_of, slots_of
from flax_layoutmap._suggest.candidate import Candidate, Spec
from flax_layoutmap._suggest.memory import peak_bytes
from flax_layoutmap._suggest.moves import fully_sharded, single
from flax_layoutmap._suggest.price import ASSUMED, Cost, Pricer, cost_of_report
from flax_layoutmap._suggest.problem import Problem, seed_rules
from flax_layoutmap._suggest.report_text import WIDTH, next_best, peak_of
from flax_layoutmap._suggest.rules import layout_text, rules_of
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

# Parameters that are named in an error.
_LISTED = 10
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
    best two, full sharding and the rules of today, and its order counts.

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
        donate_argnames: arguments that are state, beside NNX objects, optimizer states
            and what the step donates; none takes containers of floating-point arrays
            that have no rows of a batch in common. They count as donated, but for a
            function of `jax.jit`, which has its own.
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
    is_number = isinstance(hbm, int | float) and not isinstance(hbm, bool)
    if hbm is not None and not (is_number and 0 < hbm < math.inf):
        raise LayoutError(f"hbm={hbm!r} is no number of bytes: hbm=16 * 2**30")
    if check not in (True, False, "compile"):
        raise LayoutError(f'check must be True, False or "compile", got {check!r}')
    if layout_map is not None:
        layout_map = rule_set_of(layout_map, "layout_map=")
    where = None if topology is None else topology_of(topology, slices=slices)
    if check == "compile":
        if where is None:
            raise MeshError('check="compile" needs a topology: topology="v5p:4x4x4"')
        check_libtpu()
    named = [donate_argnames] if isinstance(donate_argnames, str) else donate_argnames
    state = tuple(named) or tuple(_parameters(step, args, kwargs))
    given = step, args, kwargs, mesh
    notes: list[str] = []
    try:
        rules, own = rules_and_mesh(*given, layout_map, where)
    except RuleError as error:
        if mesh is None:
            raise
        notes.append(f"the rules of today do not fit this mesh: {_first(error)}")
        rules, own = None, rules_and_mesh(None, args, kwargs, mesh, None, where)[1]
    lower = functools.partial(_lower, step, args, kwargs, state, own, where)
    report = functools.partial(_planned, lower)
    if check == "compile":
        options = {"topology": where, "mesh": own, "donate_argnames": state}
        if hbm is not None:
            options["compiler_options"] = {"xla_tpu_max_hbm_size_mib": int(hbm) >> 20}
        report = functools.partial(compile_step, step, *args, **kwargs, **options)
    name, today = getattr(step, "__name__", "the step"), None
    with shown_progress(f"lowering {name}", None, progress), _unused_donations():
        search = _search(lower, own, where, hbm)
        try:
            today = None if rules is None else _of_today(lower(rules), rules)
        except LayoutError as error:
            notes.append(f"the rules of today do not fit this step: {_first(error)}")
    if limit_seconds is not None:
        search.is_over = lambda: time.perf_counter() - start > limit_seconds
    with shown_progress(functools.partial(_so_far, search), None, progress):
        search.run()
    comparing = shown_progress(f"comparing rules for {name}", None, progress)
    with comparing, _unused_donations():
        found = _suggestion(search, today, report if check else None)
    notes += [_roles(search.problem.lowered), *found.notes]
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


def _first(error: LayoutError) -> str:
    """The first problem of an error, and how many more there are."""
    first, *more = getattr(error, "problems", ()) or [str(error)]
    return f"{first} (and {len(more)} more)" if more else first


def _roles(lowered: Lowered) -> str:
    """What was taken for state, which rules lay out, and what for data."""
    roles: dict[str, dict[str, None]] = {"state": {}, "data": {}}
    for leaf in lowered.leaves:
        role = "data" if leaf.role == "data" else "state"
        roles[role][leaf.path.partition("/")[0]] = None
    state, data = (", ".join(names) or "none" for names in roles.values())
    return f"taken for state: {state}; for data: {data}"


def _so_far(search: Search) -> str:
    """What is shown while a search runs."""
    name, best = search.problem.lowered.name, search.best
    if best is None or not search.trail:
        return f"suggesting rules for {name}"
    # Priced before, so that nothing is computed in the thread that shows it.
    seconds = seconds_text(search.price.of(best).seconds)
    return (
        f"suggesting rules for {name}: {seconds} a step, {search.price.count} layouts "
        "tried"
    )


def _suggestion(
    search: Search,
    today: Choice | None,
    report: Callable[..., PodReport] | None,
) -> Suggestion:
    """What a search has found; `report` makes that of a `layout_map`."""
    problem, limit = search.problem, search.limit_bytes
    assert search.best is not None
    found, full = [search.best], fully_sharded(problem)
    if search.is_complete:  # then what is compared is as rules give it, too
        found += search.rivals()
        full = search.with_rules(full)
    elif full == dataclasses.replace(search.best, fixed=None):
        full = search.best

    def choice(one: Candidate) -> Choice:
        return Choice(rules_of(problem, one), search.price.with_peak(one))

    choices = {search.best: choice(search.best)}
    with search.until_over():
        for one in (*found, full):
            if one not in choices:
                choices[one] = choice(one)
    every, notes = [*choices.values(), *([] if today is None else [today])], []
    if search.is_complete and report is not None:
        try:
            every = [
                dataclasses.replace(one, plan=report(layout_map=one.layout_map))
                for one in every
            ]
        except KeyboardInterrupt:  # the search is not lost
            notes.append("not checked: the check was interrupted")
        except LayoutError as error:
            notes.append(f"not checked: {_first(error)}".splitlines()[0])
    choices = dict(zip(choices, every, strict=False))

    def rank(cost: Cost) -> tuple[int, float]:
        return max(0, peak_of(cost) - limit), cost.seconds

    compared = [one for one in found if one in choices]
    chosen, *others = sorted(compared, key=lambda one: rank(choices[one].cost))
    second = next((one for one in others if one != full), None)
    named = {"suggested": chosen}
    named |= {} if second is None else {"runner-up": second}
    named |= {"full sharding": full} if full != chosen and full in choices else {}
    best = choices[search.best]
    if rank(best.estimate) < rank(choices[chosen].estimate):
        notes.append(_overruled(best, choices[chosen]))
    columns = {name: choices[one] for name, one in named.items()}
    columns |= {} if today is None else {"today": every[-1]}
    return Suggestion(
        choices=columns,
        step=problem.lowered.name,
        topology=search.price.topology,
        limit_bytes=limit,
        trail=tuple(search.trail),
        is_complete=search.is_complete,
        notes=(*_unused_axes(problem, chosen), *notes),
        explained=functools.partial(_explained, search, chosen),
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


def _unused_axes(problem: Problem, chosen: Candidate) -> Iterator[str]:
    specs = [*problem.arguments(chosen).values()]
    specs += [problem.point_spec(number, chosen) for number in chosen.fixed or ()]
    used = {axis for spec in specs for axes in spec for axis in axes}
    dims = [group.shape[dim] for group in problem.groups for dim in group.dims]
    if used.issuperset(chosen.batch) and (why := _not_split(problem, chosen.batch)):
        yield f"no data is split over the batch: {why}"
    for axis, size in problem.sizes.items():
        if axis in used:
            continue
        why = f"no batch and no dim of a large parameter divides by {size}"
        is_for_rows = any(axis in own for own in problem.batches)
        if is_for_rows or any(problem.divides(size, (axis,)) for size in dims):
            why = "nothing that was tried with it gains"
        if is_for_rows:
            why = _not_split(problem, (axis,)) or why
        yield (
            f"unused: axis {axis} of the mesh, so that its {size} devices do the same "
            f"work; {why}"
        )


def _not_split(problem: Problem, axes: Sequence[str]) -> str:
    """Why rules split no data over some axes, and what to do; else empty.

    Rows behind micro-batches are not meant, which the layouts of outputs split.
    """
    found = [at for at in problem.undivided(axes) if not problem.rows.get(at)]
    if not found:
        return ""
    path, shape = problem.lowered.leaves[found[0]].path, dict(problem.data)[found[0]]
    more = f" (and {len(found) - 1} more)" if found[1:] else ""
    count = math.prod(problem.sizes[axis] for axis in axes)
    return (
        f"the first dim of {path} {show_shape(shape)}{more} does not divide by {count}"
        "; pad or broadcast it, so that rules can split all data"
    )


def _overruled(best: Choice, chosen: Choice) -> str:
    """What the search found best, and the check does not."""
    text = seconds_text
    return (
        "overruled: what the search had found best, with "
        f"{text(best.estimate.seconds)} a step, takes {text(best.cost.seconds)} by "
        f"{best.checked_by}; what is suggested takes {text(chosen.cost.seconds)}, and "
        f"{text(chosen.estimate.seconds)} by the estimate of the search"
    )


def _explained(search: Search, chosen: Candidate, path: str) -> str:
    """`Suggestion.explain`: price the other layouts of one group."""
    problem, price = search.problem, search.price
    number = _group_of(problem, path)
    group, own = problem.groups[number], chosen.specs[number]
    lines = [f"{path}: {layout_text(own)}"]
    others = dict.fromkeys(
        single(problem, number, (axis,), dim, chosen)
        for axis in problem.sizes
        for dim in (None, *group.dims)
    )
    others = [one for one in others if _sets(one.specs[number]) != _sets(own)]
    if others:
        best = min(others, key=lambda one: (search.excess(one), price.of(one).seconds))
        text = layout_text(best.specs[number])
        is_over = search.excess(best) > search.excess(chosen)
        lines.append(next_best(text, price.of(best), price.of(chosen), is_over))
    elif group.dims:
        lines.append("none of its dims divides by another axis")
    else:
        lines.append("it is too small to be sharded: no other layout was tried")
    return "\n".join(wrapped(lines, WIDTH))


def _sets(spec: Spec) -> list[set[str]]:
    """The axes of each dim, whose order makes no difference in cost."""
    return [set(axes) for axes in spec]


def _group_of(problem: Problem, path: str) -> int:
    """The number of the group that has a path, or the only one with such an end."""
    paths = {one: at for at, group in enumerate(problem.groups) for one in group.paths}
    if path in paths:
        return paths[path]
    ends = {at: one for one, at in paths.items() if one.endswith(f"/{path}")}
    if len(ends) == 1:
        return next(iter(ends))
    if ends:
        more = f" and {len(ends) - _LISTED} more" if len(ends) > _LISTED else ""
        listed = ", ".join([*ends.values()][:_LISTED])
        raise KeyError(f"{path!r} is the end of several paths: {listed}{more}")
    near = closest(path, paths, count=3)
    hint = f"; the closest are {near}" if near else ""
    raise KeyError(f"no parameter has the path {path!r}{hint}")
