"""The arguments of the command line. Imports neither JAX nor Flax."""

import argparse
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

from flax_layoutmap._core.errors import visible

ABOUT = """Shows, checks, compares and suggests rules for a model, with no devices.

A model is a function that makes one (--model package.module:factory), or a
checkpoint (--checkpoint PATH), which needs no code at all. Rules are a file
(.toml, .json), an object in a module (package.module:layout_map), or those that
a checkpoint was saved with. The mesh is text, such as data=16,model=16; its
devices need not exist."""

ENDS = """exit codes:
  0  done, and nothing failed
  1  done, and the check failed: an error of lint (with --strict a warning), a
     difference, damage, no known family, nothing that fits
  2  it failed; the reason is on stderr"""


class _Parser(argparse.ArgumentParser):
    """Escape arguments in errors: they may be untrusted file names (`inspect *`)."""

    def error(self, message: str) -> NoReturn:
        super().error(visible(message, "\n"))


class _Version(argparse.Action):
    """Look the version up only when needed, as that takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"flax-layoutmap {version('flax-layoutmap')}")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; the name of the one chosen is in `command`."""
    raw = argparse.RawDescriptionHelpFormatter
    top = _Parser("flax-layoutmap", description=ABOUT, epilog=ENDS, formatter_class=raw)
    top.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (text, example, *parts) in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=text,
            description=textwrap.fill(text, 80),
            epilog=f"example:\n  {_in_lines(f'flax-layoutmap {name} {example}')}",
            formatter_class=raw,
        )
        for part in (
            _flag("--traceback", "print the Python traceback of an error"),
            *parts,
        ):
            part(own)
    return top


def _in_lines(command: str) -> str:
    """A command of the shell, its options in lines that fit a terminal."""
    first, *options = command.split(" -")
    lines = [first]
    for option in options:
        if len(lines[-1]) + len(option) > 70:
            lines[-1] += " \\"
            lines.append(f"     -{option}")
        else:
            lines[-1] += f" -{option}"
    return "\n".join(lines)


# ------------------------------------------------------------------------- parts

# What adds one argument, or several, to a command or a group of its arguments.
Part = Callable[[argparse._ActionsContainer], Any]


def _value(*names: str, **options: Any) -> Part:
    return lambda own: own.add_argument(*names, **options)


def _text(name: str, metavar: str, help: str | None = None) -> Part:
    return _value(name, metavar=metavar, help=help)


def _texts(name: str, metavar: str, help: str | None = None) -> Part:
    return _value(name, metavar=metavar, help=help, action="append", default=[])


def _flag(name: str, help: str) -> Part:
    return _value(name, help=help, action="store_true")


def _group(title: str, *parts: Part) -> Part:
    def add(own: argparse._ActionsContainer) -> None:
        group = own.add_argument_group(title)
        for part in parts:
            part(group)

    return add


def _one_of(*parts: Part, required: bool) -> Part:
    def add(own: argparse._ActionsContainer) -> None:
        group = own.add_mutually_exclusive_group(required=required)
        for part in parts:
            part(group)

    return add


_RULES_ARE = "a file (.toml, .json), module:layout_map, or a checkpoint"
_VARIANT = _text("--variant", "NAME", "a variant of the rule file")
_STEP = _text("--step", "N", "a step of a directory of steps; default: the latest")
_ITEM = _text("--item", "NAME", "an item of a checkpoint that has several")
_JSON = _flag("--json", "write JSON to stdout")


def _rules(default: str, what: str = "") -> Part:
    return _group(
        "rules",
        _text("--rules", "RULES", f"{what}{_RULES_ARE}; default: {default}"),
        _text("--mesh", "MESH", "such as data=16,model=16; default: that of the rules"),
        _VARIANT,
    )


_RULES = _rules("those that the checkpoint was saved with")
_CHECKPOINT = (_text("checkpoint", "CHECKPOINT", "its directory"), _STEP, _ITEM)
_FORMAT = (
    _value(
        "--format",
        choices=("text", "markdown", "json"),
        default="text",
        help="the format of the output; default: text",
    ),
    _JSON,
)


_AXES = _texts(
    "--axis",
    "NAME=OWN",
    "the name of an axis in your mesh, such as tensor=model; may be repeated",
)


_MODEL = _text(
    "--model",
    "MODULE:FACTORY",
    "a function or class that makes the model, or its variables",
)
_SAVED = _text(
    "--checkpoint",
    "PATH",
    "a checkpoint, instead of the model's code",
)
_ARG = _texts(
    "--arg",
    "K=V",
    "an argument of the factory, such as layers=4; may be repeated",
)


def _sources(*, required: bool = True) -> tuple[Part, ...]:
    """A model and rules for it."""
    own = _group(
        "model",
        _one_of(_MODEL, _SAVED, required=required),
        _ARG,
        _text(
            "--optimizer",
            "MODULE:FACTORY",
            "add the state of an optimizer, such as optax:adamw",
        ),
        _texts(
            "--optimizer-arg",
            "K=V",
            "an argument of its factory, such as learning_rate=1e-3; may be repeated",
        ),
        _STEP,
        _ITEM,
    )
    return own, _RULES


def _step_of(*, on_tpus: bool = False, rules_are: str = "") -> tuple[Part, ...]:
    """A step, its arguments, and where it is to run."""
    return (
        _text("step", "MODULE:FUNCTION", "the function of one step"),
        _value(
            "--args",
            required=True,
            metavar="MODULE:FACTORY",
            help="a function that returns the tuple of its arguments; only traced",
        ),
        _ARG,
        _texts(
            "--donate", "NAME", "an argument that the step donates; may be repeated"
        ),
        _rules("those of the step, flm.jit(layout_map=…)", rules_are),
        _group(
            "slice",
            _value(
                "--topology",
                required=on_tpus,
                metavar="NAME",
                help="a TPU slice, such as v5p:4x4x4",
            ),
            _value("--slices", type=int, metavar="N", help="how many; default: 1"),
        ),
    )


# ---------------------------------------------------------------------- commands

_MY_MODEL = "--model my_model:make --rules rules.toml --mesh data=2,model=4"
_MY_STEP = "my_model:step --args my_model:arguments --rules rules.toml"

# Name → what it does, the arguments of an example, and its arguments.
COMMANDS: dict[str, tuple[Any, ...]] = {
    "report": (
        "Shows every leaf with its layout, the rule that chose it, and the totals.",
        _MY_MODEL,
        *_sources(),
        *_FORMAT,
        _flag(
            "--no-fold",
            "a row for every leaf, instead of one for layers that are alike",
        ),
    ),
    "lint": (
        "Finds mistakes in rules, and layouts that cost memory or time.",
        "--rules rules.toml --mesh data=2,model=4",
        *_sources(required=False),
        _JSON,
        _value(
            "--max-replicated",
            type=float,
            metavar="SHARE",
            help="the largest share of the bytes (0 to 1) that may be replicated",
        ),
        _texts(
            "--ignore",
            "CODE|REGEX",
            "leave out a code, such as LM003, or a pattern of paths; may be repeated",
        ),
        _flag("--strict", "exit with 1 for warnings too"),
    ),
    "explain": (
        "Explains why one leaf got its layout, or none.",
        f"up/kernel {_MY_MODEL}",
        _text("path", "PATH", "the path of the leaf"),
        *_sources(),
        _JSON,
    ),
    "diff": (
        "Shows what changes, and what it costs, under other rules, on another mesh, or "
        "with another model. Options without an --…-after are the same for both.",
        f"{_MY_MODEL} --mesh-after data=4,model=2",
        *_sources(),
        _group(
            "after",
            _text("--model-after", "MODULE:FACTORY", "instead of --model"),
            _text("--checkpoint-after", "PATH", "instead of --checkpoint"),
            _texts("--arg-after", "K=V", "instead of --arg; may be repeated"),
            _text("--rules-after", "RULES", "instead of --rules"),
            _text("--mesh-after", "MESH", "instead of --mesh"),
            _text("--variant-after", "NAME", "instead of --variant"),
        ),
        *_FORMAT,
    ),
    "draw": (
        "Draws the model, or one leaf over the mesh: in the terminal, or into a file.",
        f"{_MY_MODEL} -o layout.html",
        *_sources(),
        _text("--leaf", "PATH", "draw the shards of this leaf, instead of the model"),
        _value(
            "-o",
            "--output",
            metavar="FILE",
            help="write to a file: .html (one page, no network), .png, .txt or .json",
        ),
        _JSON,
    ),
    "plan": (
        "Shows which collectives a step runs, and the memory that it needs, in about "
        "a second, on a mesh or a topology that this machine does not have.",
        f"{_MY_STEP} --mesh data=16,model=16",
        *_step_of(),
        *_FORMAT,
    ),
    "compile": (
        "Compiles a step for TPU slices that this machine does not have (needs "
        "libtpu): whether it fits, and its collectives and memory.",
        f"{_MY_STEP} --topology v5e:2x4 --mesh data=2,model=4",
        *_step_of(on_tpus=True),
        *_FORMAT,
        _value(
            "--timeout",
            type=float,
            default=900.0,
            metavar="SECONDS",
            help="the time limit of the compiler; default: 900",
        ),
        _flag(
            "--exact-memory",
            "wait for the whole compile, and report the peak memory of its executable",
        ),
    ),
    "suggest": (
        "Suggests rules for a step on a mesh or a topology that this machine does not "
        "have: the fastest that a search finds within the memory of a device.",
        "my_model:step --args my_model:arguments --mesh data=4,model=2",
        *_step_of(rules_are="the current rules, to compare with: "),
        *_FORMAT,
        _value(
            "--hbm",
            type=float,
            metavar="GIB",
            help="memory of a device to use; default: that of the topology",
        ),
        _value(
            "--limit-seconds",
            type=float,
            metavar="SECONDS",
            help="end the search after this time, with the best so far",
        ),
        _value(
            "--check",
            choices=("plan", "compile", "none"),
            default="plan",
            help="compare by XLA's partitioner, by the compiler for TPUs (needs "
            "libtpu), or by estimates alone; default: plan",
        ),
        _value(
            *("-o", "--output"),
            metavar="FILE",
            help="write the rules to a file, too (.toml, .json)",
        ),
    ),
    "inspect": (
        "Describes a checkpoint of Orbax, of this library, or of safetensors.",
        "runs/7",
        *_CHECKPOINT,
        _JSON,
    ),
    "verify": (
        "Reads all of a checkpoint and compares it with its checksums.",
        "runs",
        *_CHECKPOINT,
        _JSON,
    ),
    "restore": (
        "Writes a checkpoint again, sharded for another mesh or other rules.",
        "runs/7 --to resharded --mesh data=4,model=2",
        *_CHECKPOINT,
        _value("--to", required=True, metavar="PATH", help="the directory to write"),
        _RULES,
        _texts("--include", "REGEX", "only leaves whose paths match; may be repeated"),
        _texts("--exclude", "REGEX", "no leaves whose paths match; may be repeated"),
        _flag("--dry-run", "show the plan, and write nothing"),
        _JSON,
    ),
    "preset": (
        "Prints the rules of a model family for a mesh, as a rule file.",
        "llama --mesh fsdp=16,tensor=8",
        _text("family", "FAMILY", "such as llama; an unknown one lists all"),
        _value(
            "--mesh", metavar="MESH", required=True, help="such as fsdp=16,tensor=8"
        ),
        _AXES,
        _text("--variant", "NAME", "a variant of the family, such as untied"),
    ),
    "detect": (
        "Tells which preset is for a model or a checkpoint, and why.",
        "--checkpoint runs/7",
        _one_of(_MODEL, _SAVED, required=True),
        _ARG,
        _STEP,
        _ITEM,
        _JSON,
    ),
    "convert": (
        "Writes rules of another format or another library as a rule file.",
        "rules.toml rules.json",
        _text("source", "RULES", f"{_RULES_ARE}; with --from, module:object"),
        _text("output", "FILE", "the file to write (.toml, .json)"),
        _value(
            "--from",
            dest="dialect",
            choices=("partition-rules", "keras", "tp-plan", "shardings"),
            help="what RULES are, if not of this library (shardings: a checkpoint)",
        ),
        _text("--mesh", "MESH", "another mesh for the rules"),
        _AXES,
        _VARIANT,
        _flag("--overwrite", "replace FILE if it exists"),
        _JSON,
    ),
}
