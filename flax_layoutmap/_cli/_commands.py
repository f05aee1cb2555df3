"""The commands: one function for each, by its name, which returns the exit code."""

import dataclasses
import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

import flax_layoutmap as flm
from flax_layoutmap._cli import _sources
from flax_layoutmap._cli._sources import UsageError
from flax_layoutmap._rules.rules_file import suffix_of
from flax_layoutmap._rules.rules_toml import to_toml
from flax_layoutmap._show.table import human_bytes

_DONE, _FOUND = 0, 1


def report(args: Namespace) -> int:
    resolution = _sources.resolution_of(args)
    _show(resolution, args, fold=not args.no_fold)
    return _DONE


def lint(args: Namespace) -> int:
    has_model = args.model is not None or args.checkpoint is not None
    if args.max_replicated is not None and not has_model:
        raise UsageError("--max-replicated needs --model or --checkpoint")
    found: Any
    share, most = 0.0, args.max_replicated
    if has_model:
        try:
            found = _sources.resolution_of(args)
            share = found.replicated_share
        except flm.errors.ResolveError as error:
            if error.resolution is None:
                raise
            # The share of the leaves that fit would say little.
            found, share, most = error.resolution, None, None
    else:
        mesh = _sources.mesh_of(args.mesh)
        found = _sources.rules_of(args.rules, args.variant, mesh)
        if found is None:
            raise UsageError("lint needs rules: --rules FILE or MODULE:LAYOUT_MAP")
    issues = flm.lint(found, max_replicated=most, ignore=args.ignore)
    if args.json:
        found_json = [dataclasses.asdict(issue) for issue in issues]
        _print_json({"issues": found_json, "replicated_share": share})
    else:
        print(issues)
    return _FOUND if issues.problems("warning" if args.strict else "error") else _DONE


def explain(args: Namespace) -> int:
    resolution = _sources.resolution_of(args)
    leaf = _sources.leaf_of(resolution, args.path)
    text = resolution.explain(args.path)
    if args.json:
        _print_json({"path": leaf.path, "reason": leaf.reason, "text": text})
    else:
        print(text)
    return _DONE


def diff(args: Namespace) -> int:
    before = _sources.resolution_of(args)
    after = _sources.resolution_of(args, "_after")
    difference = before.diff(after)
    _show(difference, args)
    return _DONE if difference.is_empty else _FOUND


def draw(args: Namespace) -> int:
    resolution = _sources.resolution_of(args)
    if args.leaf is None:
        drawing = flm.draw.model(resolution)
    else:
        leaf = _sources.leaf_of(resolution, args.leaf)
        drawing = flm.draw.array(leaf.layout, leaf.shape)
    if args.json:
        _print_json(dataclasses.asdict(drawing.scene))
    elif args.output is None:
        from rich.console import Console

        try:
            Console().print(drawing)
        except SystemExit as ended:  # how rich ends where the pipe is closed
            raise BrokenPipeError from ended
    else:
        drawing.save(args.output)
        print(f"wrote {args.output}, {human_bytes(os.path.getsize(args.output))}")
    return _DONE


def plan(args: Namespace) -> int:
    step, arguments, options = _sources.step_of(args)
    return _shown(flm.pod.plan(step, *arguments, **options), args)


def compile(args: Namespace) -> int:
    step, arguments, options = _sources.step_of(args)
    options |= {"timeout": args.timeout, "exact_memory": args.exact_memory}
    return _shown(flm.pod.compile(step, *arguments, **options), args)


def suggest(args: Namespace) -> int:
    if args.output is not None:
        suffix_of(args.output)
    step, arguments, options = _sources.step_of(args)
    check = {"plan": True, "compile": "compile", "none": False}[args.check]
    options |= {"check": check, "limit_seconds": args.limit_seconds}
    options["hbm"] = None if args.hbm is None else args.hbm * 2**30
    found = flm.suggest(step, *arguments, **options)
    code = _shown(found, args)
    if args.output is not None and found.is_today_better:
        print(
            f"not written: {args.output}; the current rules are better",
            file=sys.stderr,
        )
    elif args.output is not None:
        found.layout_map.to_file(args.output)
        print(f"wrote {args.output}", file=sys.stderr)
    return code


def _shown(report: Any, args: Namespace) -> int:
    _show(report, args)
    return _FOUND if report.fits is False else _DONE


def inspect(args: Namespace) -> int:
    info = flm.checkpoint.inspect(args.checkpoint, step=args.step, item=args.item)
    if not args.json:
        print(info)
        return _DONE
    leaves = [_plain(leaf) for leaf in info.leaves]
    own = {**_plain(info), "leaves": leaves, "total_bytes": info.total_bytes}
    own["mesh"] = None if info.mesh is None else dict(info.mesh.axis_sizes)
    _print_json(own)
    return _DONE


def verify(args: Namespace) -> int:
    where = flm.checkpoint.inspect(args.checkpoint, step=args.step, item=args.item)
    if "flax_layoutmap" not in where.kind:
        raise UsageError(
            f"{where.path} has no checksums to compare with: it is of the kind "
            f"{where.kind}, not saved by flax_layoutmap"
        )
    try:
        found = flm.checkpoint.verify(where.path, item=args.item)
    except flm.errors.CheckpointError as error:
        problems = error.problems or [str(error)]
        if args.json:
            _print_json({"path": where.path, "problems": problems})
        print(error, file=sys.stderr)
        return _FOUND
    if args.json:
        _print_json({"path": where.path, "problems": [], **_plain(found)})
    else:
        print(found)
    return _DONE


def restore(args: Namespace) -> int:
    chosen: dict[str, Any] = {
        name: getattr(args, name) or None for name in ("item", "include", "exclude")
    }
    if os.path.lexists(args.to) and not args.dry_run:
        raise UsageError(f"{args.to} exists; write to another path, with --to")
    path = flm.checkpoint.inspect(args.checkpoint, step=args.step, item=args.item).path
    mesh = _sources.mesh_of(args.mesh)
    rules = _sources.rules_of(args.rules, args.variant, mesh)
    resolution = flm.checkpoint.resolve(path, layout_map=rules, mesh=mesh, **chosen)
    layout_map = flm.LayoutMap.from_rule_set(resolution.rules)
    plan = flm.checkpoint.plan(path, layout_map=layout_map, **chosen)
    plan_json = {**_plain(plan), "leaves": [_plain(leaf) for leaf in plan.leaves]}
    done = {"to": args.to, "plan": plan_json, "written": not args.dry_run}
    if args.dry_run:
        _print_json(done) if args.json else print(plan)
        return _DONE
    held = resolution.total_bytes
    if held > plan.host_available:
        raise UsageError(
            f"the arrays take {human_bytes(held)}, and this machine has "
            f"{human_bytes(plan.host_available)} of memory free; do it in parts, with "
            "--include"
        )
    _check_folder(args.to)
    layout_map = layout_map.on(_on_cpu(resolution.mesh))
    flm.checkpoint.reshard(path, args.to, layout_map=layout_map, **chosen)
    if args.json:
        _print_json(done)
    else:
        print(f"wrote {args.to}: {len(plan.leaves)} leaves, {human_bytes(held)}")
    return _DONE


def preset(args: Namespace) -> int:
    mesh = _sources.mesh_of(args.mesh)
    axes = _sources.axes_of(args.axis)
    rules = flm.presets.load(args.family, mesh, variant=args.variant, axes=axes)
    print(to_toml(rules.freeze()), end="")
    return _DONE


def detect(args: Namespace) -> int:
    _sources.check_used(args)
    model = args.checkpoint or _sources.factory(args.model, args.arg, "--model")
    found = flm.presets.recognise(model, step=args.step, item=args.item)
    if args.json:
        _print_json(_plain(found))
    else:
        print(found)
    return _DONE if found.families and found.agree else _FOUND


def convert(args: Namespace) -> int:
    rules = _sources.converted(args)
    if os.path.exists(args.output) and not args.overwrite:
        raise UsageError(f"{args.output} exists; replace it with --overwrite")
    rules.to_file(args.output)
    if args.json:
        _print_json({"output": args.output, "rules": len(rules)})
    else:
        print(f"wrote {args.output}: {len(rules)} rules")
    return _DONE


# ----------------------------------------------------------------------- details


def _check_folder(path: str) -> None:
    """Raise UsageError if a checkpoint cannot be written to a path.

    Orbax's threads would wait for minutes for a folder that cannot be made.
    """
    if "://" in path:
        return
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"nothing can be written to {folder}: {error.strerror}; choose another "
            "path, with --to"
        ) from error


def _show(thing: Any, args: Namespace, **options: Any) -> None:
    """Print a report: in colours on a terminal, else as plain text."""
    format = "json" if args.json else args.format
    if format != "text":
        print(thing.report(format, **options))
    else:
        thing.show(**options)


def _print_json(values: Mapping[str, Any]) -> None:
    print(json.dumps({"schema": 1, **values}, indent=1, default=str))


def _plain(record: Any) -> dict[str, Any]:
    """The fields of a record, one level deep."""
    return {
        field.name: _simple(getattr(record, field.name))
        for field in dataclasses.fields(record)
    }


def _simple(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _simple(each) for key, each in value.items()}
    if isinstance(value, PartitionSpec):
        return [list(entry) if isinstance(entry, tuple) else entry for entry in value]
    return value


def _on_cpu(mesh: flm.DeviceMesh | None) -> flm.DeviceMesh:
    """The same mesh, on CPU devices that are made for it."""
    assert mesh is not None
    if mesh.size > _sources.MOST_DEVICES:
        raise UsageError(
            f"the mesh {mesh} has {mesh.size} devices, more than the "
            f"{_sources.MOST_DEVICES} that one machine can stand in for"
        )
    devices = _sources.cpu_devices(mesh.size)
    return flm.DeviceMesh(mesh.shape, mesh.axis_names, devices=devices)
