"""layout_map_scope: models made in the block get the layouts of their final paths.

The outermost constructors in the block are traced, not run: what they make holds
`AfterTheScope` leaves. Where these end up in the finished model is known at the end of
the block; then their paths give their layouts, and they are computed in their shards.
"""

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from flax_layoutmap._birth.create import hashes_of, made_from, refuse_unfit
from flax_layoutmap._birth.linen_scope import sharded_inits
from flax_layoutmap._birth.scope_birth import Birth
from flax_layoutmap._birth.scope_optimizer import Follower
from flax_layoutmap._core.block import Block
from flax_layoutmap._core.errors import StructureError, warn
from flax_layoutmap._core.mesh import spread
from flax_layoutmap._core.processes import Agreement, Parts, digest_of_value
from flax_layoutmap._place.place import is_eager, need_devices, put, settle_metadata
from flax_layoutmap._resolve.memory import remember_rules
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve, rule_set_of
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._rules.scope import using_rules
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import (
    is_nnx_object,
    is_plain_variable,
    metaclass_of_objects,
    metaclass_of_variables,
    nnx_state,
    no_mesh,
    objects_of,
    patched,
    restore_eager_flag,
    without_eager_sharding,
)
from flax_layoutmap._tree.parts import leaves_in, objects_in
from flax_layoutmap._tree.placeholder import AfterTheScope, Fate
from flax_layoutmap._tree.statics import (
    LeftByTrace,
    arrays_as_data,
    left_by_trace,
    refuse_left_over,
    refuse_references,
)
from flax_layoutmap._tree.trace import is_tracing_constructor
from flax_layoutmap._tree.update import update

_SCOPE: ContextVar["_Scope | None"] = ContextVar("flax_layoutmap_scope", default=None)


def layout_map_scope(layout_map: Any) -> Block:
    """Makes every model in the block sharded, by the rules.

    tf-keras's `layout_map_scope`. At the end of the block each Variable of each NNX
    model that was made in it has the layout of its path in the finished model,
    wherever its part was made: modules may be made first and assembled later. A
    Variable without a rule is replicated on the mesh. Until then its value is only a
    shape and a dtype: calls of the model, and copies of it (`nnx.clone`), come after
    the block.

    An `nnx.Optimizer` made in the block is filled after its model: its state lies as
    that of `flm.create_optimizer(model, tx, layout_map=layout_map)`.

    Linen modules hold no variables: `init` of one that is made in the block, called in
    it or later, makes them sharded, as `flm.create` does; under `jax.jit` it constrains
    them (JAX wants `jax.set_mesh` around that for Explicit axes). A `clone()` of a
    module, also as a part of another one, knows nothing of the block afterwards, nor
    does an `init` that the class itself defines.

    The rules are also those that `flm.distribute_tensor(x, "hidden")` asks in the
    block. Blocks nest: the innermost counts, and what it has made stays as it is.

    A constructor that reads values of arrays runs at once, and a `LayoutWarning` says
    so: the modules in it are made one by one, in equal parts on all devices, and each
    Variable that it makes itself is first whole on one device, for a moment; at the end
    of the block all is moved to its layouts. An `init` of Linen that reads values runs
    at once too, on one device, and its variables are moved then.

    As a decorator it is a block around each call of the function.

    Others are traced: as in `jax.jit`, what they leave outside of their model (a table
    in a cache, or in an attribute of a class) has no values afterwards. Fill it before.

    Args:
        layout_map: a `LayoutMap` or `RuleSet` with a mesh of devices.

    Returns:
        A context manager; `as` gives `layout_map`.

    Raises:
        MeshError: the rules have no mesh, or one without devices.
        RuleError: `layout_map` is none.
        ResolveError: at the end, what does not fit the rules; nothing was made.
        StructureError: in the block, what needs values of a model that has none yet.
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
    return Block(functools.partial(_opened, rules, layout_map))


@contextlib.contextmanager
def _opened(rules: RuleSet, layout_map: Any) -> Iterator[Any]:
    outer = _SCOPE.get()
    scope = _Scope(rules, _scope_here())
    token = _SCOPE.set(scope)
    try:
        with _sharded_constructors(), sharded_inits(_rules_here), using_rules(rules):
            yield layout_map
    finally:
        _SCOPE.reset(token)
        scope.fate.block = "failed"
    try:
        settled = scope.finish()
    finally:
        scope.forget()
    scope.fate.block = "ended"
    if outer is not None:
        outer.adopt(scope, settled)


def _scope_here() -> "_Scope | None":
    scope = _SCOPE.get()
    # A task that outlives the block has it in its context still.
    return scope if scope is not None and scope.fate.block == "open" else None


def _rules_here() -> RuleSet | None:
    scope = _scope_here()
    return None if scope is None else scope.rules


class _Model:
    """A model of a block, as far as no inner block has laid it out.

    Attributes:
        root: the module.
        state: its Variables and arrays.
        leaves: their values.
        paths: where these are.
    """

    def __init__(self, root: Any, state: Any) -> None:
        self.root = root
        self.state = state
        flat = flatten(state)
        self.leaves, self.paths = flat.leaves, flat.paths

    def fill(self, made: dict[int, Any], resolution: Resolution) -> list[Any]:
        """Puts all values where they are to be, those that were made now too.

        Args:
            made: id of a leaf → its array, to which those that were moved are added.
            resolution: where they are to be.
        """
        new = [
            # An abstract leaf of the user's own stays one.
            leaf
            if type(leaf) is jax.ShapeDtypeStruct
            else put(made.get(id(leaf), leaf), own)
            for leaf, own in zip(self.leaves, resolution.sharding_list(), strict=True)
        ]
        update(self.root, jax.tree.unflatten(jax.tree.structure(self.state), new))
        settle_metadata(self.state, resolution)  # its Variables are the model's own
        remember_rules(self.root, resolution.rules)
        for leaf, array in zip(self.leaves, new, strict=True):
            made.setdefault(id(leaf), array)
        return new


class _Scope:
    """What was made in one block.

    Attributes:
        rules: the rules.
        outer: the block around it.
        fate: what has become of the values, for what stands for them.
        settled: arrays that an inner block has laid out.
    """

    def __init__(self, rules: RuleSet, outer: "_Scope | None") -> None:
        self.rules = rules
        self.outer = outer
        self.fate = Fate()
        self.settled: list[Any] = []
        self._births: list[Birth] = []
        self._modules: list[weakref.ref[Any]] = []
        self._followers: list[Follower] = []
        self._made: list[weakref.ref[Any]] = []  # the modules and their parts
        # Names of classes, and how many were made inside of a trace.
        self._hidden: collections.Counter[str] = collections.Counter()
        self._needs_values = False  # in a constructor that reads some

    def construct(self, make: Callable[..., Any], cls: type, args: Any, kw: Any) -> Any:
        """Makes an object of a class in the block."""
        if is_tracing_constructor():
            return make(*args, **kw)  # a part of what is traced, or for flm.create
        if self._needs_values and jax.process_count() > 1:
            return make(*args, **kw)  # no process could read a part of another one
        leaves = leaves_in((args, kw))
        if not is_eager() or any(isinstance(leaf, Tracer) for leaf in leaves):
            if issubclass(cls, nnx.Module):
                self._hidden[cls.__name__] += 1
            return make(*args, **kw)
        pending = [leaf for leaf in leaves if isinstance(leaf, AfterTheScope)]
        if issubclass(cls, nnx.Optimizer):
            return self._owner_of(pending)._optimizer(make, cls, args, kw, pending)
        nodes = objects_in((args, kw))
        only_rngs = all(isinstance(node, nnx.Rngs | nnx.RngStream) for node in nodes)
        if only_rngs and not pending:
            return self._traced(make, cls, args, kw, nodes)
        # Its parts keep their identity; what it makes itself is made at once.
        return self._keep(_eagerly(make, args, kw))

    def _keep(self, module: Any, parts: Sequence[Any] = ()) -> Any:
        self._modules.append(weakref.ref(module))
        own = (part for part in (module, *parts) if isinstance(part, nnx.Module))
        self._made += map(weakref.ref, own)
        return module

    def _traced(
        self, make: Callable[..., Any], cls: type, args: Any, kw: Any, nodes: list[Any]
    ) -> Any:
        try:
            birth = Birth(make, args, kw, self.fate)
        except LeftByTrace:
            raise  # no less if it runs at once
        except StructureError as error:
            return self._in_parts(make, cls, args, kw, str(error).splitlines()[0])
        if any(isinstance(value, Tracer) for value in birth.traced.closed.consts):
            self._hidden[cls.__name__] += 1  # it closes over a value of a trace
            return make(*args, **kw)
        together = None if self._needs_values else birth.objects()
        if together is None:
            together = birth.at_once(_mesh_of(self.rules))
        else:
            self._births.append(birth)
        module = birth.settle(together, nodes)
        return self._keep(module, objects_of(module))

    def _in_parts(
        self, make: Callable[..., Any], cls: type, args: Any, kw: Any, why: str
    ) -> Any:
        """Runs a constructor that needs values: its parts are there when it asks."""
        before, self._needs_values = self._needs_values, True
        try:
            with _spreading_variables():
                module = _eagerly(make, args, kw)
        except jax.errors.UnexpectedTracerError as error:
            raise left_by_trace(
                error, f"the constructor of {cls.__name__} uses"
            ) from error
        finally:
            self._needs_values = before
        refuse_references(module)
        if jax.process_count() == 1:
            _spread(module, self.rules)
        warn(
            f"layout_map_scope: the constructor of {cls.__name__} ran at once, its "
            "modules one by one in shards, what it makes itself one by one on one "
            f"device, and its arrays are moved at the end of the block: {why}"
        )
        return self._keep(module)

    def made_variable(self, variable: nnx.Variable[Any]) -> None:
        """Spreads the value of a new Variable, in a constructor that needs values."""
        wanted = self._needs_values and is_eager() and not is_tracing_constructor()
        if wanted and is_plain_variable(variable) and jax.process_count() == 1:
            value = variable.get_raw_value()
            variable.set_raw_value(jax.tree.map(_spreader(self.rules), value))

    def _owner_of(self, pending: Sequence[AfterTheScope]) -> "_Scope":
        """The outermost block of which something has no value yet."""
        scope, owner = self.outer, self
        while scope is not None:
            if any(leaf.fate is scope.fate for leaf in pending):
                owner = scope
            scope = scope.outer
        return owner

    def _optimizer(
        self, make: Callable[..., Any], cls: type, args: Any, kw: Any, pending: Any
    ) -> Any:
        """Makes an optimizer: at once if its model has values."""
        nodes = objects_in((args, kw))
        has_model = any(not isinstance(n, nnx.Rngs | nnx.RngStream) for n in nodes)
        if has_model and not pending:
            optimizer = make(*args, **kw)
            self._followers.append(Follower(optimizer, cls, args, kw))
            return optimizer
        try:
            birth = Birth(make, args, kw, self.fate)
        except StructureError as error:
            raise StructureError(
                f"the constructor of {cls.__name__} needs the values of a model that "
                "is made when the layout_map_scope block ends: make it after the "
                "block, with flm.create_optimizer(model, tx) "
                f"({str(error).splitlines()[0]})"
            ) from error
        together = birth.objects()
        assert together is not None  # its arrays are in Variables
        optimizer = birth.settle(together, nodes)
        self._followers.append(Follower(optimizer, cls, args, kw, birth))
        return optimizer

    def finish(self) -> list[Any]:
        """Makes what is to be made. Returns all arrays that are laid out then."""
        self._followers = [f for f in self._followers if f.optimizer is not None]
        modules = [m for ref in self._modules if (m := ref()) is not None]
        for module in modules:
            arrays_as_data(module, AfterTheScope)  # a value of the block was set
        roots = _roots(modules)
        self._tell_hidden(roots)
        states = [self._own(nnx_state(root)) for root in roots]
        models = [
            _Model(root, state)
            for root, state in zip(roots, states, strict=True)
            if jax.tree.leaves(state)
        ]
        self._check_complete(models)
        shardings: dict[int, Any] = {}
        paths: dict[int, str] = {}
        with Agreement("creating the models of a scope", self.rules.mesh) as agreement:
            found = [resolve(model.state, self.rules) for model in models]
            for model, resolution in zip(models, found, strict=True):
                wanted = resolution.sharding_list()
                names = resolution.paths
                refuse_unfit(names, model.leaves, "layout_map_scope")
                for leaf, own, name in zip(model.leaves, wanted, names, strict=True):
                    shardings.setdefault(id(leaf), own)
                    paths.setdefault(id(leaf), name)
            following = [
                (follower, *plan)
                for follower in self._followers
                if (plan := follower.resolve(self.rules, shardings)) is not None
            ]
            plans = [resolution for _, _, resolution in following]
            leaves = [leaf for model in models for leaf in model.leaves]
            leaves += [
                leaf for _, state, _ in following for leaf in flatten(state).leaves
            ]
            births = [*self._births, *(f.birth for f, _, _ in following if f.birth)]
            agreement.add(lambda: _made_from(births, leaves, [*found, *plans]))
            for number, resolution in enumerate([*found, *plans]):
                group = found if number < len(found) else plans
                resolution.announce(besides=[f for f in group if f is not resolution])
                parts = resolution.fingerprint_lines
                agreement.add(lambda p=parts, n=number: _numbered(p(), n))
        made: dict[int, Any] = {}
        for birth in self._births:
            made |= birth.make(shardings, paths)
        arrays: list[Any] = []
        for model, resolution in zip(models, found, strict=True):
            arrays += model.fill(made, resolution)
        for follower, state, resolution in following:
            arrays += follower.fill(state, resolution, made)
        return arrays + self.settled

    def adopt(self, inner: "_Scope", settled: list[Any]) -> None:
        """Takes note of what an inner block has made, and of its arrays."""
        self.settled += settled
        self._made += inner._made

    def forget(self) -> None:
        """Keeps no model alive: a task may have the block in its context for long."""
        self._births.clear()
        self._modules.clear()
        self._followers.clear()

    def _own(self, state: Any) -> Any:
        """A State without what an inner block has laid out, or an outer one will."""
        settled = set(map(id, self.settled))

        followers = self._followers

        def is_others(leaf: Any) -> bool:
            if isinstance(leaf, AfterTheScope) and leaf.fate is not self.fate:
                return leaf.fate.block == "open"
            return id(leaf) in settled

        return nnx.from_flat_state(
            (path, part)
            for path, part in nnx.to_flat_state(state)
            if not all(map(is_others, jax.tree.leaves(part)))
            and not any(follower.owns(part) for follower in followers)
        )

    def _check_complete(self, models: Sequence[_Model]) -> None:
        """Raises where a model would keep a value that is not made."""
        for model in models:
            for leaf, path in zip(model.leaves, model.paths, strict=True):
                if isinstance(leaf, AfterTheScope) and leaf.fate is not self.fate:
                    raise StructureError(leaf.why_not())
                refuse_left_over(leaf, f"{path or 'the model'} is")
            for node in filter(is_nnx_object, objects_of(model.root)):
                for name, value in vars(node).items():
                    if isinstance(value, AfterTheScope) and not _is_data(node, name):
                        raise StructureError(
                            f"{type(node).__name__}.{name} was set to a value of the "
                            "layout_map_scope block, where this version of flax sees "
                            "no array: set an nnx.Variable, or set it after the block"
                        )

    def _tell_hidden(self, roots: Sequence[Any]) -> None:
        """Warns of modules that were made inside of a transformation, and are lost."""
        made = {id(ref()) for ref in self._made}
        others = {id(n): n for root in roots for n in objects_of(root)}
        found = collections.Counter(
            type(node).__name__ for at, node in others.items() if at not in made
        )
        lost = [name for name, count in self._hidden.items() if found[name] < count]
        if lost:
            warn(
                f"layout_map_scope: {', '.join(lost)} was made inside of a "
                "transformation (nnx.vmap, jax.jit) and is part of no model of the "
                "block, so it lies where it was made, unless it is abstract "
                "(nnx.eval_shape): make it in the __init__ of a module, or with "
                "flm.create(make, layout_map)"
            )


@contextlib.contextmanager
def _sharded_constructors() -> Iterator[None]:
    """Inside, the scope of the context makes NNX modules."""
    meta = metaclass_of_objects()
    if meta is None:
        raise StructureError(
            "layout_map_scope cannot see the constructors of this version of flax: use "
            "flm.create(lambda: Model(...), layout_map)"
        )
    with patched(meta, "__call__", _scoped_constructor):
        yield


def _scoped_constructor(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def construct(cls: Any, *args: Any, **kwargs: Any) -> Any:
        scope = _scope_here()
        is_made = issubclass(cls, nnx.Module | nnx.Optimizer)
        # A bridge.Module holds no variables until its `init`, as one of Linen.
        if scope is None or not is_made or issubclass(cls, nnx.bridge.Module):
            return plain(cls, *args, **kwargs)
        return scope.construct(functools.partial(plain, cls), cls, args, kwargs)

    return construct


def _spread(module: Any, rules: RuleSet) -> None:
    """Moves whole arrays to all devices, where they take less room."""
    update(module, jax.tree.map(_spreader(rules), nnx_state(module)))


def _spreader(rules: RuleSet) -> Callable[[Any], Any]:
    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
            return leaf
        own = spread(leaf.shape, _mesh_of(rules))
        is_whole = len(leaf.sharding.device_set) == 1
        return put(leaf, own) if is_whole and any(own.spec) else leaf

    return moved


@contextlib.contextmanager
def _spreading_variables() -> Iterator[None]:
    """Inside, the scope of the context is told of each new Variable."""
    meta = metaclass_of_variables()
    if meta is None:
        yield
        return
    with patched(meta, "__call__", _told_variable):
        yield


def _told_variable(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def construct(cls: Any, *args: Any, **kwargs: Any) -> Any:
        variable = plain(cls, *args, **kwargs)
        scope = _scope_here()
        if scope is not None:
            scope.made_variable(variable)
        return variable

    return construct


def _mesh_of(rules: RuleSet) -> Any:
    assert rules.mesh is not None  # asked by `need_devices`
    return rules.mesh.jax_mesh


def _eagerly(make: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs a constructor as if there were no mesh."""
    eager = nnx.using_eager_sharding()
    with no_mesh(), without_eager_sharding():
        module = make(*args, **kwargs)
    restore_eager_flag(module, eager)
    return module


def _is_data(node: Any, name: str) -> bool:
    return name in map(str, nnx_state(node))


def _roots(modules: Sequence[Any]) -> list[Any]:
    """Those that are part of no other one."""
    inner = {id(node) for m in modules for node in objects_of(m) if node is not m}
    return [module for module in modules if id(module) not in inner]


def _made_from(
    births: Sequence[Birth], leaves: Sequence[Any], found: Sequence[Resolution]
) -> Parts:
    """What the leaves of all models are made from; their values, if they are here."""
    hashes: dict[int, str] = {}
    for birth in births:
        hashes |= zip(map(id, birth.leaves), hashes_of(birth.traced), strict=True)
    paths = [
        f"model {at}: {path}" for at, one in enumerate(found) for path in one.paths
    ]
    own = [hashes.get(id(leaf)) or digest_of_value(leaf) for leaf in leaves]
    return made_from(paths, own)


def _numbered(parts: Mapping[str, list[str]], number: int) -> dict[str, list[str]]:
    return {f"model {number}: {name}": part for name, part in parts.items()}
