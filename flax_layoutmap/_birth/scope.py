"""layout_map_scope: models made in the block get the layouts of their final paths.

The outermost constructors in the block are traced, not run: Variables of the new
objects hold `jax.ShapeDtypeStruct`s. Their paths in the finished model are known at the
end of the block, where arrays replace them.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from flax import linen, nnx
from jax.core import Tracer
from jax.sharding import NamedSharding

from flax_layoutmap._birth.create import create, create_optimizer, refuse_unfit
from flax_layoutmap._birth.slices import arrays_of, trace_lines
from flax_layoutmap._core.jax_internals import patched
from flax_layoutmap._core.mesh import spread
from flax_layoutmap._core.processes import Agreement, Parts, digest_of_value
from flax_layoutmap._place.annotations import settle_metadata
from flax_layoutmap._place.place import is_eager, need_devices, put
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve_or_recall, rule_set_of
from flax_layoutmap._rules.rules import RuleSet, using_rules
from flax_layoutmap._tree.flax_internals import (
    METACLASS,
    is_nnx_object,
    nnx_state,
    no_mesh,
    objects_of,
    restore_eager_flag,
)
from flax_layoutmap._tree.graph import names_of_shared
from flax_layoutmap._tree.objects import leaves_in, objects_in
from flax_layoutmap._tree.trace import Traced, is_tracing_constructor, trace

_SCOPE: ContextVar["_Scope | None"] = ContextVar("flax_layoutmap_scope", default=None)

_ONLY_SHAPES = (
    "objects made in a layout_map_scope block have only shapes and dtypes until the "
    "block ends: use their values after it, or make the whole model with "
    "flm.create(make, layout_map), where a constructor can compute with them"
)


def layout_map_scope(layout_map: Any) -> contextlib.AbstractContextManager[Any, None]:
    """Create every model in the block sharded by the rules.

    This is tf-keras's `layout_map_scope`. At the end of the block, each Variable of
    each NNX model made in it gets the layout of its path in the finished model: modules
    may be made first and assembled later. Until then, Variables hold
    `jax.ShapeDtypeStruct`s, as after `nnx.eval_shape`: call the model after the block.

    An `nnx.Optimizer` made in the block gets the state that `flm.create_optimizer(
    model, tx, layout_map)` makes. Linen modules hold no variables: for a module made in
    the block, `init` makes sharded variables, as `flm.create` does, in the block and
    after it. This excludes a later `clone()`, and classes that define `init`.

    Constructors are traced, as by `jax.jit`: arrays that they store outside their model
    have no values. A constructor that takes a module is not traced, so that the module
    stays the same object; arrays that it creates are on one device until the block
    ends.

    Blocks nest: the innermost applies, also to `flm.distribute_tensor(x, "hidden")`.
    Used as a decorator, it wraps each call in a block.

    Args:
        layout_map: a `LayoutMap` or `RuleSet` with a mesh of devices.

    Returns:
        A context manager; `as` gives `layout_map`.

    Raises:
        MeshError: the rules have no mesh with devices.
        ResolveError: at the end, leaves do not fit the rules; no array was made.
        StructureError: a constructor needs values.
        ProcessError: at the end, the processes differ in their rules, models or seeds.

    Example:
        >>> import flax_layoutmap as flm
        >>> from flax import nnx
        >>> layout_map = flm.LayoutMap("data=-1", strict=False)
        >>> layout_map["d1/kernel"] = (None, "data")
        >>> class Model(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.d1 = nnx.Linear(4, 8, rngs=rngs)
        >>> with flm.layout_map_scope(layout_map):
        ...     model = Model(nnx.Rngs(0))
        >>> tuple(model.d1.kernel.sharding.spec)
        (None, 'data')

    Plain JAX: `nnx.split` in `jax.jit(make, out_shardings=…)`, then `nnx.merge`.
    """
    rules = rule_set_of(layout_map, "layout_map_scope(layout_map)")
    need_devices(rules, "layout_map_scope")
    block: Any = _opened(rules, layout_map)  # typed: it suppresses nothing
    return block


@contextlib.contextmanager
def _opened(rules: RuleSet, layout_map: Any) -> Iterator[Any]:
    scope = _Scope(rules, _open_scope())
    token = _SCOPE.set(scope)
    try:
        try:
            with _patched_constructors(), using_rules(rules):
                yield layout_map
        except (AttributeError, TypeError) as error:
            if "ShapeDtypeStruct" in str(error):
                error.add_note(_ONLY_SHAPES)
            raise
        finally:
            _SCOPE.reset(token)
            scope.is_open = False
        scope.fill()
    finally:
        scope.forget()


def _open_scope() -> "_Scope | None":
    scope = _SCOPE.get()
    # The context of a task may outlive the block.
    return scope if scope is not None and scope.is_open else None


@contextlib.contextmanager
def _patched_constructors() -> Iterator[None]:
    """Patch NNX constructors and Linen's `init` to use the open scope."""
    methods = [
        (METACLASS, "__call__", _scoped_constructor),
        (linen.Module, "__post_init__", _binding_init),
        *((linen.Module, name, _scoped_init) for name in _INITS),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, wrap in methods:
            stack.enter_context(patched(owner, name, wrap))
        yield


def _scoped_constructor(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def construct(cls: Any, *args: Any, **kwargs: Any) -> Any:
        scope = _open_scope()
        is_made = issubclass(cls, nnx.Module | nnx.Optimizer)
        # Like a Linen module, a bridge.Module holds no variables until its `init`.
        if scope is None or not is_made or issubclass(cls, nnx.bridge.Module):
            return plain(cls, *args, **kwargs)
        # Part of an object that is being traced, or inside a transformation.
        if is_tracing_constructor() or not is_eager():
            return plain(cls, *args, **kwargs)
        return scope.construct(functools.partial(plain, cls), cls, args, kwargs)

    return construct


# ---------------------------------------------------------------- in the block


@dataclasses.dataclass(frozen=True)
class _Birth:
    """A traced constructor, and the leaves of its object (compared by `id`)."""

    traced: Traced
    leaves: list[jax.ShapeDtypeStruct]

    def arrays(
        self, shardings: Mapping[int, NamedSharding], values: Mapping[int, Any]
    ) -> dict[int, Any]:
        """The arrays of the leaves with shardings, by the ids of the leaves.

        `values` has the arrays of abstract arguments.
        """
        wanted = [shardings.get(id(leaf)) for leaf in self.leaves]
        if not any(wanted):
            return {}
        inputs = tuple(values.get(id(x), x) for x in self.traced.inputs)
        traced = dataclasses.replace(self.traced, inputs=inputs)
        made, _ = arrays_of(traced, wanted)
        ids = [id(leaf) for leaf in self.leaves if id(leaf) in shardings]
        return dict(zip(ids, made, strict=True))


def _traced(
    make: Callable[..., Any], args: Any, kwargs: Any, mesh: Any
) -> tuple[Any, _Birth]:
    """Make an object without values; NNX arguments (Rngs) advance as usual."""

    def with_arguments(*args: Any, **kwargs: Any) -> Any:
        # In one graph, as the new object may hold its arguments.
        return nnx.List([make(*args, **kwargs), nnx.List(objects_in((args, kwargs)))])

    traced = trace(with_arguments, args, kwargs, own_objects=True)
    shapes = traced.values_of(jax.tree.leaves(traced.abstract))
    birth = _Birth(traced, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes])
    both = traced.rebuild(traced.leaves_of(birth.leaves))
    seen = set(map(id, jax.tree.leaves(nnx_state(both))))
    if not seen.issuperset(map(id, birth.leaves)):
        # Flax only sees shapes inside Variables, not in plain dicts and tuples.
        made, _ = arrays_of(traced, [spread(x.shape, mesh) for x in shapes])
        both = traced.rebuild(traced.leaves_of(made))
    module, copies = both
    if nodes := objects_in((args, kwargs)):
        _, inputs = arrays_of(traced, [None] * len(birth.leaves))
        traced.update_inputs(inputs)
        _replace(module, copies, nodes)
    return module, birth


def _replace(module: Any, copies: Sequence[Any], originals: Sequence[Any]) -> None:
    """Replace copies of arguments in a module by the arguments themselves."""
    original_of: dict[int, Any] = {}
    for copy, original in zip(copies, originals, strict=True):
        parts = zip(objects_of(copy), objects_of(original), strict=True)
        original_of.update({id(part): whole for part, whole in parts})
    for node in objects_of(module):
        if id(node) in original_of or not is_nnx_object(node):
            continue
        for name, value in vars(node).items():
            if id(value) in original_of:
                vars(node)[name] = original_of[id(value)]


def _run(make: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a constructor without a mesh in the context."""
    eager = nnx.using_eager_sharding()
    with no_mesh(), nnx.use_eager_sharding(False):
        module = make(*args, **kwargs)
    restore_eager_flag(module, eager)
    return module


class _Model(NamedTuple):
    """A finished object, the part of its State to fill, and the Resolution of it."""

    root: Any
    state: nnx.State
    resolution: Resolution

    def pairs(self) -> list[tuple[Any, NamedSharding]]:
        shardings = self.resolution.sharding_list()
        return list(zip(jax.tree.leaves(self.state), shardings, strict=True))


class _Scope:
    """A block, and the objects that were made in it."""

    def __init__(self, rules: RuleSet, outer: "_Scope | None") -> None:
        self.rules, self._outer, self.is_open = rules, outer, True
        self.settled: list[Any] = []  # arrays that are laid out already
        self._objects: list[weakref.ref[Any]] = []
        self._births: list[_Birth] = []
        self._optimizers: list[tuple[weakref.ref[Any], Any]] = []  # with their models

    def construct(self, make: Callable[..., Any], cls: type, args: Any, kw: Any) -> Any:
        nodes, leaves = objects_in((args, kw)), leaves_in((args, kw))
        if any(isinstance(x, Tracer) for x in leaves):  # inside jax.vmap or jax.grad
            return make(*args, **kw)
        model = next((node for node in nodes if isinstance(node, nnx.Module)), None)
        shapes = {id(x) for x in leaves if isinstance(x, jax.ShapeDtypeStruct)}
        is_random = all(isinstance(x, nnx.Rngs | nnx.RngStream) for x in nodes)
        owner = self
        if issubclass(cls, nnx.Optimizer) and model is not None:
            if not shapes:
                made = make(*args, **kw)
                self.settled += _follow(made, model, self.rules)
                return made
            while owner._outer and not shapes & owner._abstract_ids():
                owner = owner._outer  # the block in which the model was made
            made = owner._make_traced(make, args, kw)
            owner._optimizers.append((weakref.ref(made), model))
        elif is_random and not shapes:
            made = self._make_traced(make, args, kw)
        else:
            made = _run(make, args, kw)  # its parts stay the same objects
        owner._objects.append(weakref.ref(made))
        return made

    def _make_traced(self, make: Callable[..., Any], args: Any, kw: Any) -> Any:
        mesh: Any = self.rules.mesh
        made, birth = _traced(make, args, kw, mesh.jax_mesh)
        self._births.append(birth)
        return made

    def fill(self) -> None:
        """Make the arrays of all models and optimizers."""
        models = self._resolved()
        shardings: dict[int, NamedSharding] = {}
        for model in models:
            for leaf, sharding in model.pairs():
                shardings.setdefault(id(leaf), sharding)
        values: dict[int, Any] = {}
        for birth in self._births:
            values |= birth.arrays(shardings, values)
        for model in models:
            pairs = [(values.get(id(x), x), sharding) for x, sharding in model.pairs()]
            # Tracers belong to a transformation around the block.
            new = [x if isinstance(x, Tracer) else put(x, s) for x, s in pairs]
            structure = jax.tree.structure(model.state)
            nnx.update(model.root, jax.tree.unflatten(structure, new))
            settle_metadata(model.state, model.resolution)  # in place
            self.settled += new
        for reference, model in self._optimizers:
            if (optimizer := reference()) is not None:
                self.settled += _fill_optimizer(optimizer, model, self.rules)
        if self._outer is not None:
            self._outer.settled += self.settled

    def _resolved(self) -> list[_Model]:
        """Resolve all models; the processes agree on the result."""
        with Agreement("creating the models of a scope", self.rules.mesh) as agreement:
            models = self._models()
            for model in models:
                leaves = jax.tree.leaves(model.state)
                refuse_unfit(model.resolution.paths, leaves, "layout_map_scope")
                others = [m.resolution for m in models if m is not model]
                model.resolution.announce(besides=others)
            agreement.add(lambda: _lines(models, self._births))
        return models

    def _abstract_ids(self) -> set[int]:
        return {id(leaf) for birth in self._births for leaf in birth.leaves}

    def _models(self) -> list[_Model]:
        """The outermost objects that have arrays to make."""
        objects = [node for ref in self._objects if (node := ref()) is not None]
        parts = {id(p) for node in objects for p in objects_of(node) if p is not node}
        made = self._abstract_ids()
        settled = set(map(id, self.settled))
        later = {
            id(variable)
            for reference, _ in self._optimizers
            for variable in _optimizer_state(reference())
        }

        def is_ours(leaf: Any) -> bool:
            is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
            return id(leaf) in made if is_shape else id(leaf) not in settled

        models = []
        for root in (node for node in objects if id(node) not in parts):
            state = nnx.from_flat_state(
                (path, part)
                for path, part in nnx.to_flat_state(nnx_state(root))
                if id(part) not in later and all(map(is_ours, jax.tree.leaves(part)))
            )
            if jax.tree.leaves(state):
                names = names_of_shared(root)
                resolution = resolve_or_recall(state, self.rules, names)
                models.append(_Model(root, state, resolution))
        return models

    def forget(self) -> None:
        """Release all models: a task may keep the context of the block for long."""
        for kept in (self.settled, self._objects, self._births, self._optimizers):
            kept.clear()


def _lines(models: Sequence[_Model], births: Sequence[_Birth]) -> Parts:
    """What the processes agree on: rules, layouts, and what values come from."""
    lines = {
        f"model {number}: {name}": part
        for number, model in enumerate(models)
        for name, part in model.resolution.fingerprint_lines().items()
    }
    origins = [line for birth in births for line in trace_lines(birth.traced)]
    leaves = [leaf for model in models for leaf in jax.tree.leaves(model.state)]
    return {**lines, "keys and constants": [*origins, *map(digest_of_value, leaves)]}


def _optimizer_state(optimizer: Any) -> list[Any]:
    flat = [] if optimizer is None else nnx.to_flat_state(nnx_state(optimizer))
    return [part for path, part in flat if path[0] in ("step", "opt_state")]


def _follow(optimizer: Any, model: Any, rules: RuleSet) -> list[Any]:
    """Lay out an optimizer with values, if its model is on a mesh."""
    params = jax.tree.leaves(nnx_state(model, optimizer.wrt))
    shardings = [getattr(leaf, "sharding", None) for leaf in params]
    is_on_a_mesh = all(isinstance(sharding, NamedSharding) for sharding in shardings)
    return _fill_optimizer(optimizer, model, rules) if params and is_on_a_mesh else []


def _fill_optimizer(optimizer: Any, model: Any, rules: RuleSet) -> list[Any]:
    """Give an optimizer the state of `create_optimizer`, and return its arrays."""
    new = create_optimizer(model, optimizer.tx, rules, wrt=optimizer.wrt)
    nnx.update(optimizer, nnx_state(new))
    return jax.tree.leaves(nnx_state(new))


# ------------------------------------------------------------------------ Linen

_INITS = {name: getattr(linen.Module, name) for name in ("init", "lazy_init")}


def _init(
    plain: Callable[..., Any], module: Any, rules: RuleSet, /, *args: Any, **kwargs: Any
) -> Any:
    if is_tracing_constructor():
        return plain(module, *args, **kwargs)
    return create(functools.partial(plain, module), rules, *args, **kwargs)


def _scoped_init(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Make Linen's `init` create sharded variables in a block."""

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = _open_scope()
        if scope is None:
            return plain(self, *args, **kwargs)
        return _init(plain, self, scope.rules, *args, **kwargs)

    return init


def _binding_init(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Make `__post_init__` store a sharded `init` on modules made in a block."""

    @functools.wraps(plain)
    def post_init(self: Any) -> None:
        plain(self)
        scope = _open_scope()
        if scope is None or is_tracing_constructor() or not is_eager():
            return
        for name, init in _INITS.items():
            is_linens = getattr(type(self), name) is getattr(linen.Module, name)
            if is_linens and name not in vars(self):  # and it is not a field
                bound = functools.partial(_init, init, self, scope.rules)
                object.__setattr__(self, name, bound)

    return post_init
