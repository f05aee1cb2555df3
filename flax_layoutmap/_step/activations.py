"""Constrain the outputs of layers, by the paths of their modules.

Models are not changed: while a function is traced, the calls of modules are intercepted
(by `linen.intercept_methods`, and `intercept_calls` for NNX) to constrain their
outputs. NNX modules do not know their paths, so each carries its path as a note
meanwhile, which passes through `nnx.grad`, `scan`, `remat` and `merge`.

On Explicit axes, a module whose output has a rule runs as on Auto axes, and so do the
optimizers of optax.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import optax
from flax import linen, nnx

from flax_layoutmap._core.errors import LayoutError, MeshError, RuleError, closest, warn
from flax_layoutmap._core.jax_internals import is_sharding_type_error
from flax_layoutmap._core.layout import TensorLayout, is_offloaded
from flax_layoutmap._core.patches import patched
from flax_layoutmap._place.place import distribute_tensor, explicit_axes
from flax_layoutmap._resolve.lay import fits
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.matching import (
    Matcher,
    Rule,
    is_for_outputs,
    reaching_the_end,
)
from flax_layoutmap._rules.rules import Remark, RuleSet, news
from flax_layoutmap._rules.scope import Block, keyed, using_rules
from flax_layoutmap._step.ambiguity import ambiguous, no_layout, ran_on_auto_axes
from flax_layoutmap._step.auto_axes import (
    Crossing,
    call_linen,
    call_module,
    call_update,
    has_explicit_axes,
    is_inside,
)
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import (
    intercept_calls,
    is_nnx_object,
    named_objects_of,
    note_of,
    set_note,
)
from flax_layoutmap._tree.paths import escape, forms, join_keys


def activation_scope(layout_map: Any, *models: Any) -> Block:
    """Apply `layout_map.activations` to the layers that are called in the block.

    `flm.distribute_tensor(x, "hidden")` finds `layout_map.names["hidden"]` there.
    `flm.jit(layout_map=…)` does both by itself. With `jax.jit`, `nnx.jit` or without
    either, call the model in this block, inside of the traced function.

    Args:
        layout_map: a `LayoutMap` or `RuleSet` with a mesh.
        *models: NNX modules, whose paths begin here. A module that is in none of
            them is the root of its own paths when it is called. Linen modules know
            their paths and need not be given. A module that has several paths goes by
            the first.

    Returns:
        A context manager.

    Raises:
        RuleError: `layout_map` is none; or, at the end, a strict map has activation
            rules that no called module matches.
        MeshError: the rules have no mesh.
        LayoutError: when a layer is called whose output does not fit its rule.

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
    parameters = [form for model in models for form in flatten(model).every_form()]
    roots = [("", model) for model in models]
    return Block(functools.partial(_opened, rules, roots, parameters))


@contextlib.contextmanager
def _opened(
    rules: RuleSet, roots: Sequence[tuple[str, Any]], parameters: Iterable[str]
) -> Iterator[None]:
    with using_rules(rules), _activated(rules, roots, parameters, warn):
        yield


def call_activated(
    call: Callable[[], Any],
    rules: RuleSet | None,
    roots: Sequence[tuple[str, Any]],
    parameters: Iterable[str],
    report: Callable[[str], None],
) -> Any:
    """Call a function with the activation rules applied to the outputs of layers.

    Not a block alone, for the same reason as `call_with_rules`.

    Args:
        call: the function.
        rules: the rules; None, or none for activations, changes nothing.
        roots: NNX objects, each with the prefix of its paths: `policy/`.
        parameters: paths of parameters, in all their forms: a rule `…/output` that
            matches one of them is no rule for outputs.
        report: gets the warnings about rules that matched nothing; in a trace, a
            warning would point at JAX's code.
    """
    was, block = _ACTIVE.get(), _activated(rules, roots, parameters, report)
    try:
        with block:
            return call()
    finally:
        block.gen.close()  # Ctrl-C may come while the block is entered or left
        _ACTIVE.set(was)


@contextlib.contextmanager
def _activated(
    rules: RuleSet | None,
    roots: Sequence[tuple[str, Any]],
    parameters: Iterable[str],
    report: Callable[[str], None],
) -> Iterator[None]:
    """Constrain the outputs of layers inside the block."""
    was, active = _ACTIVE.get(), None
    if rules is not None and (
        rules.activations
        or any(map(is_for_outputs, rules.rules))
        or (rules.mesh is not None and explicit_axes(rules.mesh))
    ):
        active = Active(rules)
        active.learn(parameters)
    try:
        with contextlib.ExitStack() as stack:
            # Also None: a program of `jit` must not depend on a scope around the call.
            _ACTIVE.set(active)
            if active is not None:
                stack.enter_context(keyed(("activations", rules)))
                stack.enter_context(active.marked(roots))
                stack.enter_context(intercept_calls(_scoped_call))
                stack.enter_context(linen.intercept_methods(_intercept))
                for owner in (optax.GradientTransformation, optax.MultiSteps):
                    stack.enter_context(patched(owner, "update", _ScopedUpdate))
            elif was is not None:
                stack.enter_context(keyed(("no activations", rules)))
            yield
    finally:
        _ACTIVE.set(was)
    if active is not None:
        active.report_unused(report)


def forget_path(node: Any) -> None:
    """Remove the note from the modules of an object that leaves a function."""
    for _, module in _modules_of(node):
        set_note(module, None)


@dataclasses.dataclass(frozen=True)
class _Mark:
    """The note of a module; it has the rules, so that caches distinguish maps.

    `prefix` leads to the outermost module that it is in, `path` from there to it.
    """

    prefix: str
    path: str
    rules: RuleSet


# How to keep activations on the host.
_OFFLOADED = (
    "name the value in the model, checkpoint_name(x, 'hidden') of jax.ad_checkpoint, "
    "and call what holds it as jax.checkpoint(f, policy=jax.checkpoint_policies."
    "save_and_offload_only_these_names(names_which_can_be_saved=[], "
    "names_which_can_be_offloaded=['hidden'], offload_src='device', "
    "offload_dst='pinned_host'))"
)


class Active:
    """The rules in force, and which of them have matched."""

    def __init__(self, rules: RuleSet) -> None:
        self._rules = rules
        # Rules in Keras's spelling, except those for parameters (see `learn`).
        self._outputs = [rule for rule in rules.rules if is_for_outputs(rule)]
        # By the forms of a path (see `paths.forms`); messages show the first.
        self._found: dict[tuple[str, ...], Rule | None] = {}
        # Whether the module at a path was called.
        self._called: dict[tuple[str, ...], bool] = {}
        self._depth = 0

    def learn(self, parameters: Iterable[str]) -> None:
        """Drop rules `…/output` of the map that are for these parameters."""
        if self._outputs:
            matcher = Matcher(self._outputs, self._rules.match)
            used = {at for path in parameters for at in matcher.matching(path)}
            kept = [rule for at, rule in enumerate(self._outputs) if at not in used]
            self._outputs = kept
            self._found.clear()

    @contextlib.contextmanager
    def marked(self, roots: Sequence[tuple[str, Any]]) -> Iterator[None]:
        """In the block, the modules below some objects carry their paths."""
        before: list[tuple[Any, Any]] = []
        for prefix, root in roots:
            for path, node in _modules_of(root):
                own = "/".join(map(escape, path))
                if callable(node):
                    self._called.setdefault(forms(prefix, own), False)
                mark = note_of(node)
                before.append((node, mark))
                # An outer scope of the same rules may have marked it.
                if mark is None or mark.rules != self._rules:
                    set_note(node, _Mark(prefix, own, self._rules))
        try:
            yield
        finally:
            # Copies that were made in the block have the mark, too.
            for _, root in roots:
                forget_path(root)
            for node, mark in reversed(before):
                set_note(node, mark)

    def call(self, plain: Callable[..., Any], module: Any, args: Any, kw: Any) -> Any:
        """Call a module, and constrain its output."""
        mark = note_of(module)
        if mark is not None and mark.rules != self._rules:
            mark = None  # a copy from another scope
        if mark is None and not self._depth:
            # A model that was merged in the block (nnx.merge): it is a root.
            if self._outputs:
                self.learn(flatten(module).every_form())
            with self.marked([("", module)]):
                return self.call(plain, module, args, kw)
        self._depth += 1
        try:
            return self._called_at(mark, plain, module, args, kw)
        finally:
            self._depth -= 1

    def _called_at(
        self, mark: Any, plain: Callable[..., Any], module: Any, args: Any, kw: Any
    ) -> Any:
        if mark is None:
            return plain(*args, **kw)
        where = mark.prefix, mark.path
        with self.explained(*where, module, args, kw):
            if self.is_on_auto_axes(*where):
                finish = functools.partial(self.laid_out, *where)
                return call_module(plain, module, args, kw, finish)
            return self.laid_out(*where, plain(*args, **kw))

    def is_on_auto_axes(self, prefix: str, path: str) -> bool:
        """Whether a module has a rule, and the mesh in context Explicit axes."""
        return has_explicit_axes() and self._rule(*forms(prefix, path)) is not None

    @contextlib.contextmanager
    def explained(
        self, prefix: str, path: str, module: Any, args: Any, kw: Any
    ) -> Iterator[None]:
        """In the call of a module, name it in JAX's errors about Explicit axes."""
        own = forms(prefix, path)
        try:
            yield
        except LayoutError:
            raise
        except Exception as error:
            if is_sharding_type_error(error):
                given = {f"argument {at}": x for at, x in enumerate(args)} | kw
                text = ambiguous(own[0], module, given, str(error), self._rules)
                raise LayoutError(text) from error
            rule = self._rule(*own) if has_explicit_axes() else None
            if rule is not None:
                error.add_note(ran_on_auto_axes(own[0], rule))
            raise

    def laid_out(
        self, prefix: str, path: str, output: Any, crossing: Crossing | None = None
    ) -> Any:
        """The output of the module at a path, each leaf constrained to its layout.

        Of a call on Auto axes, every leaf needs a layout.
        """
        self._called[forms(prefix, path)] = True
        leaves, treedef = jax.tree_util.tree_flatten_with_path(
            output, is_leaf=is_nnx_object
        )
        several = len(leaves) > 1

        def laid(keys: Any, x: Any) -> Any:
            name = join_keys(keys)
            own = [forms(prefix, f"{path}/{name}".lstrip("/"))] if name else []
            x = self._leaf([*own, forms(prefix, path)], x, several)
            if crossing is None:
                return x
            if is_inside(x) and x.shape and not crossing.knows(x):
                full = forms(prefix, path)[0] if not own else own[0][0]
                raise LayoutError(no_layout(full, x, self._rules))
            return crossing.leave(x)

        return jax.tree.unflatten(treedef, [laid(keys, x) for keys, x in leaves])

    def _leaf(self, paths: Sequence[tuple[str, ...]], x: Any, several: bool) -> Any:
        """Constrain a leaf of an output, by its own path or else the module's."""
        if is_nnx_object(x) or not hasattr(x, "shape") or not hasattr(x, "dtype"):
            return x
        rule = self._rule(*paths[0])
        if rule is None:
            rule = self._rule(*paths[-1])
            if several and not x.shape:
                return x  # a loss beside the activations
        if rule is None or (
            rule.rank == "skip" and not fits(rule.layout, len(x.shape))
        ):
            return x
        if is_offloaded(kind := rule.layout.memory_kind):
            raise LayoutError(
                f"the rule {rule.pattern!r} for the output of {paths[-1][0]!r} "
                f"{tuple(x.shape)} has memory_kind={kind!r}, and what reads the output "
                f"needs it on the device: leave the kind out, {_OFFLOADED}"
            )
        try:
            # In the name of the operation, so that programs and profiles show it.
            with jax.named_scope(f"activations[{paths[-1][0]}]"):
                return distribute_tensor(x, self._layout(rule, x.shape))
        except (LayoutError, MeshError) as error:
            path = paths[-1][0]
            where = (f"{path!r}" if path else "the model") + f" {tuple(x.shape)}"
            fix = ""
            if several:
                fix = (
                    f"; it has several outputs, of which this one may have a rule of "
                    f"its own: layout_map.activations[{paths[0][0]!r}] = …"
                )
            raise type(error)(
                f"the rule {rule.pattern!r} for the output of {where}: {error}{fix}"
            ) from error

    def _rule(self, *own: str) -> Rule | None:
        """The rule for an output, from the forms of its path, activations first."""
        if own not in self._found:
            rule = self._chosen(self._rules.activations, own)
            if rule is None and self._outputs:
                rule = self._chosen(self._outputs, _outputs_of(own))
            self._found[own] = rule
        return self._found[own]

    def _chosen(self, rules: Sequence[Rule], own: Sequence[str]) -> Rule | None:
        matched = reaching_the_end(rules, self._rules.match, own)
        if not matched:
            return None
        found = [rules[at] for at in matched]
        self._rules._caches.fired.update(map(id, found))
        winner = self._rules.winner(rules, matched)
        if winner is None:
            listed = ", ".join(f"{rule.pattern!r} → {rule.layout}" for rule in found)
            raise RuleError(
                f"rules with different layouts match the output of {own[0]!r}: "
                f"{listed}; "
                'make one narrower, or use overlap="first" or "last"'
            )
        return rules[winner]

    def _layout(self, rule: Rule, shape: tuple[int, ...]) -> TensorLayout:
        """The layout of a rule on the mesh; `indivisible` may replicate some dims."""
        mesh = self._rules.mesh
        layout = rule.layout if rule.layout.device_mesh else rule.layout.on(mesh)
        if self._rules.indivisible == "error" or layout.device_mesh is None:
            return layout
        sizes = layout.device_mesh.axis_sizes
        dims = [
            axes if size % math.prod(sizes[axis] for axis in axes) == 0 else None
            for axes, size in zip(layout.dims(len(shape)), shape, strict=True)
        ]
        return TensorLayout(dims, mesh, memory_kind=layout.memory_kind)

    def report_unused(self, report: Callable[[str], None]) -> None:
        """Report once the rules that match no module, now and in earlier calls.

        A rule for a module that exists and was not called is not reported. If some
        modules were not called, a rule may be for one of their outputs, and is no
        error.
        """
        rules = self._rules
        unused = [
            rule.pattern
            for rule in (*rules.activations, *self._outputs)
            if not (
                rule.optional
                or id(rule) in rules._caches.fired
                or self._is_for_known(rule)
            )
        ]
        if not unused or not self._called or rules.strict is False:
            return
        lines = []
        for pattern in unused:
            known = [own[0] for own in self._called]
            near = closest(pattern.removesuffix("/output"), known)
            lines.append(
                f"{pattern!r}; the closest is {near[0]!r}" if near else repr(pattern)
            )
        text = (
            f"activation rules that match the output of no module: {', '.join(lines)}"
        )
        if rules.strict and all(self._called.values()):
            raise RuleError(f"strict: {text}")
        about = f"no output: {' '.join(unused)}"
        paths = frozenset(own[-1] for own in self._called)
        for new in news(rules, [Remark(text, about, paths)]):
            report(new)

    def _is_for_known(self, rule: Rule) -> bool:
        named = _outputs_of if rule in self._outputs else tuple
        match = self._rules.match
        return any(reaching_the_end([rule], match, named(own)) for own in self._called)


_ACTIVE: ContextVar[Active | None] = ContextVar(
    "flax_layoutmap_activations", default=None
)


def _scoped_call(owner: type, plain: Any) -> Any:
    """The `__call__` of a class, with its output constrained in a scope."""

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = plain.__get__(self, type(self))
        active = _ACTIVE.get()
        classes = type(self).__mro__
        definer = next((one for one in classes if "__call__" in vars(one)), None)
        if active is None or definer is not owner:
            return bound(*args, **kwargs)  # the second: super().__call__(…)
        return active.call(bound, self, args, kwargs)

    return call


class _ScopedUpdate:
    """The `update` of an optimizer: on Explicit axes in a scope, as on Auto axes."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __get__(self, tx: Any, owner: type | None = None) -> Any:
        update = self._plain.__get__(tx, owner)
        is_scoped = _ACTIVE.get() is not None and has_explicit_axes()
        is_bound = tx is not None
        return (
            functools.partial(call_update, update) if is_bound and is_scoped else update
        )


def _intercept(plain: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """The same for Linen."""
    active = _ACTIVE.get()
    if context.module.scope is None:  # a method of a module that holds no variables
        return plain(*args, **kwargs)
    if active is not None and not context.module.path:
        active.learn(flatten(context.module.variables).every_form())
    if active is None or context.method_name != "__call__":
        return plain(*args, **kwargs)
    module, path = context.module, "/".join(map(escape, context.module.path))
    with active.explained("", path, module, args, kwargs):
        if active.is_on_auto_axes("", path):
            finish = functools.partial(active.laid_out, "", path)
            return call_linen(module, args, kwargs, finish)
        return active.laid_out("", path, plain(*args, **kwargs))


def _modules_of(root: Any) -> list[tuple[Any, Any]]:
    return [
        (path, node)
        for path, node in named_objects_of(root)
        if isinstance(node, nnx.Module)
    ]


def _outputs_of(own: Sequence[str]) -> tuple[str, ...]:
    """The forms of a path of a module as Keras's spelling has them."""
    return tuple(f"{form}/output" for form in own)
