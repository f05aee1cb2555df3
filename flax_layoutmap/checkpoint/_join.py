"""A restore: path → metadata → plan → read → tree.

A checkpoint of Orbax and tensors with a mapping are two sources of this one pipeline.
`own` of a source is its tree. `offer` returns its leaves, by the paths of the target,
or why it cannot make one (a LookupError if it lacks it); and problems. `read` returns
path → value. `lines` differ if another process finds another checkpoint.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh

from flax_layoutmap._birth.slices import arrays_of
from flax_layoutmap._core.errors import CheckpointError, MeshError, ResolveError
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._place.annotations import settle_metadata
from flax_layoutmap._place.place import need_devices, with_leaves
from flax_layoutmap._resolve.leaves import Origin, leaves_of
from flax_layoutmap._resolve.optimizer_state import (
    find_origins,
    models_in,
    with_origins,
)
from flax_layoutmap._resolve.resolution import Resolution, decided
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.terminal import shown_progress
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import is_nnx_object, nnx_state
from flax_layoutmap._tree.paths import Flat, is_train_state, unescape
from flax_layoutmap._tree.trace import Traced, trace
from flax_layoutmap.checkpoint._leaves import (
    Leaf,
    Selection,
    check_bytes,
    floating_dtype,
    leaf_of,
    mesh_of,
    nested,
    pattern_pairs,
    problem_list,
    result_of,
    rules_of,
)
from flax_layoutmap.checkpoint._places import absolute

Missing = Literal["error", "keep", "init"]
Unexpected = Literal["error", "ignore"]


@dataclasses.dataclass
class Options:
    """The arguments of a function that restores, checked."""

    path: Any
    target: Any = None
    _: dataclasses.KW_ONLY
    layout_map: Any = None
    mesh: Any = None
    step: int | str | None = None
    include: Any = None
    exclude: Any = None
    rename: Any = None
    dtype: Any = None
    missing: Missing = "error"
    unexpected: Unexpected = "error"
    host_memory: Any = None
    broadcast: str | None = None
    verify: bool | None = None
    progress: bool | None = None
    mapping: Any = None

    def __post_init__(self) -> None:
        for option, kind in (("missing", Missing), ("unexpected", Unexpected)):
            given, choices = getattr(self, option), get_args(kind)
            if given not in choices:
                text = " or ".join(map(repr, choices))
                raise CheckpointError(f"{option}={given!r}: use {text}")
        check_bytes("host_memory", 1 if self.host_memory is None else self.host_memory)
        self.path, self.mesh = absolute(self.path), as_mesh(self.mesh)
        self.rules = rules_of(self.layout_map)
        if self.rules is not None and self.mesh is not None:
            self.rules = self.rules.on(self.mesh)
        axis, mesh = self.broadcast, self.job_mesh
        if axis and mesh and axis not in mesh.axis_names:
            raise CheckpointError(
                f"broadcast={axis!r} is not an axis of the mesh {str(mesh)!r}"
            )
        self.selection = Selection(self.include, self.exclude)
        self.rename = pattern_pairs("rename", self.rename)
        dtype = self.dtype
        if dtype is not None and not isinstance(dtype, Mapping | list | tuple):
            dtype = [("", dtype)]
        self.dtypes = [
            (pattern, x if x is None or x == "target" else floating_dtype(x))
            for pattern, x in pattern_pairs("dtype", dtype)
        ]

    @functools.cached_property
    def job_mesh(self) -> DeviceMesh | None:
        return mesh_of(self.target, self.rules) or self.mesh


@dataclasses.dataclass(frozen=True)
class Target:
    """A target and its flattened leaves."""

    tree: Any  # for a function, the abstract tree that it returns
    flat: Flat
    traced: Traced | None = None
    is_own: bool = False  # the tree of the checkpoint, where no target was given

    @functools.cached_property
    def leaves(self) -> dict[str, Any]:
        return dict(zip(self.flat.full_paths(), self.flat.leaves, strict=True))

    def resolve(self, rules: RuleSet, saved: Mapping[str, Origin]) -> Resolution:
        """Resolve its leaves.

        If `saved` has the origins of all optimizer state, the optimizer is not traced.
        """
        leaves = leaves_of(self.flat, self.tree)
        paths, roles = enumerate(self.leaves), enumerate(self.flat.roles())
        origins = {at: saved[path] for at, path in paths if path in saved}
        is_known = (self.is_own and bool(saved)) or all(
            at in origins
            and (origins[at].owner in leaves.owners or leaves.shapes[at] == ())
            for at, role in roles
            if role == "optimizer"
        )
        if is_known:
            return decided(with_origins(leaves, origins), rules)
        nodes, models = self.flat.nodes, models_in(self.flat, self.tree)
        return decided(find_origins(leaves, nodes, models), rules)

    def filled(self, plan: "Plan", values: Mapping[str, Any]) -> Any:
        if self.is_own:
            return nested(values, unescape)
        new = self.leaves | dict(values)
        if self.traced is None:
            tree = self.tree
            if jax.ShapeDtypeStruct in map(type, self.flat.leaves):
                tree = _with_new_objects(tree)
            result = with_leaves(tree, [*new.values()])
        else:
            if made := plan.made:
                paths = self.traced.values_of(list(new))
                arrays, _ = arrays_of(self.traced, [*map(made.get, paths)])
                paths = [path for path in paths if path in made]
                new |= zip(paths, arrays, strict=True)
            result = self.traced.rebuild([*new.values()])
        if plan.resolution is None or not self.flat.annotations:
            return result
        return settle_metadata(result, plan.resolution)


def opened(target: Any, *, is_own: bool = False) -> Target:
    is_object = is_nnx_object(target) or is_train_state(target)
    traced = trace(target) if callable(target) and not is_object else None
    tree = target if traced is None else traced.abstract
    flat = flatten(tree, None if traced is None else traced.names)
    return Target(tree, flat, traced, is_own)


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """One leaf to restore: in the checkpoint, and in the restored tree.

    `sharding` is None for a Python value or a NumPy array.
    """

    stored: Leaf
    result: Leaf
    sharding: Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which leaves to read, and which (`made`) the target's function initializes."""

    reads: Mapping[str, Read]
    made: Mapping[str, Any]
    resolution: Resolution | None


def restored(
    function: str, open_source: Callable[[Options], Any], options: Options
) -> Any:
    """Go through all stages; `function` names the caller in messages."""
    mesh = options.job_mesh
    if mesh is not None and not mesh.is_abstract and jax.process_count() > 1:
        there = {device.process_index for device in mesh.devices.flat}
        if absent := set(range(jax.process_count())) - there:
            raise MeshError(
                f"{mesh!r} has no device of the processes {sorted(absent)}, and all "
                f"{jax.process_count()} processes of a job restore together; use a "
                "mesh of all of them, and relayout the result"
            )
    source, target, plan = planned("restoring", open_source, options, function)
    if plan.resolution is not None:
        plan.resolution.announce()
    with shown_progress(f"restoring {source.where}", None, options.progress):
        values = source.read(plan.reads, options)
    return target.filled(plan, values)


def planned(
    doing: str,
    open_source: Callable[[Options], Any],
    options: Options,
    needs_devices: str | None = None,
) -> tuple[Any, Target, Plan]:
    """Path → metadata → plan: all of a restore that reads no array."""
    with Agreement(f"{doing} {options.path}", options.job_mesh) as agreement:
        source = open_source(options)
        rules, given = options.rules, options.target
        if rules is None and options.mesh is not None:
            rules = source.rule_set(options.mesh)
        if rules is None and (options.mesh is not None or given is None):
            own = " (or mesh= for its own rules)" if source.rule_set(None) else ""
            raise CheckpointError(
                f"cannot restore {source.where} without layouts: pass layout_map=, on "
                f"the mesh to restore to{own}, or a target that has shardings"
            )
        if rules is not None and needs_devices:
            need_devices(rules, needs_devices)
        target = source.own if given is None else opened(given)
        plan = _join(source, target, options, rules)
        agreement.add(
            lambda: {
                "checkpoint": source.lines(),
                "broadcast or verify": f"{options.broadcast} {options.verify}",
                "leaves": [
                    f"{path}: {x.stored} {x.result} {getattr(x.sharding, 'spec', '')}"
                    for path, x in plan.reads.items()
                ],
            }
        )
    return source, target, plan


_LACKING = LookupError("is in the target, not in the checkpoint")


def _join(source: Any, target: Target, options: Options, rules: RuleSet | None) -> Plan:
    """Plan which leaves to restore; rules need to fit only these."""
    leaves, unfit = source.offer(target, options)
    selection = options.selection
    every = {**leaves, **target.leaves}
    resolution, shardings, problems = None, {}, list[str]()
    if rules is not None:
        try:
            resolution = target.resolve(rules, source.origins)
        except ResolveError as error:
            resolution = error.resolution
            for text in error.problems or [str(error)]:
                path = text.split(" ")[0].strip(":")
                if path in selection or path not in every:
                    problems.append(text)
    if resolution is not None and not problems:
        held = resolution.sharding_list()
        shardings = dict(zip(resolution.paths, held, strict=True))
    problems += [*selection.useless(every), *unfit]
    reads, made = dict[str, Read](), dict[str, Any]()
    for path, value in target.leaves.items():
        stored = leaves.get(path, _LACKING)
        try:
            if path not in selection:
                if not target.is_own:
                    _check_kept(value, "include or exclude leaves it out")
            elif isinstance(stored, Leaf):
                sharding = ... if rules is None else shardings.get(path)
                dtype = next((x for p, x in options.dtypes if p.search(path)), None)
                reads[path] = _read(path, stored, value, dtype, sharding)
            elif options.missing == "error" or not isinstance(stored, LookupError):
                raise CheckpointError(str(stored))
            elif options.missing == "keep":
                _check_kept(value, stored)
            elif target.traced is None or rules is None:
                raise CheckpointError(
                    f'{stored}; missing="init" needs a function as target, which '
                    "makes it (lambda: Model(rngs=nnx.Rngs(0))), and rules, which say "
                    "where it goes"
                )
            else:
                made[path] = shardings.get(path)
        # A ValueError is JAX's, about a sharding that does not fit.
        except ValueError as error:
            shape = stored.shape if isinstance(stored, Leaf) else np.shape(value)
            problems.append(f"{path} {show_shape(shape)}: {error}")
    if problems:
        raise problem_list(f"cannot restore {source.where}", problems)
    return Plan(reads, made, resolution)


def _read(path: str, stored: Leaf, value: Any, dtype: Any, sharding: Any) -> Read:
    """How to read a leaf; `...` as its sharding is that of the value in the target."""
    leaf = leaf_of(path, value)
    if leaf is None:
        kind = type(value).__qualname__
        raise CheckpointError(f"the {kind} in the target is not an array")
    if sharding is ...:
        is_on_host = leaf.is_python or leaf.is_numpy
        sharding = None if is_on_host else value.sharding
        mesh = getattr(sharding, "mesh", None)
        if not is_on_host and (sharding is None or isinstance(mesh, AbstractMesh)):
            raise CheckpointError(
                "the target has no sharding on devices for it; pass layout_map="
            )
        if sharding is not None:
            sharding.shard_shape(leaf.shape)  # raises ValueError
    result = result_of(stored, leaf, dtype)
    if sharding is None and leaf.is_numpy:
        result = dataclasses.replace(result, is_numpy=True)
    if result.is_python or result.is_numpy:
        sharding = None
    return Read(stored, result, sharding)


def _check_kept(value: Any, why: object) -> None:
    if isinstance(value, jax.ShapeDtypeStruct):
        raise CheckpointError(
            f"{why}, and the target is abstract, so there is no value to keep; give a "
            "concrete target"
        )


def _with_new_objects(tree: Any) -> Any:
    """Return the tree with each abstract NNX object replaced by a new object."""
    nodes, treedef = jax.tree.flatten(tree, is_leaf=is_nnx_object)
    abstract = {
        at: node
        for at, node in enumerate(nodes)
        if is_nnx_object(node)
        and jax.ShapeDtypeStruct in map(type, jax.tree.leaves(nnx_state(node)))
    }
    # Together, so that what they share stays shared.
    copies = nnx.clone([*abstract.values()], graph=True)
    for at, copy in zip(abstract, copies, strict=True):
        nodes[at] = copy
    return jax.tree.unflatten(treedef, nodes)
