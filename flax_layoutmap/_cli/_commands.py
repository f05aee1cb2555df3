"""The commands: each prints, and returns whether its check failed.

`--help` shows their docstrings. Modules that load JAX are imported in the functions.
"""

import dataclasses
import json
import re
import shlex
import sys
from argparse import Namespace
from typing import Any

import flax_layoutmap as flm
from flax_layoutmap._cli import _sources
from flax_layoutmap._cli._sources import UsageError
from flax_layoutmap._core.errors import visible


def report(args: Namespace) -> None:
    """Shows every leaf with its layout, the rule that chose it, and the totals."""
    _show(_sources.resolution_of(args), args)


def lint(args: Namespace) -> bool:
    """Finds mistakes in rules, and layouts that cost memory or time."""
    most = args.max_replicated
    try:
        resolution = _sources.resolution_of(args)
    except flm.errors.ResolveError as error:
        if error.resolution is None:
            raise
        # The replicated share of only the leaves that fit would mislead.
        resolution, most = error.resolution, None
    issues = flm.lint(resolution, max_replicated=most, ignore=args.ignore)
    if args.json:
        values = [dataclasses.asdict(issue) for issue in issues]
        print(json.dumps({"schema": 1, "issues": values}, indent=1))
    else:
        print(issues)
    return bool(issues.problems("warning" if args.strict else "error"))


def explain(args: Namespace) -> None:
    """Explains why a leaf got its layout."""
    from flax_layoutmap._show.table import fold

    resolution = _sources.resolution_of(args)
    paths = _paths(resolution, args.path)
    # Leaves whose paths differ only in numbers are explained once.
    texts = [resolution.explain(path).replace(visible(path), "\0") for path in paths]
    for row in fold(paths, texts):
        print(texts[row.members[0]].replace("\0", visible(row.cell)))


def _paths(resolution: "flm.Resolution", text: str) -> list[str]:
    """The paths for a path, the end of a path, or a pattern."""
    try:
        return [resolution[text].path]
    except KeyError as error:
        unknown = error.args[0]  # its message lists similar paths
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise UsageError(f"{text!r} is not a path or a pattern: {error}") from error
    paths = [path for path in resolution.paths if path.endswith(f"/{text}")]
    paths = paths or [path for path in resolution.paths if pattern.search(path)]
    if not paths:
        raise UsageError(
            f"{text!r} is not a path, the end of a path or a pattern that matches: "
            f"{unknown}"
        )
    return paths


def diff(args: Namespace) -> bool:
    """Shows what changes, and what it costs, with other rules, meshes or models."""
    after = _sources.resolution_of(_sources.after(args))
    difference = _sources.resolution_of(args).diff(after)
    _show(difference, args)
    return not difference.is_empty


def plan(args: Namespace) -> bool:
    """Shows the collectives and memory of a step, on devices that you do not have."""
    step, arguments, options = _sources.step_of(args)
    planned = flm.pod.plan(step, *arguments, **options)
    _show(planned, args)
    return planned.fits is False


def suggest(args: Namespace) -> bool:
    """Suggests rules for a step on a mesh or a topology."""
    from flax_layoutmap._rules.files import suffix_of

    if args.output is not None:
        suffix_of(args.output)  # before the search
    step, arguments, options = _sources.step_of(args)
    if args.hbm is not None:
        options["hbm"] = int(args.hbm * 2**30)
    suggestion = flm.suggest(step, *arguments, **options)
    _show(suggestion, args)
    if args.output is not None:
        suggestion.layout_map.to_file(args.output)
        print(f"wrote {args.output}", file=sys.stderr)
    return suggestion.fits is False


def inspect(args: Namespace) -> None:
    """Describes a checkpoint of Orbax, of this library, or of safetensors."""
    print(flm.checkpoint.inspect(args.checkpoint))


def verify(args: Namespace) -> bool:
    """Reads all of a checkpoint and compares it with its checksums."""
    info = flm.checkpoint.inspect(args.checkpoint)
    if "flax_layoutmap" not in info.kind:
        raise UsageError(f"{info.path} has no checksums: it is of kind {info.kind}")
    try:
        count = flm.checkpoint.verify(info.path)
        print(visible(f"{info.path}: {count} leaves are as saved"))
    except flm.errors.CheckpointError as error:
        print(error, file=sys.stderr)
        return True
    return False


def preset(args: Namespace) -> None:
    """Prints the rules of a model family for a mesh; or which family a model is of."""
    from flax_layoutmap._rules.files import to_toml

    mesh = None if args.mesh is None else flm.DeviceMesh.abstract(args.mesh)
    options: Any = {"variant": args.variant, "axes": dict(args.axis)}
    if args.family is not None:
        if args.model or args.checkpoint or args.arg:
            raise UsageError("give a family, or --model or --checkpoint to detect it")
        if mesh is None:
            raise UsageError("a preset needs a mesh: --mesh fsdp=16,tensor=8")
        rules = flm.presets.load(args.family, mesh, **options)
    else:
        model = _sources.model_of(args)
        if mesh is None:  # the last line is the command to type next
            family = flm.presets.family_of(model)
            print(f"{family}: its rules fit every matrix")
            words = ["flax-layoutmap", *args.words, "--mesh", "fsdp=8"]
            print(f"{shlex.join(words)} > rules.toml")
            return
        rules = flm.presets.detect(model, mesh, **options)
    print(to_toml(rules.freeze()), end="")


def _show(thing: Any, args: Namespace) -> None:
    if args.json:
        print(json.dumps(thing.to_json(), indent=1))
    else:
        thing.show()
