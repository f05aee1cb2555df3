"""Rules, meshes, models and Resolutions from command-line arguments."""

import ast
import functools
import importlib
import inspect
import os
import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax_layoutmap as flm
from flax_layoutmap._core.errors import did_you_mean
from flax_layoutmap._rules.records import ResolvedLeaf

_FILES = (".toml", ".json")
# CPU devices that stand in for those of a mesh, at most.
MOST_DEVICES = 1024
_NEEDS = re.compile(r"^the mesh \S+ needs (\d+) devices, but there are \d+")


class UsageError(Exception):
    """Invalid arguments; the text says how to fix them."""


def resolution_of(args: Namespace, after: str = "") -> flm.Resolution:
    """The Resolution of the model under the rules.

    `after` is `"_after"` for the second of two, with the arguments of the first where
    it has none.
    """
    check_used(args)
    model = _given(args, "model", after)
    checkpoint = _given(args, "checkpoint", after)
    if after and (args.model_after or args.checkpoint_after):  # one of them, not both
        model, checkpoint = args.model_after, args.checkpoint_after
    mesh = mesh_of(_given(args, "mesh", after))
    variant = _given(args, "variant", after)
    rules = rules_of(_given(args, "rules", after), variant, mesh)
    if checkpoint is not None:
        return flm.checkpoint.resolve(
            checkpoint, layout_map=rules, mesh=mesh, step=args.step, item=args.item
        )
    if rules is None:
        raise UsageError(
            "--model needs rules: --rules FILE.toml, FILE.json or MODULE:LAYOUT_MAP"
        )
    if rules.device_mesh is None:
        raise UsageError("the rules have no mesh; give one: --mesh data=2,model=4")
    make = factory(model, _given(args, "arg", after), "--model")
    if args.optimizer is None:
        return rules.resolve(make)
    tx = factory(args.optimizer, args.optimizer_arg, "--optimizer")()
    return _with_optimizer(rules, make, tx)


def leaf_of(resolution: flm.Resolution, path: str) -> ResolvedLeaf:
    """The leaf at a path; the error lists the closest ones."""
    try:
        return resolution[path]
    except KeyError as error:
        raise UsageError(error.args[0]) from None


def step_of(args: Namespace) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A step, its abstract arguments, and where it is to run."""
    from flax import nnx

    step = named(args.step, "STEP")
    arguments = nnx.eval_shape(factory(args.args, args.arg, "--args"))
    if not isinstance(arguments, tuple | list):
        arguments = (arguments,)
    options: dict[str, Any] = {
        "mesh": args.mesh,
        "layout_map": rules_of(args.rules, args.variant),
        "topology": args.topology,
        "slices": args.slices,
    }
    if args.donate:
        options["donate_argnames"] = args.donate
    return step, tuple(arguments), options


def rules_of(
    text: str | None, variant: str | None = None, mesh: flm.DeviceMesh | None = None
) -> flm.LayoutMap | None:
    """The rules of a file, an object or a checkpoint, on a mesh."""
    if text is None:
        return None
    if text.endswith(_FILES):
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
    found = named(text, "--rules")
    if callable(found) and not isinstance(found, flm.LayoutMap):
        found = _called(found, "--rules")
    if isinstance(found, flm.LayoutMap):
        return found
    if isinstance(found, flm.RuleSet):
        return flm.LayoutMap.from_rule_set(found)
    if isinstance(found, Mapping | list | tuple):
        return flm.LayoutMap.from_rules(found)
    raise UsageError(
        f"--rules {text}: is a {type(found).__name__}; it must be a LayoutMap, a "
        "RuleSet, (pattern, layout) pairs, or a function that makes one"
    )


def axes_of(texts: Sequence[str]) -> dict[str, str]:
    """The mesh's own names of axes, of `tensor=model`."""
    pairs = [text.partition("=") for text in texts]
    for (axis, _, own), text in zip(pairs, texts, strict=True):
        if not (axis and own):
            raise UsageError(f"--axis {text}: write NAME=OWN, such as tensor=model")
    return {axis: own for axis, _, own in pairs}


def converted(args: Namespace) -> flm.LayoutMap:
    """The rules that the command `convert` writes."""
    mesh, axes = mesh_of(args.mesh), axes_of(args.axis)
    if args.dialect is None:
        if axes:
            raise UsageError("--axis is for rules of another library: --from DIALECT")
        rules = rules_of(args.source, args.variant, mesh)
        assert rules is not None
        return rules
    if args.variant is not None:
        raise UsageError("--variant is for rules in a file of this library")
    if args.dialect == "shardings":
        if axes:
            raise UsageError("--axis is not for shardings, whose axes are their mesh's")
        return flm.convert.from_shardings(args.source, mesh)
    found = named(args.source, "RULES")
    if args.dialect == "keras":
        return flm.convert.from_keras(found, mesh, axes=axes)
    if args.dialect == "partition-rules":
        return flm.convert.from_partition_rules(found, mesh, axes=axes)
    if axes.keys() - {"tensor", "expert"}:
        raise UsageError("--axis: a tp-plan has the axes tensor and expert")
    return flm.convert.from_tp_plan(
        found,
        mesh,
        axis=axes.get("tensor", "tensor"),
        expert_axis=axes.get("expert", "expert"),
    )


def mesh_of(text: str | None) -> flm.DeviceMesh | None:
    """A mesh without devices."""
    return None if text is None else flm.DeviceMesh.abstract(text)


def factory(text: str, arguments: Sequence[str], flag: str) -> Callable[[], Any]:
    """A function without arguments, of `module:name` and `k=v` arguments.

    A class or function that needs `rngs` gets `nnx.Rngs(0)`.
    """
    found = named(text, flag)
    if not callable(found):
        if arguments:
            raise UsageError(f"{flag} {text}: is no function, so it has no arguments")
        return lambda: found
    given = dict(_argument(text) for text in arguments)
    try:
        # The signature of an NNX class itself is generic.
        made_by = found.__init__ if isinstance(found, type) else found
        wanted = inspect.signature(made_by).parameters
    except (TypeError, ValueError):  # some callables have none
        wanted = {}
    if "rngs" in wanted and "rngs" not in given:
        from flax import nnx

        return lambda: _called(found, flag, **given, rngs=nnx.Rngs(0))
    return functools.partial(_called, found, flag, **given)


def named(text: str, flag: str) -> Any:
    """The object that `module:name` (or `module:a.b`) names."""
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        file = ", or a file (.toml, .json)" if flag == "--rules" else ""
        raise UsageError(
            f"{flag} {text}: write MODULE:NAME, such as my_package.models:make{file}"
        )
    found = _imported(module_name, f"{flag} {text}")
    for part in name.split("."):
        if not hasattr(found, part):
            near = did_you_mean(part, [n for n in dir(found) if n[0] != "_"])
            raise UsageError(f"{flag} {text}: there is no {part!r} in it{near}")
        found = getattr(found, part)
    return found


# ----------------------------------------------------------------------- details


def _imported(name: str, what: str) -> Any:
    """Import a module; one that makes a mesh gets as many CPU devices."""
    try:
        return importlib.import_module(name)
    except flm.errors.MeshError as error:
        needs = _NEEDS.search(str(error))
        if needs is None or int(needs[1]) > MOST_DEVICES:
            raise
    # Broad: it is the user's code, which may do anything, and may end the program.
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{what}: cannot import {name!r}: {type(error).__name__}: {error}"
        ) from error
    cpu_devices(int(needs[1]))
    return _imported(name, what)


def cpu_devices(count: int) -> Sequence[Any]:
    """Restart JAX with as many CPU devices."""
    import jax
    from jax.extend.backend import clear_backends

    clear_backends()  # reading metadata may have started one
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    return jax.devices()


def check_used(args: Namespace) -> None:
    """Raise UsageError for arguments that would be ignored."""
    if args.model is None and getattr(args, "model_after", None) is None:
        for name in ("arg", "optimizer"):
            if getattr(args, name, None):
                raise UsageError(f"--{name} is for --model; a checkpoint needs none")
    if args.checkpoint is None and getattr(args, "checkpoint_after", None) is None:
        for name in ("step", "item"):
            if getattr(args, name):
                raise UsageError(f"--{name} is for --checkpoint")
    if getattr(args, "optimizer_arg", None) and args.optimizer is None:
        raise UsageError("--optimizer-arg needs --optimizer, such as optax:adamw")


def _given(args: Namespace, name: str, after: str) -> Any:
    """An argument of one of two; the second defaults to the first."""
    return getattr(args, name + after, None) or getattr(args, name)


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise UsageError(f"--arg {text}: write NAME=VALUE, such as layers=4")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value  # a string


def _called(function: Callable[..., Any], flag: str, **arguments: Any) -> Any:
    try:
        return function(**arguments)
    except flm.LayoutError:
        raise
    # Broad: it is the user's code, which may do anything, and may end the program.
    except (Exception, SystemExit) as error:
        given = ", ".join(
            f"{name}={value!r}"
            for name, value in arguments.items()
            if name != "rngs"  # which is added here
        )
        name = getattr(function, "__qualname__", repr(function))
        raise UsageError(
            f"{flag}: {name}({given}) raised {type(error).__name__}: {error} "
            "(--traceback shows where)"
        ) from error


def _with_optimizer(
    rules: flm.LayoutMap, make: Callable[[], Any], tx: Any
) -> flm.Resolution:
    """The model and the state of its optimizer."""
    import jax
    from flax import nnx

    def both() -> dict[str, Any]:
        model = make()
        if isinstance(model, nnx.Module):
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
            return {"model": model, "optimizer": optimizer}
        params = model
        if isinstance(model, Mapping) and "params" in model:
            params = model["params"]
        return {"model": model, "optimizer": jax.eval_shape(tx.init, params)}

    return rules.resolve(both, tx=tx)
