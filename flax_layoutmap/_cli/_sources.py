"""Rules, meshes, models and Resolutions from command-line arguments."""

import inspect
import pkgutil
import re
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import flax_layoutmap as flm
from flax_layoutmap._core.errors import did_you_mean


class UsageError(Exception):
    """Invalid arguments; the text says how to fix them."""


def resolution_of(args: Namespace) -> "flm.Resolution":
    """The Resolution of the model, or of the checkpoint, under the rules."""
    model = model_of(args)
    mesh = None if args.mesh is None else flm.DeviceMesh.abstract(args.mesh)
    rules = rules_of(args, mesh)
    if args.checkpoint is not None:
        return flm.checkpoint.resolve(model, layout_map=rules, mesh=mesh)
    if rules is None:
        raise UsageError(
            "--model needs rules: --rules FILE.toml, FILE.json or MODULE:LAYOUT_MAP"
        )
    if rules.device_mesh is None:
        raise UsageError("the rules have no mesh; give one: --mesh data=2,model=4")
    return rules.resolve(model)


def model_of(args: Namespace) -> Any:
    """The function that makes the model, or the path of its checkpoint."""
    if (args.model is None) == (args.checkpoint is None):
        raise UsageError("give one of --model MODULE:FACTORY and --checkpoint PATH")
    if args.arg and not args.model:
        raise UsageError("--arg is for --model")
    return args.checkpoint or factory(args.model, args.arg, "--model")


def after(args: Namespace) -> Namespace:
    """The arguments of the second model: with `_after` if given, else the same."""
    given = {
        name.removesuffix("_after"): value
        for name, value in vars(args).items()
        if name.endswith("_after") and value is not None
    }
    if "checkpoint" in given:
        given |= {"model": given.get("model"), "arg": []}
    elif "model" in given:
        given |= {"checkpoint": None}
    return Namespace(**{**vars(args), **given})


def step_of(args: Namespace) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A step, its abstract arguments, and the options of where it runs."""
    from flax import nnx

    if args.args is None:
        raise UsageError("the step needs its arguments: --args MODULE:FACTORY")
    step = named(args.function, "MODULE:FUNCTION")
    arguments = nnx.eval_shape(factory(args.args, args.arg, "--args"))
    if not isinstance(arguments, tuple | list):
        arguments = (arguments,)
    names = ("mesh", "topology", "slices", "engine")
    given = {n: value for n in names if (value := getattr(args, n)) is not None}
    return step, tuple(arguments), {"layout_map": rules_of(args), **given}


def rules_of(
    args: Namespace, mesh: "flm.DeviceMesh | None" = None
) -> "flm.LayoutMap | None":
    """The rules from a file or a module, on a mesh; None without --rules."""
    if args.rules is not None and args.rules.endswith((".toml", ".json")):
        return flm.LayoutMap.from_file(args.rules, mesh=mesh)
    if args.rules is None:
        return None
    rules = named(args.rules, "--rules")
    if not isinstance(rules, flm.LayoutMap) and callable(rules):
        rules = rules()
    if not isinstance(rules, flm.LayoutMap):
        raise UsageError(
            f"--rules {args.rules}: is a {type(rules).__name__}, not a LayoutMap or a "
            "function that makes one; flm.LayoutMap.from_rules makes one from pairs"
        )
    return rules if mesh is None else rules.on(mesh)


def factory(
    text: str, arguments: list[tuple[str, Any]], flag: str
) -> Callable[[], Any]:
    """Bind arguments to the function or class `module:name`.

    If it has a parameter `rngs`, it gets `nnx.Rngs(0)`.
    """
    value = named(text, flag)
    if not callable(value):
        kind = type(value).__name__
        raise UsageError(f"{flag} {text}: is of type {kind}; it must be a function")

    def make() -> Any:
        from flax import nnx

        given = dict(arguments)
        # The signature of an NNX class is generic.
        function = value.__init__ if isinstance(value, type) else value
        if "rngs" in inspect.signature(function).parameters:
            given.setdefault("rngs", nnx.Rngs(0))
        return value(**given)

    return make


def named(text: str, flag: str) -> Any:
    """The object that `module:name` (or `module:a.b`) names."""
    module, _, name = text.partition(":")
    dotted = re.sub(r"[/\\]+", ".", module.removesuffix(".py")).strip(".")
    if dotted != module or not re.fullmatch(r"[\w.]+:[\w.]+", text):
        example = f"{dotted or 'my_package.models'}:{name or 'NAME'}"
        file = ", or a file (.toml, .json)" if flag == "--rules" else ""
        raise UsageError(f"{flag} {text}: write MODULE:NAME, such as {example}{file}")
    try:
        return pkgutil.resolve_name(text)
    except (ImportError, AttributeError) as error:
        near = ""
        if isinstance(error, AttributeError) and error.name is not None:
            near = did_you_mean(error.name, dir(error.obj))
        kind = type(error).__name__
        raise UsageError(f"{flag} {text}: {kind}: {error}{near}") from error
