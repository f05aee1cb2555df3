"""Messages about layouts that JAX cannot choose on Explicit axes."""

import re
import traceback
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from flax_layoutmap._core.axes import dim_axes
from flax_layoutmap._core.errors import bullet_list
from flax_layoutmap._core.fetch import unboxed
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap._rules.records import show_shape, show_spec
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.objects import is_object
from flax_layoutmap._tree.paths import join_keys


def ambiguous(
    path: str, module: Any, given: Mapping[str, Any], cause: str, rules: RuleSet
) -> str:
    """In the call of a module without a rule, JAX cannot choose a layout.

    `given` are its arguments by name.
    """
    inputs, own = _arrays(given), _arrays(_held(module))
    layout = _layout_by(rules, max((x for _, x in own), key=np.ndim, default=None))
    if inputs and not own:
        # A layer without parameters, such as Dropout, keeps the layout of its input.
        layout = TensorLayout(tuple(jax.typeof(inputs[0][1]).sharding.spec))
    name = f"{path or 'the model'} ({type(module).__name__})"
    operands = bullet_list(_shown([*inputs, *own]))
    return (
        f"{name}: on Explicit axes JAX cannot choose the layout of a result from "
        f"those of its operands:\n{operands}\n{cause}\nadd a rule for the "
        "output of this module, which then runs as on Auto axes: "
        f"{_rule(path, layout)}"
    )


def no_layout(path: str, x: Any, rules: RuleSet) -> str:
    """A module with a rule has an output that no rule lays out."""
    return (
        f"no rule lays out the output {path!r} {show_shape(x.shape)} of a module that "
        "has a rule and so runs as on Auto axes, where outputs have no layouts of "
        f"their own: {_rule(path, _layout_by(rules, None))}"
    )


def ran_on_auto_axes(path: str, rule: Rule) -> str:
    """A note for other errors in such a module."""
    return (
        f"In {path or 'the model'}, which runs as on Auto axes because the rule "
        f"{rule.pattern!r} lays out its output: there, no layout can be given for "
        "Explicit axes (out_sharding=, reshard), and a value that the module closes "
        "over must be an argument or in a Variable; without the rule it runs on "
        "Explicit axes"
    )


def outside_of_modules(name: str, error: Exception) -> str:
    """The same outside of the calls of modules."""
    text = f"{name}, outside of the calls of its modules"
    cannot = "on Explicit axes JAX cannot choose the layout of a result"
    lay_out = (
        "lay out an operand, x = flm.distribute_tensor(x, layout), or by a rule for "
        "the output of a module"
    )
    frame = _called_of_optax(error)
    given = {} if frame is None else _arguments(frame)
    operands = [pair for name in given for pair in _arrays({name: given[name]})]
    if frame is None or not operands:
        return (
            f"{text}: {cannot}: {error}\n{lay_out}; or compute this part as on Auto "
            "axes, jax.sharding.auto_axes(f, out_sharding=jax.P(…))(x)"
        )
    first = jax.typeof(operands[0][1]).sharding.spec[:1]
    result = ", ".join(repr(entry) for entry in first if entry)
    names = ", ".join(name for name, _ in operands)
    called = f"optax.{frame.f_code.co_name}"
    return (
        f"{text}, in {called}: {cannot} from those of its operands:\n"
        f"{bullet_list(_shown(operands))}\n{error}\n{lay_out}; or compute it as on "
        "Auto axes (out_sharding is the layout of the result, jax.P() for a scalar): "
        f"jax.sharding.auto_axes({called}, out_sharding=jax.P({result}))({names})"
    )


def _called_of_optax(error: Exception) -> types.FrameType | None:
    """The call of a function of optax in which only JAX was called, or None."""
    found = None
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        library = frame.f_globals.get("__name__", "").partition(".")[0]
        if library == "optax":
            public = getattr(optax, frame.f_code.co_name, None)
            is_public = getattr(public, "__code__", None) is frame.f_code
            found = frame if is_public else found
        elif library not in ("jax", "contextlib", "functools"):
            break
    return found


def _arguments(frame: types.FrameType) -> dict[str, Any]:
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount]
    return {name: frame.f_locals[name] for name in names if name in frame.f_locals}


def _shown(operands: Sequence[tuple[str, Any]]) -> list[str]:
    """Each operand with its shape and layout."""
    return [
        f"{name} {show_shape(x.shape)}: {show_spec(jax.typeof(x).sharding.spec)}"
        for name, x in operands
    ]


def _arrays(parts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The arrays on a mesh in some trees, with their names."""
    found: list[tuple[str, Any]] = []
    for keys, leaf in jax.tree.leaves_with_path(dict(parts), is_leaf=is_object):
        x = unboxed(leaf)
        if isinstance(x, jax.Array) and jax.typeof(x).sharding.mesh.axis_names:
            found.append((join_keys(keys), x))
    return found


def _held(module: Any) -> dict[str, Any]:
    """What an NNX or a Linen module holds, by name."""
    if is_object(module):
        return vars(module)
    return {name: x for part in module.variables.values() for name, x in part.items()}


def _layout_by(rules: RuleSet, parameter: Any) -> TensorLayout:
    """A layout of an output: batch first, and last as the last dim of a parameter."""
    mesh = rules.mesh
    batch = tuple(a for a in rules.batch if mesh is None or a in mesh.axis_names)
    last: tuple[str, ...] = ()
    if parameter is not None and parameter.ndim > 1:
        *_, entry = jax.typeof(parameter).sharding.spec
        last = tuple(axis for axis in dim_axes(entry) if axis not in batch)
    return TensorLayout((batch, ..., last) if last else (batch, ...))


def _rule(path: str, layout: TensorLayout) -> str:
    """The code that adds a rule for the output of a module, and of those like it."""
    *outer, last = re.escape(path).split("/")
    outer = [re.sub(r"\d+", ".*", name) for name in outer]
    pattern = "/".join([*outer, ".*" if last.isdigit() else last]) or "^$"
    return f'layout_map.activations["{pattern}"] = {layout}'
