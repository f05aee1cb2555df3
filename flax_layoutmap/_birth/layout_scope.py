"""layout_map_scope: models made in the block get the layouts of their final paths.

The outermost constructors in the block are traced, not run: what they make holds
`AfterTheScope` placeholders. Where these end up in the finished model is known at the
end of the block (`scope_end`).
"""

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from flax_layoutmap._birth.linen_scope import sharded_inits
from flax_layoutmap._birth.scope_birth import AfterTheScope, Birth, BlockState
from flax_layoutmap._birth.scope_end import Follower, Made, fill
from flax_layoutmap._core.errors import StructureError, warn
from flax_layoutmap._core.mesh import spread
from flax_layoutmap._core.patches import patched
from flax_layoutmap._place.place import is_eager, need_devices, put
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._rules.scope import Block, using_rules
from flax_layoutmap._tree.flax_internals import (
    metaclass_of_objects,
    nnx_state,
    no_mesh,
    objects_of,
    restore_eager_flag,
    without_eager_sharding,
)
from flax_layoutmap._tree.graph import update
from flax_layoutmap._tree.objects import (
    LeftByTrace,
    leaves_in,
    left_by_trace,
    objects_in,
    refuse_references,
)
from flax_layoutmap._tree.trace import is_tracing_constructor

_SCOPE: ContextVar["_Scope | None"] = ContextVar("flax_layoutmap_scope", default=None)


def layout_map_scope(layout_map: Any) -> Block:
    """Create every model in the block sharded by the rules.

    tf-keras's `layout_map_scope`. At the end of the block each Variable of each NNX
    model that was made in it has the layout of its path in the finished model,
    wherever its part was made: modules may be made first and assembled later. A
    Variable without a rule is replicated on the mesh. Until then its value is only a
    shape and a dtype: calls of the model, and copies of it (`nnx.clone`), come after
    the block.

    An `nnx.Optimizer` made in the block is filled after its model: its state has the
    layouts of that of `flm.create_optimizer(model, tx, layout_map=layout_map)`.

    Linen modules hold no variables: `init` of one that is made in the block, called in
    it or later, makes them sharded, as `flm.create` does; under `jax.jit` it constrains
    them (JAX wants `jax.set_mesh` around that for Explicit axes). A `clone()` of a
    module, also as a part of another one, knows nothing of the block afterwards, nor
    does an `init` that the class itself defines.

    The rules are also those that `flm.distribute_tensor(x, "hidden")` uses in the
    block. Blocks nest: the innermost counts, and what it has made stays as it is.

    A constructor that reads values of arrays runs at once, and a `LayoutWarning` says
    so: the modules in it are made one by one, in equal parts on all devices, and what
    it makes itself is whole on one device until it ends; at the end of the block all
    is moved to its layouts. An `init` of Linen that reads values runs at once too, on
    one device, and its variables are moved then.

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
        try:
            with _sharded_constructors(), sharded_inits(_rules_here):
                with using_rules(rules):
                    yield layout_map
        finally:
            _SCOPE.reset(token)
        scope.block.stage = "ending"
        arrays = fill(scope.made())
        scope.block.stage = "ended"
    finally:
        if scope.block.stage != "ended":
            scope.block.stage = "failed"
        scope.forget()
    if outer is not None:
        outer.adopt(scope, arrays)


def _scope_here() -> "_Scope | None":
    scope = _SCOPE.get()
    # The context of a task that outlives the block still has it.
    return scope if scope is not None and scope.block.stage == "open" else None


def _rules_here() -> RuleSet | None:
    scope = _scope_here()
    return None if scope is None else scope.rules


class _Scope:
    """An open block inside `outer`, and the objects made in it."""

    def __init__(self, rules: RuleSet, outer: "_Scope | None") -> None:
        self.rules = rules
        self.outer = outer
        self.block = BlockState()
        self._births: list[Birth] = []
        self._modules: list[weakref.ref[Any]] = []
        self._followers: list[Follower] = []
        self._settled: list[Any] = []  # arrays that an inner block has laid out
        self._parts: list[weakref.ref[Any]] = []  # the modules and their parts
        # Class names → how many were made inside a transformation.
        self._hidden: collections.Counter[str] = collections.Counter()
        self._needs_values = False  # in a constructor that reads some

    def construct(self, make: Callable[..., Any], cls: type, args: Any, kw: Any) -> Any:
        """Make an object of a class in the block."""
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
        if all(map(_is_random, nodes)) and not pending:
            return self._traced(make, cls, args, kw, nodes)
        # Its parts keep their identity; its own arrays are made at once.
        return self._keep(_eagerly(make, args, kw))

    def _keep(self, module: Any, parts: Sequence[Any] = ()) -> Any:
        self._modules.append(weakref.ref(module))
        own = (part for part in (module, *parts) if isinstance(part, nnx.Module))
        self._parts += map(weakref.ref, own)
        return module

    def _traced(
        self, make: Callable[..., Any], cls: type, args: Any, kw: Any, nodes: list[Any]
    ) -> Any:
        try:
            birth = Birth(make, args, kw, self.block)
        except LeftByTrace:
            raise  # no less if it runs at once
        except StructureError as error:
            return self._at_once(make, cls, args, kw, str(error).splitlines()[0])
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

    def _at_once(
        self, make: Callable[..., Any], cls: type, args: Any, kw: Any, why: str
    ) -> Any:
        """Run a constructor that needs values; modules in it are made as it runs."""
        before, self._needs_values = self._needs_values, True
        try:
            module = _eagerly(make, args, kw)
        except jax.errors.UnexpectedTracerError as error:
            raise left_by_trace(
                error, f"the constructor of {cls.__name__} uses"
            ) from error
        finally:
            self._needs_values = before
        refuse_references(module)
        if jax.process_count() == 1:
            _spread(module, _mesh_of(self.rules))
        warn(
            f"layout_map_scope: the constructor of {cls.__name__} ran at once, its "
            "modules one by one in shards, what it makes itself on one device, and "
            f"its arrays are moved at the end of the block: {why}"
        )
        return self._keep(module)

    def _owner_of(self, pending: Sequence[AfterTheScope]) -> "_Scope":
        """The outermost block with a value that does not exist yet."""
        scope, owner = self.outer, self
        while scope is not None:
            if any(leaf.block is scope.block for leaf in pending):
                owner = scope
            scope = scope.outer
        return owner

    def _optimizer(
        self, make: Callable[..., Any], cls: type, args: Any, kw: Any, pending: Any
    ) -> Any:
        """Make an optimizer: at once if its model has values."""
        nodes = objects_in((args, kw))
        if not all(map(_is_random, nodes)) and not pending:
            optimizer = make(*args, **kw)
            self._followers.append(Follower(optimizer, cls, args, kw))
            return optimizer
        try:
            birth = Birth(make, args, kw, self.block)
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

    def made(self) -> Made:
        """The objects that were made and are alive."""
        return Made(
            rules=self.rules,
            block=self.block,
            births=tuple(self._births),
            modules=tuple(m for ref in self._modules if (m := ref()) is not None),
            followers=tuple(f for f in self._followers if f.optimizer is not None),
            settled=tuple(self._settled),
            parts=frozenset(id(ref()) for ref in self._parts),
            hidden=dict(self._hidden),
        )

    def adopt(self, inner: "_Scope", arrays: list[Any]) -> None:
        """Record the objects that an inner block has made, and its arrays."""
        self._settled += arrays
        self._parts += inner._parts

    def forget(self) -> None:
        """Keep no model alive: a task may hold the context of the block for long."""
        self._births.clear()
        self._modules.clear()
        self._followers.clear()


@contextlib.contextmanager
def _sharded_constructors() -> Iterator[None]:
    """Inside, the scope of the context constructs NNX modules."""
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


def _is_random(node: Any) -> bool:
    return isinstance(node, nnx.Rngs | nnx.RngStream)


def _mesh_of(rules: RuleSet) -> Any:
    assert rules.mesh is not None  # checked by `need_devices`
    return rules.mesh.jax_mesh


def _spread(module: Any, mesh: Any) -> None:
    """Move whole arrays to all devices, in shards."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
            return leaf
        own = spread(leaf.shape, mesh)
        is_whole = len(leaf.sharding.device_set) == 1
        return put(leaf, own) if is_whole and any(own.spec) else leaf

    update(module, jax.tree.map(moved, nnx_state(module)))


def _eagerly(make: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a constructor as if there were no mesh."""
    eager = nnx.using_eager_sharding()
    with no_mesh(), without_eager_sharding():
        module = make(*args, **kwargs)
    restore_eager_flag(module, eager)
    return module
