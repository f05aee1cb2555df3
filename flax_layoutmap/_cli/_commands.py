"""The commands: one function for each, by its name, which returns the exit code."""

import dataclasses
import json
import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

import flax_layoutmap as flm
from flax_layoutmap._cli import _sources
from flax_layoutmap._cli._sources import UsageError
from flax_layoutmap._core.errors import visible
from flax_layoutmap._rules.rules_file import suffix_of
from flax_layoutmap._rules.rules_toml import to_toml
from flax_layoutmap._tree.paths import fold

_DONE, _FAILED_CHECK = 0, 1


def report(args: Namespace) -> int:
    resolution = _sources.resolution_of(args)
    if args.markdown:
        print(resolution.report("markdown", fold=not args.no_fold))
    else:
        _show(resolution, args, fold=not args.no_fold)
    return _DONE


def lint(args: Namespace) -> int:
    try:
        resolution = _sources.resolution_of(args)
    except flm.errors.ResolveError as error:
        if error.resolution is None:
            raise
        resolution = error.resolution
        args.max_replicated = None  # the share of the leaves that fit says little
    issues = flm.lint(
        resolution, max_replicated=args.max_replicated, ignore=args.ignore
    )
    if args.json:
        share = resolution.replicated_share
        _print_json({"issues": list(issues), "replicated_share": share})
    else:
        print(issues)
    is_bad = issues.problems("warning" if args.strict else "error")
    return _FAILED_CHECK if is_bad else _DONE


def explain(args: Namespace) -> int:
    resolution = _sources.resolution_of(args)
    paths = _paths(resolution, args.path)
    texts = [resolution.explain(path) for path in paths]
    if args.json:
        leaves = [{"path": p, "text": t} for p, t in zip(paths, texts, strict=True)]
        _print_json({"leaves": leaves})
        return _DONE
    # Leaves that differ in the numbers of their paths alone are explained once.
    alike = [t.replace(visible(p), "\0") for p, t in zip(paths, texts, strict=True)]
    for row in fold(paths, alike):
        count = len(row.members)
        name = visible(row.text) + (f" ×{count}" if count > 1 else "")
        print(alike[row.members[0]].replace("\0", name))
    return _DONE


def _paths(resolution: flm.Resolution, text: str) -> list[str]:
    """The paths that a path, the end of one, or a pattern stands for."""
    if text in resolution:
        return [resolution[text].path]
    paths = [leaf.path for leaf in resolution if leaf.path.endswith(f"/{text}")]
    if not paths:
        try:
            paths = [leaf.path for leaf in resolution if re.search(text, leaf.path)]
        except re.error as error:
            raise UsageError(f"{text!r} is not a path or a pattern: {error}") from error
    if not paths:
        try:
            resolution[text]
        except KeyError as error:  # it lists the closest
            raise UsageError(error.args[0]) from None
    return paths


def diff(args: Namespace) -> int:
    before = _sources.resolution_of(args)
    difference = before.diff(_sources.resolution_of(_sources.after(args)))
    _show(difference, args)
    return _DONE if difference.is_empty else _FAILED_CHECK


def plan(args: Namespace) -> int:
    step, arguments, options = _sources.step_of(args)
    return _fits(flm.pod.plan(step, *arguments, **options), args)


def suggest(args: Namespace) -> int:
    if args.output is not None:
        suffix_of(args.output)  # before the search
    step, arguments, options = _sources.step_of(args)
    if args.hbm is not None:
        options["hbm"] = int(args.hbm * 2**30)
    suggestion = flm.suggest(step, *arguments, **options)
    code = _fits(suggestion, args)
    if args.output is not None:
        suggestion.layout_map.to_file(args.output)
        print(f"wrote {args.output}", file=sys.stderr)
    return code


def _fits(report: Any, args: Namespace) -> int:
    _show(report, args)
    return _FAILED_CHECK if report.fits is False else _DONE


def inspect(args: Namespace) -> int:
    info = flm.checkpoint.inspect(args.checkpoint, step=args.step, item=args.item)
    if args.json:
        _print_json({**_plain(info), "total_bytes": info.total_bytes})
    else:
        print(info)
    return _DONE


def verify(args: Namespace) -> int:
    info = flm.checkpoint.inspect(args.checkpoint, step=args.step, item=args.item)
    if "flax_layoutmap" not in info.kind:
        raise UsageError(
            f"{info.path} has no checksums to compare with: it is of the kind "
            f"{info.kind}, not saved by flax_layoutmap"
        )
    try:
        result = flm.checkpoint.verify(info.path, item=args.item)
    except flm.errors.CheckpointError as error:
        if args.json:
            problems = error.problems or [str(error)]
            _print_json({"path": info.path, "problems": problems})
        print(error, file=sys.stderr)
        return _FAILED_CHECK
    if args.json:
        _print_json({"path": info.path, "problems": [], **_plain(result)})
    else:
        print(result)
    return _DONE


def preset(args: Namespace) -> int:
    mesh, axes = _sources.mesh_of(args.mesh), dict(args.axis)
    if args.family is not None and mesh is None:
        raise UsageError("a preset needs a mesh: --mesh fsdp=16,tensor=8")
    if args.family not in (None, "fsdp"):
        rules = flm.presets.load(args.family, mesh, variant=args.variant, axes=axes)
        return _print_rules(rules)
    if args.model is None and args.checkpoint is None:
        known = ", ".join(flm.presets.names())
        raise UsageError(f"name a family ({known}), --model or --checkpoint")
    _sources.check_model(args)
    place: dict[str, Any] = {"step": args.step, "item": args.item}
    model: Any = args.checkpoint
    if args.model is not None:
        model = _sources.factory(args.model, args.arg, "--model")
    elif args.family == "fsdp":
        raise UsageError("preset fsdp is for a model: --model MODULE:FACTORY")
    if mesh is None:
        return _print_family(args, model, place)
    if args.family == "fsdp":
        return _print_rules(flm.presets.fsdp(model, mesh, axis=axes.get("fsdp")))
    rules = flm.presets.detect(model, mesh, variant=args.variant, axes=axes, **place)
    return _print_rules(rules)


def _print_rules(rules: flm.LayoutMap) -> int:
    print(to_toml(rules.freeze()), end="")
    return _DONE


def _print_family(args: Namespace, model: Any, place: dict[str, Any]) -> int:
    """Print the family of a model, and the command that writes its rules."""
    words, code = args.words[1:], _DONE
    try:
        print(f"{flm.presets.family_of(model, **place)}: its rules fit every matrix")
    except flm.errors.RuleError as error:
        print(visible(str(error), "\n"))
        source = words if args.model else ["--model", "MODULE:FACTORY"]
        words, code = ["fsdp", *source], _FAILED_CHECK
    command = shlex.join(["flax-layoutmap", "preset", *words, "--mesh", "fsdp=8"])
    print(f"{command} > rules.toml")
    return code


def convert(args: Namespace) -> int:
    if os.path.exists(args.output) and not args.overwrite:
        raise UsageError(f"{args.output} exists; replace it with --overwrite")
    mesh = _sources.mesh_of(args.mesh)
    rules = _sources.rules_of(args.source, args.variant, mesh)
    rules.to_file(args.output)
    print(f"wrote {args.output}: {len(rules)} rules")
    return _DONE


# ------------------------------------------------------------------------- output


def _show(thing: Any, args: Namespace, **options: Any) -> None:
    """Print a report: in colours on a terminal, else as plain text."""
    if args.json:
        _print_json(thing.to_json())
    else:
        thing.show(**options)


def _print_json(values: Mapping[str, Any]) -> None:
    print(json.dumps({"schema": 1, **values}, indent=1, default=_plain))


def _plain(value: Any) -> Any:
    """A value of ours as values of JSON."""
    if isinstance(value, flm.DeviceMesh):
        return dict(value.axis_sizes)
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): each for key, each in value.items()}
    return list(value) if isinstance(value, PartitionSpec) else str(value)
