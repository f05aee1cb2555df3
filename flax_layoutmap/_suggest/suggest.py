"""flm.suggest: rules for a step on a mesh."""

import inspect
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from flax_layoutmap import pod
from flax_layoutmap._core.errors import LayoutError, LayoutWarning, MeshError
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._show.terminal import shown_progress
from flax_layoutmap._step.arguments import slots_of
from flax_layoutmap._suggest.candidates import Candidate, Layouts
from flax_layoutmap._suggest.classes import dims_of
from flax_layoutmap._suggest.rules import rules_of
from flax_layoutmap._suggest.suggestion import ASSUMED, GIVEN, Choice, Suggestion
from flax_layoutmap._tree.flax_internals import is_nnx_object
from flax_layoutmap.pod._lower import rules_and_mesh
from flax_layoutmap.pod._topologies import topology_or_none

_ASKED = 6  # the layouts asked about beside full sharding and the rules given
_EQUAL = 1e-3  # times that differ by a smaller share count as equal


def suggest(
    step: Any,
    *args: Any,
    mesh: Any = None,
    topology: Any = None,
    slices: int | None = None,
    hbm: int | None = None,
    layout_map: Any = None,
    donate_argnames: str | Iterable[str] = (),
    engine: str | None = None,
    **kwargs: Any,
) -> Suggestion:
    """Suggest rules for a step on a mesh, without devices.

    Each axis of the mesh is for the batch alone, for the batch and parameters (FSDP),
    or for dims of parameters that belong together, which Shardy's propagation tells
    without names. Of the layouts that fit a formula chooses six; `flm.pod.plan` is
    asked about these, full sharding in two ways, and the rules given. The fastest that
    fits is suggested: print the result.

    Args:
        step: as for `flm.pod.plan`.
        *args: as for `flm.pod.plan`; shapes are enough.
        mesh: as for `flm.pod.plan`; its axes are Auto.
        topology: as for `flm.pod.plan`; None assumes links, products and memory of v5p.
        slices: how many slices of it.
        hbm: bytes of one device that the step may use; None takes what the compiler
            allows on the topology.
        layout_map: rules to compare with; None takes those of a function of `flm.jit`.
        donate_argnames: arguments that are state, beside NNX objects and containers of
            floating-point arrays whose first dims differ. Rules are for state; other
            arguments are data, split over the batch axes.
        engine: whom to ask, as for `flm.pod.plan`.
        **kwargs: arguments of the step by name.

    Raises:
        LayoutError: the step cannot be lowered, or has no state.
        MeshError: there is no mesh, it has one device or Explicit axes, or it does not
            fill the topology.

    Example:
        >>> import jax, jax.numpy as jnp, flax_layoutmap as flm
        >>> def step(params, x):
        ...     def loss(params):
        ...         return (jnp.tanh(x @ params["up"]) @ params["down"]).sum()
        ...     return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))
        >>> params = {"up": jax.ShapeDtypeStruct((2048, 8192), jnp.bfloat16)}
        >>> params["down"] = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)
        >>> x = jax.ShapeDtypeStruct((65536, 2048), jnp.bfloat16)
        >>> suggestion = flm.suggest(step, params, x, mesh="data=2,model=8", hbm=2**28)
        >>> suggestion.layout_map["down"].axes
        ('model', None)
    """
    is_number = isinstance(hbm, Real) and not isinstance(hbm, bool)
    if hbm is not None and not (is_number and 0 < hbm < math.inf):
        raise LayoutError(f"hbm={hbm!r} is not a number of bytes: hbm=16 * 2**30")
    where = topology_or_none(topology, slices)
    rules, on = rules_and_mesh(step, mesh, layout_map, where)
    if AxisType.Explicit in on.axis_types or on.size == 1:
        raise MeshError(f"suggest needs auto axes and several devices, and got {on!r}")
    chip = ASSUMED if where is None else where.generation
    limit = chip.hbm_limit_bytes if hbm is None else round(hbm)
    name = getattr(step, "__name__", "the step")
    tried: list[Choice] = []
    refused: dict[str, LayoutError] = {}  # by text

    def ask(name: str, layout_map: LayoutMap) -> None:
        """Try rules, once; a note where the step does not go with them."""
        asked = [choice.layout_map.freeze() for choice in tried]
        if name != GIVEN and layout_map.freeze() in asked:
            return
        given = {"mesh": on, "topology": where, "layout_map": layout_map}
        given |= {"donate_argnames": [*state], "engine": engine, **kwargs}
        try:
            plan = pod.plan(step, *args, **given)
            tried.append(Choice(name, layout_map, plan, limit))
        except LayoutError as error:
            text = " ".join(str(error).split())
            refused[text] = error
            dims.notes.append(f"not tried: {name}: {text}")

    with shown_progress(f"suggesting rules for {name}"), warnings.catch_warnings():
        warnings.simplefilter("ignore", LayoutWarning)
        # What is taken for state need not be returned.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        state = _state_of(step, args, kwargs, donate_argnames)
        dims = dims_of(step, args, kwargs, state, on)
        data = ", ".join(dict.fromkeys(path.partition("/")[0] for path in dims.data))
        if all(arrays.is_small for arrays in dims.parameters):
            raise LayoutError(
                f"{name} has no state to lay out; its data: {data or 'none'}; say what "
                'is state: donate_argnames="params"'
            )
        layouts = Layouts(dims, on.axis_sizes, chip, where.slices if where else 1)
        candidates = layouts.fully_sharded()
        for candidate in candidates:
            ask(candidate.name, rules_of(dims, candidate, on))
        others = _to_ask(layouts, candidates[0], tried[:1], limit)
        if rules is not None:
            ask(GIVEN, LayoutMap.from_rule_set(rules))
        for candidate in others:
            ask(candidate.name, rules_of(dims, candidate, on))
    if not tried:
        every = LayoutError(f"{name} cannot be planned; {'; '.join(dims.notes)}")
        raise every if len(refused) > 1 else refused.popitem()[1]
    if dims.data and not candidates[0].batch:
        n = ", ".join(map(str, sorted({*dims.data.values()})))
        dims.notes.append(f"not split: data of {n} rows, which no axis divides; pad it")
    best = _best_first(tried)
    return Suggestion(
        step=name,
        tried=best,
        why=_why(best, [*candidates, *others], layouts),
        notes=(*dims.notes, f"state: {', '.join(state)}; data: {data or 'none'}"),
    )


def _to_ask(
    layouts: Layouts, full: Candidate, tried: Sequence[Choice], limit: int
) -> list[Candidate]:
    """The other layouts to ask about, by the report of full sharding."""
    flops = data = more = 0

    def least(of: Candidate) -> int:
        return layouts.device_bytes(of) + data // layouts.parts(of.batch)

    for choice in tried:
        memory, rows = choice.plan.memory, layouts.parts(full.batch)
        flops = choice.plan.flops_per_device * rows
        data = memory.at_rest.get("data", 0) * rows
        # What full sharding needs besides, any layout needs.
        more = max(0, (memory.peak_bytes or 0) - least(full))
    held = [other for other in layouts.candidates() if least(other) <= limit - more]
    return sorted(held, key=lambda held: layouts.seconds(held, flops))[:_ASKED]


def _best_first(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """What fits by time, of equal times by memory; then the rest by memory."""
    least = min((choice.seconds for choice in choices if choice.fits), default=0.0)

    def rank(choice: Choice) -> tuple[bool, float, int]:
        seconds = max(choice.seconds, least * (1 + _EQUAL)) if choice.fits else 0.0
        return not choice.fits, seconds, choice.held_bytes

    return tuple(sorted(choices, key=rank))


def _state_of(
    step: Any, args: Sequence[Any], kwargs: Mapping[str, Any], donated: Any
) -> dict[str, Any]:
    """The arguments that rules are for, by name: those that are named, and state."""
    named = frozenset([donated] if isinstance(donated, str) else donated)
    slots = slots_of(inspect.signature(step).bind(*args, **kwargs))
    return {s.name: v for s, v in slots if s.is_among(named) or _is_state(v)}


def _is_state(value: Any) -> bool:
    """Whether a value holds an NNX object, or floats that have no rows in common."""
    leaves = jax.tree.leaves(value, is_leaf=is_nnx_object)
    if any(map(is_nnx_object, leaves)):
        return True
    arrays = [leaf for leaf in leaves if np.ndim(leaf)]
    floats = [jax.numpy.issubdtype(leaf.dtype, np.inexact) for leaf in arrays]
    return all(floats) and len({np.shape(leaf)[0] for leaf in arrays} - {1}) > 1


def _why(tried: Sequence[Choice], among: Sequence[Candidate], layouts: Layouts) -> str:
    """One sentence: why the best, which is the first, is the best."""
    best = tried[0]
    held, limit = human_bytes(best.held_bytes), human_bytes(best.limit_bytes)
    if not best.fits:
        return (
            f"nothing that was tried fits: this needs the least, {held} of {limit}; "
            "take more devices, fewer rows in a batch, or nnx.remat"
        )
    if best.name == GIVEN:
        return "the rules given are the fastest that were tried: keep them"
    chosen = next(one for one in among if one.name == best.name)
    if not any(map(any, chosen.specs)):
        return (
            f"the model is small: every device keeps a copy, {held} of {limit}; pass "
            "hbm= for rules that need less"
        )
    over = "+".join(chosen.placed)
    if over and any(one.fits and one.name == among[0].name for one in tried):
        return (
            f"to sum activations over {over} takes less time than to gather parameters"
        )
    copy = Candidate("", (), (), ((),) * len(chosen.specs), ())
    if (size := layouts.device_bytes(copy)) > best.limit_bytes:
        what = "state and gradients" if layouts.dims.is_training else "the state"
        return (
            f"a copy of {what}, {human_bytes(size)}, is more than {limit}: it is split"
        )
    return "of what fits, this takes the least time to send and to compute"
