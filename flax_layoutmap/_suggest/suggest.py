"""flm.suggest: find rules for a step on a mesh."""

import dataclasses
import inspect
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AxisType

from flax_layoutmap import pod
from flax_layoutmap._core.errors import LayoutError, LayoutWarning, MeshError
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._lint.issue import numbered, quoted
from flax_layoutmap._show.table import Grid, Line, human_bytes
from flax_layoutmap._show.terminal import (
    Shown,
    coloured_grid,
    coloured_lines,
    shown_progress,
    wrapped,
)
from flax_layoutmap._step.arguments import slots_of
from flax_layoutmap._suggest.candidates import Candidate, Layouts, rules_of
from flax_layoutmap._suggest.classes import dims_of
from flax_layoutmap._tree.flax_internals import is_nnx_object
from flax_layoutmap.pod import PodReport
from flax_layoutmap.pod._lower import rules_and_mesh
from flax_layoutmap.pod._report_text import seconds_text
from flax_layoutmap.pod._topologies import GENERATIONS, topology_or_none

if TYPE_CHECKING:
    from rich.text import Text

ASSUMED = GENERATIONS["v5p"]  # if there is no topology
GIVEN = "the rules given"
_SECONDS_EACH = 2e-6  # latency of each collective


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Rules that were tried, and the report of a step with them."""

    name: str  # the jobs of the axes (`"data over fsdp"`), or `GIVEN`
    layout_map: LayoutMap
    plan: PodReport
    limit_bytes: int  # of a device

    @property
    def seconds(self) -> float:
        """The estimated time of a step, to compare choices; assumes no overlap."""
        report, where = self.plan, self.plan.topology
        chip = ASSUMED if where is None else where.generation
        links = sum(report.seconds_bound.values())
        if where is None and chip.link_bytes_per_second is not None:
            links = report.wire_bytes() / (2 * chip.link_bytes_per_second)
        moved = sum(sent.bytes_per_step for sent in report.collectives)
        starts = sum(sent.executions for sent in report.collectives) * _SECONDS_EACH
        read = (report.memory.at_rest_bytes + moved) / chip.hbm_bytes_per_second
        return links + starts + max(report.flops_per_device / chip.flops, read)

    @property
    def held_bytes(self) -> int:
        """The peak memory of a device, or the bytes at rest if it is unknown."""
        return self.plan.memory.peak_bytes or self.plan.memory.at_rest_bytes

    @property
    def fits(self) -> bool:
        """Whether a device can hold it, as far as is known."""
        return self.plan.fits is not False and self.held_bytes <= self.limit_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suggestion(Shown):
    """Rules for a step on a mesh, from `flm.suggest`; print it.

    Attributes:
        step: name of the step.
        tried: the layouts that were tried, best first.
        why: a sentence that explains the choice.
        notes: further remarks.
    """

    __module__ = "flax_layoutmap"
    step: str
    tried: tuple[Choice, ...]
    why: str
    notes: tuple[str, ...] = ()

    @property
    def layout_map(self) -> LayoutMap:
        """The rules; `layout_map.to_file("rules.toml")` keeps them."""
        return self.tried[0].layout_map

    @property
    def plan(self) -> PodReport:
        """The report of the step with these rules."""
        return self.tried[0].plan

    @property
    def fits(self) -> bool:
        """Whether a device can hold the step, as far as is known."""
        return self.tried[0].fits

    def _lines(self, width: int | None) -> "Iterator[Text]":
        mesh, where = self.plan.mesh, self.plan.topology
        axes = mesh.axis_names
        place = f" ({where})" if where is not None else ""
        heading = f"suggestion for {self.step} on mesh {mesh}{place}"
        first = [f"{heading}: {mesh.size} devices", self.why]
        yield from coloured_lines([*wrapped(first, width), ""], axes)
        if self.tried[0].name != GIVEN:
            yield from coloured_lines([*wrapped(self._code(), None), ""], axes)
        yield from coloured_grid(self._table(), axes)
        yield from coloured_lines(["", *wrapped(self._remarks(), width)], axes)

    def _code(self) -> list[str]:
        """Code that makes a map of these rules, without devices."""
        rules = self.layout_map.freeze()
        mesh = quoted(str(rules.mesh))
        return [
            f"# on the devices: mesh = flm.DeviceMesh({mesh})",
            f"mesh = flm.DeviceMesh.abstract({mesh})",
            f"layout_map = flm.LayoutMap(mesh, batch={rules.batch})".replace("'", '"'),
            *(
                line if {*rule.pattern} & {*"\"'"} else line.replace("'", '"')
                for rule in numbered(rules)
                for line in [rule.with_pattern(rule.pattern)]
            ),
        ]

    def _table(self) -> Grid:
        lines = []
        for choice in self.tried:
            held = human_bytes(choice.held_bytes) + ", too much" * (not choice.fits)
            sent = human_bytes(choice.plan.wire_bytes())
            cells = (choice.name, seconds_text(choice.seconds), sent, held)
            lines.append(Line(cells, mark="" if choice.fits else "warning"))
        names = ("layout", "a step", "sends", "holds")
        return Grid(names, (False, True, True, True), tuple(lines))

    def _remarks(self) -> Iterator[str]:
        yield from self.notes
        yield f"limit of memory: {human_bytes(self.tried[0].limit_bytes)} per device"
        yield f"asked: {self.plan.engine}; nothing was timed"
        if self.plan.topology is None:
            links = f"a {ASSUMED.name} whose axes each have links"
            yield f"assumed: {links}; pass topology= for another"

    def to_json(self) -> dict[str, Any]:
        """Return the rules and what was tried as plain JSON values, schema 2."""
        figures = ("name", "fits", "seconds", "held_bytes", "limit_bytes")
        tried = [
            {name: getattr(choice, name) for name in figures}
            | {"rules": choice.layout_map.to_json(), "plan": choice.plan.to_json()}
            for choice in self.tried
        ]
        words = {"step": self.step, "why": self.why, "notes": list(self.notes)}
        return {"schema": 2, **words, "fits": self.fits, "tried": tried}

    def __str__(self) -> str:
        return self.report(width=80)

    def __repr__(self) -> str:
        seconds = seconds_text(self.tried[0].seconds)
        return f"<Suggestion for {self.step} on {self.plan.mesh}: {seconds} a step>"


# ------------------------------------------------------------------------- search

_ASKED = 6  # most layouts to ask about, besides full sharding and the given rules
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

    Each mesh axis shards only the batch, the batch and parameters (FSDP), or related
    dims of parameters, which are found by Shardy's propagation, not by names. A formula
    selects six of the layouts that fit; `flm.pod.plan` is run for these, for two ways
    of full sharding, and for the given rules. The fastest layout that fits is
    suggested: print the result.

    Args:
        step: as for `flm.pod.plan`.
        *args: as for `flm.pod.plan`; shapes are enough.
        mesh: as for `flm.pod.plan`; its axes are Auto.
        topology: as for `flm.pod.plan`; None assumes the speed and memory of v5p.
        slices: the number of slices.
        hbm: bytes of one device that the step may use; None takes the compiler's limit
            on the topology.
        layout_map: rules to compare with; None takes the rules of an `flm.jit`
            function.
        donate_argnames: arguments that are state, in addition to NNX objects and
            containers of floating-point arrays whose first dims differ. Rules apply to
            state; other arguments are data, split over the batch axes.
        engine: as for `flm.pod.plan`.
        **kwargs: keyword arguments of the step.

    Raises:
        LayoutError: the step cannot be lowered, or has no state.
        MeshError: the mesh has one device or Explicit axes.

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
    if hbm is not None and not (isinstance(hbm, Real) and 0 < hbm < math.inf):
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
        """Plan the step with new rules; add a note if it fails."""
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
        # A step need not return the arguments that count as state.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        state = _state_of(step, args, kwargs, donate_argnames)
        dims = dims_of(step, args, kwargs, state, on)
        data = ", ".join(dict.fromkeys(path.partition("/")[0] for path in dims.data))
        if all(arrays.is_small for arrays in dims.parameters):
            raise LayoutError(
                f"{name} has no state to lay out; its data: {data or 'none'}; name the "
                'state: donate_argnames="params"'
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
        why=_why(best, [*candidates, *others]),
        notes=(*dims.notes, f"state: {', '.join(state)}; data: {data or 'none'}"),
    )


def _to_ask(
    layouts: Layouts, full: Candidate, tried: Sequence[Choice], limit: int
) -> list[Candidate]:
    """Choose the other layouts to ask about, from the report of full sharding."""
    flops = data = more = 0

    def least(of: Candidate) -> int:
        return layouts.device_bytes(of) + data // layouts.parts(of.batch)

    for choice in tried:
        memory, rows = choice.plan.memory, layouts.parts(full.batch)
        flops = choice.plan.flops_per_device * rows
        data = memory.at_rest.get("data", 0) * rows
        # Any layout needs the temporary memory of full sharding.
        more = max(0, (memory.peak_bytes or 0) - least(full))
    held = [other for other in layouts.candidates() if least(other) <= limit - more]
    return sorted(held, key=lambda held: layouts.seconds(held, flops))[:_ASKED]


def _best_first(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Sort choices that fit by time, then by memory; then others by memory."""
    least = min((choice.seconds for choice in choices if choice.fits), default=0.0)

    def rank(choice: Choice) -> tuple[bool, float, int]:
        seconds = max(choice.seconds, least * (1 + _EQUAL)) if choice.fits else 0.0
        return not choice.fits, seconds, choice.held_bytes

    return tuple(sorted(choices, key=rank))


def _state_of(
    step: Any, args: Sequence[Any], kwargs: Mapping[str, Any], donated: Any
) -> dict[str, Any]:
    """The arguments that are state, by name: the donated, and those recognised."""
    named = frozenset([donated] if isinstance(donated, str) else donated)
    slots = slots_of(inspect.signature(step).bind(*args, **kwargs))
    return {s.name: v for s, v in slots if s.is_among(named) or _is_state(v)}


def _is_state(value: Any) -> bool:
    """Whether a value has an NNX object, or floats with different first dims."""
    leaves = jax.tree.leaves(value, is_leaf=is_nnx_object)
    if any(map(is_nnx_object, leaves)):
        return True
    arrays = [leaf for leaf in leaves if np.ndim(leaf)]
    floats = [jax.numpy.issubdtype(leaf.dtype, np.inexact) for leaf in arrays]
    return all(floats) and len({np.shape(leaf)[0] for leaf in arrays} - {1}) > 1


def _why(tried: Sequence[Choice], among: Sequence[Candidate]) -> str:
    """A sentence that explains why the first choice is the best."""
    best = tried[0]
    held, limit = human_bytes(best.held_bytes), human_bytes(best.limit_bytes)
    if not best.fits:
        return (
            f"nothing that was tried fits: this needs the least, {held} of {limit}; "
            "take more devices, fewer rows in a batch, or nnx.remat"
        )
    if best.name == GIVEN:
        return "the rules given are the fastest that were tried: keep them"
    chosen = next(each for each in among if each.name == best.name)
    if not any(map(any, chosen.specs)):
        return (
            f"the model is small: every device keeps a copy, {held} of {limit}; pass "
            "hbm= for rules that need less"
        )
    over = "+".join(chosen.placed)
    if over and any(c.fits and c.name == among[0].name for c in tried):
        return (
            f"to sum activations over {over} takes less time than to gather parameters"
        )
    return "of what fits, this takes the least time to send and to compute"
