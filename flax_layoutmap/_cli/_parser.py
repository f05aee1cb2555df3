"""The arguments of the command line."""

import argparse
import ast
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import flax_layoutmap as flm
from flax_layoutmap._cli import _commands
from flax_layoutmap._core.errors import visible

ABOUT = """Shows, checks, compares and suggests rules for a model, with no devices.

A model is a function that makes one (--model package.module:factory), or a
checkpoint (--checkpoint PATH), which needs no code at all. Rules are a file
(.toml, .json) or an object in a module (package.module:layout_map). The mesh is
text, such as data=16,model=16; its devices need not exist."""

ENDS = """exit codes:
  0  done, and nothing failed
  1  done, and the check failed: an error of lint, a difference, damage, a step
     that does not fit
  2  it failed; the reason is on stderr"""

# Python parameters that have another name here.
_SPELLINGS = {"--layout-map": "--rules", "--device-mesh": "--mesh"}


class Parser(argparse.ArgumentParser):
    """A parser with short errors; arguments may be untrusted file names, so escaped."""

    def error(self, message: str) -> NoReturn:
        text = f"{self.prog}: {message}\nsee: {self.prog} --help"
        self.exit(2, visible(text, "\n") + "\n")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments; an option that is spelled as in Python is an error."""
        for word in words:
            name = word.partition("=")[0]
            dashed = name.replace("_", "-")
            option = _SPELLINGS.get(dashed, dashed)
            if name.startswith("--") and option != name:
                self.error(f"{name} is written {option} on the command line")
        return self.parse_args(words, argparse.Namespace(words=words))


class _Version(argparse.Action):
    """Look up the version only when needed, as this takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"flax-layoutmap {flm.__version__}")
        parser.exit()


def make_parser() -> Parser:
    """The parser of all commands; its result has the command's function as `run`."""
    raw = argparse.RawDescriptionHelpFormatter
    top = Parser("flax-layoutmap", description=ABOUT, epilog=ENDS, formatter_class=raw)
    top.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    shared: Any = {title: _parent(title, names) for title, names in _SHARED.items()}
    for run, (example, options) in _COMMANDS.items():
        words = [*options.split(), "--traceback"]
        command = commands.add_parser(
            run.__name__,
            help=run.__doc__,
            description=run.__doc__,
            epilog=f"example:\n  flax-layoutmap {run.__name__} {example}",
            formatter_class=raw,
            parents=[shared[word] for word in words if word in shared],
        )
        command.set_defaults(run=run)
        for word in words:
            if word not in shared:
                _add(command, word)
    return top


def _parent(title: str, names: str) -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group(title)
    for name in names.split():
        _add(group, name)
    return parent


def _add(parser: Any, name: str) -> None:
    takes, about = _OPTIONS[name]
    metavar = {"metavar": takes} if takes else {"action": "store_true"}
    kind = _KINDS.get(takes, {})
    parser.add_argument(*name.split("|"), help=about, **metavar, **kind)


# ------------------------------------------------------------------------ values


def _mesh(text: str) -> str:
    """A mesh as text; Python syntax is an error."""
    if re.match(r"\w", text):
        return text
    axes = re.findall(r"(\w+)\W+(\d+)", text)
    example = ",".join(f"{name}={size}" for name, size in axes) or "data=2,model=4"
    raise argparse.ArgumentTypeError(f"{text!r}: write it as {example}")


def _pair(text: str) -> tuple[str, Any]:
    """`layers=4` → `("layers", 4)`; a value may be a Python literal or any string."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"{text!r}: write it as NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


# ----------------------------------------------------------------------- options

_REPEATED = {"action": "append", "default": []}
# Placeholder in --help → how argparse reads the value.
_KINDS: dict[str, dict[str, Any]] = {
    "FAMILY": {"nargs": "?"},
    "MESH": {"type": _mesh},
    "K=V": {"type": _pair, **_REPEATED},
    "CODE|REGEX": _REPEATED,
    "COUNT": {"type": int},
    "SHARE": {"type": float},
    "GIB": {"type": float},
    "{libtpu,partitioner}": {"choices": ("libtpu", "partitioner")},
}
# Name → placeholder and help. Names without dashes are positional.
_OPTIONS = {
    "--arg": ("K=V", "an argument of the factory, such as layers=4; repeatable"),
    "--args": ("MODULE:FACTORY", "returns the tuple of its arguments; only traced"),
    "--axis": ("K=V", "an axis by its name in your mesh: tensor=model; repeatable"),
    "--checkpoint": ("PATH", "a checkpoint, instead of the model's code"),
    "--engine": ("{libtpu,partitioner}", "default: libtpu where it is installed"),
    "--hbm": ("GIB", "memory of a device; default: that of the topology"),
    "--ignore": ("CODE|REGEX", "leave out a code, or a pattern of paths; repeatable"),
    "--json": ("", "write JSON to stdout"),
    "--max-replicated": ("SHARE", "of the bytes, 0 to 1; more is an error"),
    "--mesh": ("MESH", "such as data=16,model=16; default: that of the rules"),
    "--model": ("MODULE:FACTORY", "a function or class that makes it"),
    "--rules": ("RULES", "FILE (.toml, .json), MODULE:NAME; default: the checkpoint's"),
    "--slices": ("COUNT", "of the topology; default: 1"),
    "--strict": ("", "exit with 1 for warnings too"),
    "--topology": ("NAME", "TPUs, such as v5p:4x4x4"),
    "--traceback": ("", "print the Python traceback of an error"),
    "--variant": ("NAME", "a variant of the family"),
    "-o|--output": ("FILE", "write the rules to a file, too (.toml, .json)"),
    "checkpoint": ("CHECKPOINT", "its directory, or one of steps: the latest"),
    "family": ("FAMILY", "such as llama; default: that of the model"),
    "function": ("MODULE:FUNCTION", "the step: a function, or one of flm.jit"),
    "path": ("PATH", "a path, the end of one, or a pattern"),
}
_OPTIONS |= {
    f"--{name}-after": (_OPTIONS[f"--{name}"][0], f"instead of --{name}")
    for name in ("model", "checkpoint", "rules", "mesh")
}
# Options that several commands share: their title → their names.
_SHARED = {
    "model": "--model --checkpoint --arg",
    "rules": "--rules --mesh",
    "function": "function --args --arg --topology --slices --engine",
}
_MODEL = "--model my_model:make --rules rules.toml --mesh data=2,model=4"
_STEP = "my_model:step --args my_model:arguments"
_AFTER = "--model-after --checkpoint-after --rules-after --mesh-after"

# Command → the arguments of an example, and its options.
_COMMANDS = {
    _commands.report: (_MODEL, "model rules --json"),
    _commands.lint: (_MODEL, "model rules --json --max-replicated --ignore --strict"),
    _commands.explain: (f"up/kernel {_MODEL}", "path model rules"),
    _commands.diff: (
        f"{_MODEL} --mesh-after data=4,model=2",
        f"model rules {_AFTER} --json",
    ),
    _commands.plan: (
        f"{_STEP} --rules rules.toml --mesh data=16,model=16",
        "function rules --json",
    ),
    _commands.suggest: (
        f"{_STEP} --mesh data=4,model=2",
        "function rules --hbm -o|--output --json",
    ),
    _commands.inspect: ("runs/7", "checkpoint"),
    _commands.verify: ("runs", "checkpoint"),
    _commands.preset: (
        "llama --mesh fsdp=16,tensor=8",
        "family model --mesh --variant --axis",
    ),
}
