"""The arguments of the command line. Imports neither JAX nor Flax."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from flax_layoutmap._core.errors import visible

if TYPE_CHECKING:
    # It has no name at run time.
    Commands = argparse._SubParsersAction["_Parser"]

ABOUT = """Shows, checks and compares how rules lay out a model, with no devices.

A model is a function that makes one (--model package.module:factory), or a checkpoint
(--checkpoint PATH), which needs no code at all. Rules are a file (.toml, .json), an
object in a module (package.module:layout_map), or those that a checkpoint was saved
with. The mesh is text, such as data=16,model=16; no such devices have to be here."""

ENDS = """exit codes:
  0  done, and nothing is wrong
  1  done, and something was found: a finding, a difference, damage
  2  it could not be done; the reason is on stderr"""


class _Parser(argparse.ArgumentParser):
    """Arguments may be names of files that somebody else chose (`inspect *`)."""

    def error(self, message: str) -> NoReturn:
        super().error(visible(message, "\n"))


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; the name of the one chosen is in `command`."""
    top = _Parser(
        "flax-layoutmap",
        description=ABOUT,
        epilog=ENDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (
        *(_report, _lint, _explain, _diff, _draw),
        *(_plan, _compile, _inspect, _verify, _restore, _convert),
    ):
        add(commands)
    return top


class _Version(argparse.Action):
    """Asks for the version only when it is wanted: that takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"flax-layoutmap {version('flax-layoutmap')}")
        parser.exit()


def _command(
    commands: "Commands",
) -> Callable[[str, str, str], argparse.ArgumentParser]:
    """A function that adds a command, with an example at the end of its help."""

    def add(name: str, text: str, example: str) -> argparse.ArgumentParser:
        own = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.add_argument(
            "--traceback", action="store_true", help="show where an error came from"
        )
        return own

    return add


def _report(commands: "Commands") -> None:
    own = _command(commands)(
        "report",
        "Shows every leaf with its layout, the rule that chose it, and the totals.",
        "flax-layoutmap report --model my_model:make --rules rules.toml "
        "--mesh data=2,model=4",
    )
    _add_sources(own)
    _add_format(own)
    own.add_argument(
        "--no-fold",
        action="store_true",
        help="a row for every leaf, instead of one for layers that are alike",
    )


def _lint(commands: "Commands") -> None:
    own = _command(commands)(
        "lint",
        "Looks for rules that do not do what they seem to, and for layouts that cost.",
        "flax-layoutmap lint --rules rules.toml --mesh data=2,model=4",
    )
    _add_sources(own, model_required=False)
    _add_json(own)
    own.add_argument(
        "--max-replicated",
        type=float,
        metavar="SHARE",
        help="also an error: more than this share of the bytes (0 to 1) replicated",
    )
    own.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="CODE",
        help="a code (LM003) not to report; may be repeated",
    )
    own.add_argument(
        "--strict", action="store_true", help="exit with 1 for warnings too"
    )


def _explain(commands: "Commands") -> None:
    own = _command(commands)(
        "explain",
        "Tells why one leaf got its layout, or why it got none.",
        "flax-layoutmap explain up/kernel --model my_model:make --rules rules.toml "
        "--mesh data=2,model=4",
    )
    own.add_argument("path", metavar="PATH", help="the path of the leaf")
    _add_sources(own)
    _add_json(own)


def _diff(commands: "Commands") -> None:
    own = _command(commands)(
        "diff",
        "Shows what changes, and what it costs, under other rules, on another mesh, or "
        "with another model. What is not given for after is as before.",
        "flax-layoutmap diff --model my_model:make --rules rules.toml "
        "--mesh data=2,model=4 --mesh-after data=4,model=2",
    )
    _add_sources(own)
    after = own.add_argument_group("after")
    after.add_argument("--model-after", metavar="MODULE:FACTORY")
    after.add_argument("--arg-after", action="append", default=[], metavar="K=V")
    after.add_argument("--checkpoint-after", metavar="PATH")
    after.add_argument("--rules-after", metavar="RULES")
    after.add_argument("--mesh-after", metavar="MESH")
    after.add_argument("--variant-after", metavar="NAME")
    _add_format(own)


def _draw(commands: "Commands") -> None:
    own = _command(commands)(
        "draw",
        "Draws the model, or one leaf over the mesh: in the terminal, or into a file.",
        "flax-layoutmap draw --model my_model:make --rules rules.toml "
        "--mesh data=2,model=4 -o layout.html",
    )
    _add_sources(own)
    own.add_argument("--leaf", metavar="PATH", help="draw where this leaf lies")
    own.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write to a file: .html (one page, no network), .png, .txt or .json",
    )
    _add_json(own)


def _plan(commands: "Commands") -> None:
    own = _command(commands)(
        "plan",
        "Shows which collectives a step runs, and what it holds, in about a second, "
        "for a mesh or a topology that is not here.",
        "flax-layoutmap plan my_model:step --args my_model:arguments "
        "--rules rules.toml --mesh data=16,model=16",
    )
    _add_step(own)
    own.add_argument("--topology", metavar="NAME", help="such as v5p:4x4x4")


def _compile(commands: "Commands") -> None:
    own = _command(commands)(
        "compile",
        "Compiles a step for TPU slices that are not here (needs libtpu): whether it "
        "fits, and what the compiler made of it.",
        "flax-layoutmap compile my_model:step --args my_model:arguments "
        "--rules rules.toml --topology v5e:2x4 --mesh data=2,model=4",
    )
    _add_step(own)
    own.add_argument(
        "--topology", metavar="NAME", required=True, help="such as v5p:4x4x4"
    )
    own.add_argument(
        "--timeout",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="after which the compiler is ended (default: 900)",
    )
    own.add_argument(
        "--exact-memory",
        action="store_true",
        help="wait for the whole compile and the peak of memory of its executable",
    )


def _inspect(commands: "Commands") -> None:
    own = _command(commands)(
        "inspect",
        "Describes a checkpoint of Orbax, of this library, or of safetensors.",
        "flax-layoutmap inspect runs/7",
    )
    _add_checkpoint(own)
    _add_json(own)


def _verify(commands: "Commands") -> None:
    own = _command(commands)(
        "verify",
        "Reads all of a checkpoint and compares it with its checksums.",
        "flax-layoutmap verify runs",
    )
    _add_checkpoint(own)
    _add_json(own)


def _restore(commands: "Commands") -> None:
    own = _command(commands)(
        "restore",
        "Writes a checkpoint anew, in the pieces that another mesh or rules need.",
        "flax-layoutmap restore runs/7 --to resharded --mesh data=4,model=2",
    )
    _add_checkpoint(own)
    own.add_argument("--to", required=True, metavar="PATH", help="where to write it")
    _add_rules(own)
    own.add_argument(
        "--include",
        action="append",
        metavar="REGEX",
        help="only leaves that it finds; may be repeated",
    )
    own.add_argument(
        "--exclude",
        action="append",
        metavar="REGEX",
        help="no leaves that it finds; may be repeated",
    )
    own.add_argument(
        "--dry-run", action="store_true", help="show the plan, and write nothing"
    )
    _add_json(own)


def _convert(commands: "Commands") -> None:
    own = _command(commands)(
        "convert",
        "Writes rules in another format.",
        "flax-layoutmap convert rules.toml rules.json",
    )
    own.add_argument(
        "source",
        metavar="RULES",
        help="a file (.toml, .json), module:layout_map, or a checkpoint",
    )
    own.add_argument("output", metavar="FILE", help="the file to write (.toml, .json)")
    own.add_argument("--mesh", metavar="MESH", help="put them on another mesh")
    own.add_argument("--variant", metavar="NAME", help="of rules in a file")
    own.add_argument(
        "--overwrite", action="store_true", help="replace a file that is there"
    )
    _add_json(own)


# ------------------------------------------------------------------------- parts


def _add_sources(own: argparse.ArgumentParser, *, model_required: bool = True) -> None:
    """A model and rules for it."""
    group = own.add_argument_group("model")
    one = group.add_mutually_exclusive_group(required=model_required)
    one.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="a function or class that makes the model, or its variables",
    )
    one.add_argument(
        "--checkpoint",
        metavar="PATH",
        help="a checkpoint that was saved, instead of the model's code",
    )
    group.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="K=V",
        help="an argument of the factory; may be repeated",
    )
    group.add_argument(
        "--optimizer",
        metavar="MODULE:FACTORY",
        help="add the state of an optimizer, such as optax:adamw",
    )
    group.add_argument(
        "--optimizer-arg",
        action="append",
        default=[],
        metavar="K=V",
        help="an argument of its factory; may be repeated",
    )
    group.add_argument("--step", metavar="N", help="of a directory of steps")
    group.add_argument("--item", metavar="NAME", help="of a checkpoint with several")
    _add_rules(own)


def _add_step(own: argparse.ArgumentParser) -> None:
    """A step, its arguments, and where it is to run."""
    own.add_argument("step", metavar="MODULE:FUNCTION", help="the step")
    own.add_argument(
        "--args",
        required=True,
        metavar="MODULE:FACTORY",
        help="a function that makes the tuple of its arguments; it is only traced",
    )
    own.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="K=V",
        help="an argument of that function; may be repeated",
    )
    own.add_argument(
        "--donate",
        action="append",
        default=[],
        metavar="NAME",
        help="an argument of the step that is given away; may be repeated",
    )
    own.add_argument("--slices", type=int, metavar="N", help="of the topology")
    _add_rules(own)
    _add_format(own)


def _add_rules(own: argparse.ArgumentParser) -> None:
    group = own.add_argument_group("rules")
    group.add_argument(
        "--rules",
        metavar="RULES",
        help="a file (.toml, .json), module:layout_map, or a checkpoint; default: "
        "those that the checkpoint was saved with",
    )
    group.add_argument(
        "--mesh",
        metavar="MESH",
        help="such as data=16,model=16; default: that of the rules",
    )
    group.add_argument("--variant", metavar="NAME", help="of rules in a file")


def _add_checkpoint(own: argparse.ArgumentParser) -> None:
    own.add_argument("checkpoint", metavar="CHECKPOINT", help="its directory")
    own.add_argument("--step", metavar="N", help="of a directory of steps")
    own.add_argument("--item", metavar="NAME", help="of a checkpoint with several")


def _add_format(own: argparse.ArgumentParser) -> None:
    own.add_argument(
        "--format",
        choices=("text", "markdown", "json"),
        default="text",
        help="of the output (default: text)",
    )
    _add_json(own)


def _add_json(own: argparse.ArgumentParser) -> None:
    own.add_argument("--json", action="store_true", help="write JSON to stdout")
