"""Rules, meshes, models and Resolutions from command-line arguments."""

import contextlib
import functools
import importlib
import inspect
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax_layoutmap as flm
from flax_layoutmap._core.errors import did_you_mean


class UsageError(Exception):
    """Invalid arguments; the text says how to fix them."""


def resolution_of(args: Namespace) -> flm.Resolution:
    """The Resolution of the model, or of the checkpoint, under the rules."""
    check_model(args)
    mesh = mesh_of(args.mesh)
    rules = args.rules and rules_of(args.rules, args.variant, mesh)
    if args.checkpoint is not None:
        return flm.checkpoint.resolve(
            args.checkpoint, layout_map=rules, mesh=mesh, step=args.step, item=args.item
        )
    if rules is None:
        raise UsageError(
            "--model needs rules: --rules FILE.toml, FILE.json or MODULE:LAYOUT_MAP"
        )
    if rules.device_mesh is None:
        raise UsageError("the rules have no mesh; give one: --mesh data=2,model=4")
    make = factory(args.model, args.arg, "--model")
    if args.optimizer is None:
        return rules.resolve(make)
    tx = factory(args.optimizer, args.optimizer_arg, "--optimizer")()
    return rules.resolve(functools.partial(_with_state, make, tx), tx=tx)


def check_model(args: Namespace) -> None:
    """Raise UsageError unless there is one model, and all options are about it."""
    if (args.model is None) == (args.checkpoint is None):
        raise UsageError("give one of --model MODULE:FACTORY and --checkpoint PATH")
    if args.model is None and (args.arg or getattr(args, "optimizer", None)):
        raise UsageError("--arg and --optimizer are for --model")
    if args.checkpoint is None and (args.step or args.item):
        raise UsageError("--step and --item are for --checkpoint")


def after(args: Namespace) -> Namespace:
    """The arguments of the second model: those with `_after`, else the same."""
    given = {
        name.removesuffix("_after"): value
        for name, value in vars(args).items()
        if name.endswith("_after") and value
    }
    other: dict[str, Any] = {}
    if "model" in given:
        other = {"checkpoint": None, "step": None, "item": None}
    elif "checkpoint" in given:
        other = {"model": None, "arg": [], "optimizer": None}
    return Namespace(**{**vars(args), **other, **given})


def step_of(args: Namespace) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A step, its abstract arguments, and where it is to run."""
    from flax import nnx

    if args.args is None:
        raise UsageError("the step needs its arguments: --args MODULE:FACTORY")
    step = named(args.function, "MODULE:FUNCTION")
    arguments = nnx.eval_shape(factory(args.args, args.arg, "--args"))
    if not isinstance(arguments, tuple | list):
        arguments = (arguments,)
    options: dict[str, Any] = {
        "mesh": args.mesh,
        "layout_map": args.rules and rules_of(args.rules, args.variant),
        "topology": args.topology,
        "slices": args.slices,
        "donate_argnames": args.donate,
    }
    if args.engine is not None:
        options["engine"] = args.engine
    return step, tuple(arguments), options


def rules_of(
    text: str, variant: str | None = None, mesh: flm.DeviceMesh | None = None
) -> flm.LayoutMap:
    """The rules of a file, an object or a checkpoint, on a mesh."""
    if text.endswith((".toml", ".json")):
        return flm.LayoutMap.from_file(text, mesh=mesh, variant=variant)
    if variant is not None:
        raise UsageError(f"--variant is for rules in a file, which {text!r} is not")
    if os.path.isdir(text):
        data = flm.checkpoint.inspect(text).rules
        if data is None:
            raise UsageError(f"the checkpoint {text} was saved without rules")
        return flm.LayoutMap.from_json(dict(data), mesh=mesh)
    rules = _rules_in(text)
    return rules if mesh is None else rules.on(mesh)


def _rules_in(text: str) -> flm.LayoutMap:
    """The rules in a module."""
    value = named(text, "--rules")
    if callable(value) and not isinstance(value, flm.LayoutMap):
        with _users_code(f"--rules {text}"):
            value = value()
    if isinstance(value, flm.RuleSet):
        return flm.LayoutMap.from_rule_set(value)
    if isinstance(value, list | tuple | dict):
        return flm.LayoutMap.from_rules(value)
    if not isinstance(value, flm.LayoutMap):
        raise UsageError(
            f"--rules {text}: is a {type(value).__name__}; it must be a LayoutMap, a "
            "RuleSet, (pattern, layout) pairs, or a function that makes one"
        )
    return value


def mesh_of(text: str | None) -> flm.DeviceMesh | None:
    """A mesh without devices."""
    return None if text is None else flm.DeviceMesh.abstract(text)


# ------------------------------------------------------------- the user's modules


def factory(
    text: str, arguments: list[tuple[str, Any]], flag: str
) -> Callable[[], Any]:
    """A function without arguments, of `module:name` and its arguments.

    A class or function that needs `rngs` gets `nnx.Rngs(0)`.
    """
    value = named(text, flag)
    if not callable(value):
        if arguments:
            kind = type(value).__name__
            raise UsageError(
                f"--arg is for a function, but {flag} {text} is of type {kind}"
            )
        return lambda: value
    given = dict(arguments)
    try:
        # The signature of an NNX class itself is generic.
        function = value.__init__ if isinstance(value, type) else value
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables have none
        parameters = {}

    def make() -> Any:
        from flax import nnx

        if "rngs" in parameters:
            given.setdefault("rngs", nnx.Rngs(0))
        with _users_code(f"{flag} {text}"):
            return value(**given)

    return make


def named(text: str, flag: str) -> Any:
    """The object that `module:name` (or `module:a.b`) names."""
    module, _, name = text.partition(":")
    if module.endswith(".py"):
        dotted = os.path.normpath(module).removesuffix(".py").replace(os.sep, ".")
        raise UsageError(
            f"{flag} {text}: write the module, not its file: {dotted}:{name or 'NAME'}"
        )
    if not (module and name):
        file = ", or a file (.toml, .json)" if flag == "--rules" else ""
        raise UsageError(
            f"{flag} {text}: write MODULE:NAME, such as my_package.models:make{file}"
        )
    with _users_code(f"{flag} {text}: cannot import {module!r}"):
        value = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(value, part):
            near = did_you_mean(part, [n for n in dir(value) if n[0] != "_"])
            raise UsageError(f"{flag} {text}: there is no {part!r} in it{near}")
        value = getattr(value, part)
    return value


@contextlib.contextmanager
def _users_code(what: str) -> Iterator[None]:
    """Code that may do anything, and may end the program."""
    try:
        yield
    except flm.LayoutError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{what}: {type(error).__name__}: {error} (--traceback shows where)"
        ) from error


def _with_state(make: Callable[[], Any], tx: Any) -> dict[str, Any]:
    """The model and the state of its optimizer."""
    import jax
    from flax import nnx

    model = make()
    if isinstance(model, nnx.Module):
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        return {"model": model, "optimizer": optimizer}
    is_variables = isinstance(model, Mapping) and "params" in model
    params = model["params"] if is_variables else model
    return {"model": model, "optimizer": jax.eval_shape(tx.init, params)}
