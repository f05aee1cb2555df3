"""Constrain the outputs of layers, by the paths of their modules.

In a block, the calls of modules are intercepted. NNX modules do not know their paths,
so each carries its path as a note meanwhile, which passes through `nnx.grad`, `scan`,
`remat` and `merge`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from flax import linen, nnx

from flax_layoutmap._core.errors import MeshError, RuleError, did_you_mean, warn
from flax_layoutmap._place.place import distribute, explicit_axes, wanted_layout
from flax_layoutmap._resolve.lay import CONFLICT_FIX, fits
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.matching import Matcher, Rule, is_for_outputs
from flax_layoutmap._rules.records import Remark, news
from flax_layoutmap._rules.rules import RuleSet, keyed, using_rules
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import (
    intercept_calls,
    is_nnx_object,
    named_objects_of,
    note_of,
    set_note,
)
from flax_layoutmap._tree.paths import escape, forms, join_keys

# The path of a module or of an output in all its forms (see `paths.forms`); messages
# show the first.
_Path = tuple[str, ...]


def activation_scope(
    layout_map: Any, *models: Any
) -> contextlib.AbstractContextManager[None, None]:
    """Apply `layout_map.activations` to the layers that are called in the block.

    `flm.distribute_tensor(x, "hidden")` finds `layout_map.names["hidden"]` there.
    `flm.jit(layout_map=…)` does both by itself. With `jax.jit`, `nnx.jit` or without
    either, call the model in this block, inside of the traced function.

    Args:
        layout_map: a `LayoutMap` or `RuleSet` with a mesh.
        *models: NNX modules, whose paths begin here; any other one that is called is
            the root of its own paths. Linen modules know theirs.

    Returns:
        A context manager.

    Raises:
        RuleError: `layout_map` is not one, or strict with activation rules that match
            no module.
        MeshError: the rules have no mesh.
        LayoutError: in the block, an output does not fit its rule.

    Example:
        >>> import flax_layoutmap as flm, jax
        >>> from flax import nnx
        >>> layout_map = flm.LayoutMap("data=-1")
        >>> layout_map.activations["layers/0"] = ("data", None)
        >>> model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
        >>> with flm.activation_scope(layout_map, model):
        ...     y = model(jax.numpy.ones((8, 4)))
        >>> tuple(y.sharding.spec)
        ('data',)

    Plain JAX: `jax.lax.with_sharding_constraint(y, …)` after each layer.
    """
    rules = rule_set_of(layout_map, "activation_scope(layout_map)")
    if rules.mesh is None:
        raise MeshError(
            "activation_scope needs rules with a mesh; use layout_map.on(mesh)"
        )
    for model in models:
        if not is_nnx_object(model):
            raise RuleError(
                "activation_scope(layout_map, *models) takes NNX modules, got a "
                f"{type(model).__name__}; Linen modules need not be given"
            )
    roots = [("", model) for model in models]
    parameters = [form for model in models for form in flatten(model).every_form()]

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        with using_rules(rules), activated(rules, roots, parameters, warn):
            yield

    block: Any = scope()  # to a type checker it could suppress errors
    return block


@contextlib.contextmanager
def activated(
    rules: RuleSet | None,
    roots: Sequence[tuple[str, Any]],
    parameters: Iterable[str],
    report: Callable[[str], None],
) -> Iterator[None]:
    """In the block, activation rules apply to the outputs of layers.

    `roots` are NNX objects, each with the prefix of its paths: `policy/`. A rule
    `…/output` that matches one of `parameters`, paths in all their forms, is not for
    outputs. `report` gets the warnings about rules that matched nothing.
    """
    before, active = _ACTIVE.get(), None
    if rules is not None and (
        rules.activations
        or any(map(is_for_outputs, rules.rules))
        or explicit_axes(jax.sharding.get_abstract_mesh())  # errors name modules
    ):
        active = _Active(rules)
        active.learn(parameters)
    with contextlib.ExitStack() as stack:
        # Also None: a program of `jit` must not depend on a scope around the call.
        stack.callback(_ACTIVE.reset, _ACTIVE.set(active))
        if active is not None:
            stack.enter_context(keyed(("activations", rules)))
            stack.enter_context(active.marked(roots))
            stack.enter_context(intercept_calls(_scoped_call))
            stack.enter_context(linen.intercept_methods(_intercept))
        elif before is not None:
            stack.enter_context(keyed(("no activations", rules)))
        yield
    if active is not None:
        active.report_unused(report)


def forget_path(node: Any) -> None:
    """Remove the note from the modules of an object that leaves a function."""
    for _, module in _modules_of(node):
        set_note(module, None)


def _modules_of(root: Any) -> list[tuple[Any, Any]]:
    nodes = named_objects_of(root)
    return [(keys, node) for keys, node in nodes if isinstance(node, nnx.Module)]


class _OutputRule(NamedTuple):
    """A rule, its name in messages, and what its pattern has after the path."""

    rule: Rule
    name: str
    end: str


class _Active:
    """The rules in force, which modules there are, and how deep in their calls this is.

    The note of a module is its path, with the rules of the scope.
    """

    def __init__(self, rules: RuleSet) -> None:
        self.rules, self._depth = rules, 0
        self._is_called: dict[_Path, bool] = {}
        self._chosen: dict[_Path, _OutputRule | None] = {}
        self._outputs = [
            _OutputRule(rule, f"{kind} {at + 1} {rule.pattern!r}", end)
            for kind, section, end in (
                ("activation rule", rules.activations, ""),
                ("rule", rules.rules, "/output"),
            )
            for at, rule in enumerate(section)
            if not end or is_for_outputs(rule)
        ]

    # ---------------------------------------------------------------- which rule

    def learn(self, parameters: Iterable[str]) -> None:
        """Drop rules `…/output` of the map that are for these parameters."""
        if own := [x for x in self._outputs if x.end]:
            matcher = Matcher([x.rule for x in own], self.rules.match)
            used = {own[at] for path in parameters for at in matcher.matching(path)}
            self._outputs = [x for x in self._outputs if x not in used]
            self._chosen.clear()

    def _rule_of(self, path: _Path) -> _OutputRule | None:
        """The rule for an output, activations first."""
        if path not in self._chosen:
            some = self._matching(path, "") or self._matching(path, "/output")
            rules = [x.rule for x in some]
            winner = self.rules.winner(rules, range(len(rules))) if rules else None
            if rules and winner is None:
                listed = ", ".join(f"{x.name} → {x.rule.layout}" for x in some)
                raise RuleError(
                    "rules with different layouts match the output of "
                    f"{path[0]!r}: {listed}; {CONFLICT_FIX}"
                )
            self.rules._fired.update(map(id, rules))
            self._chosen[path] = None if winner is None else some[winner]
        return self._chosen[path]

    def _matching(self, path: _Path, end: str) -> Sequence[_OutputRule]:
        """The rules of one section that match an output."""
        some = [x for x in self._outputs if x.end == end]
        ends = [form + end for form in path]
        matcher = Matcher([x.rule for x in some], self.rules.match, to_end=True)
        return [some[at] for at in matcher.match(ends).rules]

    def report_unused(self, report: Callable[[str], None]) -> None:
        """Report once the rules that match no module, now and in earlier calls.

        If some modules were not called, a rule may be for one of their outputs, and is
        no error.
        """
        known = [path[0] for path in self._is_called]
        unused = [
            repr(x.rule.pattern) + did_you_mean(x.rule.pattern, known)
            for x in self._outputs
            if not x.rule.optional and id(x.rule) not in self.rules._fired
            if not any(x in self._matching(path, x.end) for path in self._is_called)
        ]
        if not unused or not known or self.rules.strict is False:
            return
        listed = ", ".join(unused)
        text = f"activation rules that match the output of no module: {listed}"
        if self.rules.strict and all(self._is_called.values()):
            raise RuleError(f"strict: {text}")
        for new in news(self.rules, [Remark(text, frozenset([text]))]):
            report(new)

    # ---------------------------------------------------------- modules and calls

    @contextlib.contextmanager
    def marked(self, roots: Sequence[tuple[str, Any]]) -> Iterator[None]:
        """In the block, the modules below some objects carry their paths."""
        before: list[tuple[Any, Any]] = []
        for prefix, root in roots:
            for keys, module in _modules_of(root):
                path = forms(prefix, "/".join(map(escape, keys)))
                if callable(module):
                    self._is_called.setdefault(path, False)
                before.append((module, note_of(module)))
                if self._path_of(module) is None:  # else an outer scope has marked it
                    set_note(module, (path, self.rules))
        try:
            yield
        finally:
            # Copies that were made in the block have the mark, too.
            for _, root in roots:
                forget_path(root)
            for module, mark in reversed(before):
                set_note(module, mark)

    def _path_of(self, module: Any) -> _Path | None:
        path, rules = note_of(module) or (None, None)
        return path if rules == self.rules else None

    def call(self, module: Any, call: Callable[[], Any]) -> Any:
        """Call an NNX module, and constrain its output."""
        path = self._path_of(module)
        if path is None and not self._depth:
            # A model that was merged in the block (nnx.merge): it is a root.
            self.learn(flatten(module).every_form())
            with self.marked([("", module)]):
                return self.call(module, call)
        self._depth += 1
        try:
            return call() if path is None else self.lay_out(path, module, call)
        finally:
            self._depth -= 1

    def lay_out(self, path: _Path, module: Any, call: Callable[[], Any]) -> Any:
        """Call the module at a path, and constrain each leaf of its output."""
        with _named_in_errors(path[0], module):
            output = call()
            self._is_called[path] = True
            leaves = jax.tree.leaves(output, is_leaf=is_nnx_object)
            return jax.tree.map_with_path(
                lambda keys, x: self._leaf(path, join_keys(keys), x, len(leaves) > 1),
                output,
                is_leaf=is_nnx_object,
            )

    def _leaf(self, path: _Path, name: str, x: Any, has_others: bool) -> Any:
        """Constrain a leaf of an output, by its own path or else the module's."""
        if is_nnx_object(x) or not hasattr(x, "shape") or not hasattr(x, "dtype"):
            return x
        own = tuple(f"{form}/{name}".strip("/") for form in path)
        chosen = self._rule_of(own)
        if not chosen and (x.shape or not has_others):  # a loss beside the output
            chosen = self._rule_of(path)
        if not chosen or (
            chosen.rule.rank == "skip" and not fits(chosen.rule.layout, x.ndim)
        ):
            return x
        what = f"{chosen.name} for the output of {path[0] or 'the model'!r}"
        if has_others:
            what += f" (for this one alone: layout_map.activations[{own[0]!r}])"
        # In the name of the operation, so that programs and profiles show it.
        with jax.named_scope(f"activations[{path[0]}]"):
            return distribute(x, wanted_layout(chosen.rule.layout), what, is_named=True)


_ACTIVE: ContextVar[_Active | None] = ContextVar("_ACTIVE", default=None)


def _scoped_call(owner: type, plain: Any) -> Any:
    """The `__call__` of a class of NNX modules, with its output constrained."""

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(plain.__get__(self, type(self)), *args, **kwargs)
        active, classes = _ACTIVE.get(), type(self).__mro__
        is_outermost = owner is next(c for c in classes if "__call__" in vars(c))
        if active is None or not is_outermost:  # super().__call__(…)
            return bound()
        return active.call(self, bound)

    return call


def _intercept(plain: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """The same for Linen."""
    active, module = _ACTIVE.get(), context.module
    if active is None or module.scope is None:  # the module has no variables yet
        return plain(*args, **kwargs)
    if not module.path:
        active.learn(flatten(module.variables).every_form())
    if context.method_name != "__call__":
        return plain(*args, **kwargs)
    path = ("/".join(map(escape, module.path)),)
    return active.lay_out(path, module, lambda: plain(*args, **kwargs))


@contextlib.contextmanager
def _named_in_errors(path: str, module: Any) -> Iterator[None]:
    """On Explicit axes, errors in the block get a note: the innermost module."""
    try:
        yield
    except Exception as error:
        text = "in the call of the module"
        is_noted = text in "".join(getattr(error, "__notes__", ()))
        if explicit_axes(jax.sharding.get_abstract_mesh()) and not is_noted:
            error.add_note(f"{text} {path or 'the model'} ({type(module).__name__})")
        raise
