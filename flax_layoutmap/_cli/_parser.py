"""The arguments of the command line. Imports neither JAX nor Flax."""

import argparse
import ast
import re
import textwrap
from collections.abc import Sequence
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
     difference, damage, no preset that matches, a step that does not fit
  2  it failed; the reason is on stderr"""

# Parameters in Python that have another name here.
_SPELLINGS = {
    "--layout-map": "--rules",
    "--device-mesh": "--mesh",
    "--tx": "--optimizer",
    "--donate-argnames": "--donate",
}


class Parser(argparse.ArgumentParser):
    """Short errors, escaped: arguments may be untrusted file names (`inspect *`)."""

    def error(self, message: str) -> NoReturn:
        text = f"{self.prog}: {message}\nsee: {self.prog} --help"
        self.exit(2, visible(text, "\n") + "\n")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments; an option that is spelled as in Python is an error."""
        for word in words:
            name = word.partition("=")[0]
            dashed = name.replace("_", "-")
            option = _SPELLINGS.get(dashed, dashed)
            if name.startswith("--") and option != name:
                self.error(f"{name} is written {option} on the command line")
        return self.parse_args(words, argparse.Namespace(words=words))


class _Version(argparse.Action):
    """Look the version up only when needed, as that takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"flax-layoutmap {version('flax-layoutmap')}")
        parser.exit()


def make_parser() -> Parser:
    """The parser of all commands; the name of the one chosen is in `command`."""
    raw = argparse.RawDescriptionHelpFormatter
    top = Parser("flax-layoutmap", description=ABOUT, epilog=ENDS, formatter_class=raw)
    top.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    shared: Any = {title: _parent(title, names) for title, names in _SHARED.items()}
    for name, (about, example, options) in _COMMANDS.items():
        words = [*options.split(), "--traceback"]
        command = commands.add_parser(
            name,
            help=about,
            description=textwrap.fill(about, 80),
            epilog=f"example:\n  flax-layoutmap {name} {example}",
            formatter_class=raw,
            parents=[shared[word] for word in words if word in shared],
        )
        for word in words:
            if word not in shared:
                _add(command, word)
    return top


def _parent(title: str, names: str) -> argparse.ArgumentParser:
    """Options that several commands share."""
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group(title)
    for name in names.split():
        _add(group, name)
    return parent


def _add(parser: Any, name: str) -> None:
    takes, about = _OPTIONS[name]
    kind = _KINDS.get(takes, {})
    if kind.get("action") == "append":
        about += "; may be repeated"
    if takes and "choices" not in kind:
        kind = {"metavar": takes, **kind}
    parser.add_argument(*name.split("|"), help=about, **kind)


# ------------------------------------------------------------------------ values


def _mesh(text: str) -> str:
    """A mesh, as text; one that is written as in Python is an error."""
    if re.match(r"\w", text):
        return text
    axes = re.findall(r"(\w+)\W+(\d+)", text)
    example = ",".join(f"{name}={size}" for name, size in axes) or "data=2,model=4"
    raise argparse.ArgumentTypeError(f"{text!r}: write it as {example}")


def _argument(text: str) -> tuple[str, Any]:
    """`layers=4` → `("layers", 4)`; what is not a Python literal is a string."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"{text!r}: write it as NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


# ----------------------------------------------------------------------- options

_REPEATED = {"action": "append", "default": []}
# What an option takes, as --help says it → how argparse reads it.
_KINDS: dict[str, dict[str, Any]] = {
    "": {"action": "store_true"},
    "[FAMILY]": {"nargs": "?"},
    "MESH": {"type": _mesh},
    "K=V": {"type": _argument, **_REPEATED},
    "AXIS=NAME": {"type": _argument, **_REPEATED},
    "CODE|REGEX": _REPEATED,
    "ARGUMENT": _REPEATED,
    "COUNT": {"type": int},
    "SHARE": {"type": float},
    "GIB": {"type": float},
    "ENGINE": {"choices": ("libtpu", "partitioner")},
}
_RULES_ARE = "a file (.toml, .json), module:layout_map, or a checkpoint"
# Name → what it takes, and its help. Without dashes: an argument by position.
_OPTIONS = {
    "--arg": ("K=V", "an argument of the factory, such as layers=4"),
    "--args": ("MODULE:FACTORY", "returns the tuple of its arguments; only traced"),
    "--axis": ("AXIS=NAME", "an axis by its name in your mesh, such as tensor=model"),
    "--checkpoint": ("PATH", "a checkpoint, instead of the model's code"),
    "--donate": ("ARGUMENT", "an argument that the step donates"),
    "--engine": ("ENGINE", "default: libtpu where there is one, else XLA's own"),
    "--hbm": ("GIB", "memory of a device; default: that of the topology"),
    "--ignore": ("CODE|REGEX", "leave out a code, or a pattern of paths"),
    "--item": ("NAME", "an item of a checkpoint that has several"),
    "--json": ("", "write JSON to stdout"),
    "--markdown": ("", "write a table of Markdown"),
    "--max-replicated": ("SHARE", "of the bytes, 0 to 1; more is an error"),
    "--mesh": ("MESH", "such as data=16,model=16; default: that of the rules"),
    "--model": ("MODULE:FACTORY", "a function or class that makes it"),
    "--no-fold": ("", "a row for every leaf, also of layers that are alike"),
    "--optimizer": ("MODULE:FACTORY", "add its state, such as of optax:adamw"),
    "--optimizer-arg": ("K=V", "an argument of it, such as learning_rate=1e-3"),
    "--overwrite": ("", "replace FILE if it exists"),
    "--rules": ("RULES", f"{_RULES_ARE}; default: those of the checkpoint or step"),
    "--slices": ("COUNT", "of the topology; default: 1"),
    "--step": ("N", "a step of a directory of steps; default: the latest"),
    "--strict": ("", "exit with 1 for warnings too"),
    "--topology": ("NAME", "TPUs, such as v5p:4x4x4"),
    "--traceback": ("", "print the Python traceback of an error"),
    "--variant": ("NAME", "a variant of the rules"),
    "-o|--output": ("FILE", "write the rules to a file, too (.toml, .json)"),
    "checkpoint": ("CHECKPOINT", "its directory"),
    "family": ("[FAMILY]", "such as llama, or fsdp for any model"),
    "output": ("FILE", "the file to write (.toml, .json)"),
    "path": ("PATH", "a path, the end of one, or a pattern"),
    "source": ("RULES", _RULES_ARE),
    "function": ("MODULE:FUNCTION", "the step: a function, or one of flm.jit"),
}
_AFTER = ("--model", "--checkpoint", "--arg", "--rules", "--mesh", "--variant")
_OPTIONS |= {f"{n}-after": (_OPTIONS[n][0], f"instead of {n}") for n in _AFTER}
# Those that several commands share: the title above them → their names.
_SHARED = {
    "model": "--model --checkpoint --arg --step --item",
    "optimizer": "--optimizer --optimizer-arg",
    "rules": "--rules --mesh --variant",
    "function": "function --args --arg --donate --topology --slices",
}
_MY_MODEL = "--model my_model:make --rules rules.toml --mesh data=2,model=4"
_MY_STEP = "my_model:step --args my_model:arguments"

# Name → what it does, the arguments of an example, and its options.
_COMMANDS = {
    "report": (
        "Shows every leaf with its layout, the rule that chose it, and the totals.",
        _MY_MODEL,
        "model optimizer rules --json --markdown --no-fold",
    ),
    "lint": (
        "Finds mistakes in rules, and layouts that cost memory or time.",
        _MY_MODEL,
        "model optimizer rules --json --max-replicated --ignore --strict",
    ),
    "explain": (
        "Explains why a leaf got its layout, or none.",
        f"up/kernel {_MY_MODEL}",
        "path model optimizer rules --json",
    ),
    "diff": (
        "Shows what changes, and what it costs, with other rules, meshes or models.",
        f"{_MY_MODEL} --mesh-after data=4,model=2",
        " ".join(["model optimizer rules --json", *(f"{n}-after" for n in _AFTER)]),
    ),
    "plan": (
        "Shows the collectives of a step, and its memory, on devices you do not have.",
        f"{_MY_STEP} --rules rules.toml --mesh data=16,model=16",
        "function rules --engine --json",
    ),
    "suggest": (
        "Suggests rules for a step on a mesh or a topology.",
        f"{_MY_STEP} --mesh data=4,model=2",
        "function rules --engine --hbm -o|--output --json",
    ),
    "inspect": (
        "Describes a checkpoint of Orbax, of this library, or of safetensors.",
        "runs/7",
        "checkpoint --step --item --json",
    ),
    "verify": (
        "Reads all of a checkpoint and compares it with its checksums.",
        "runs",
        "checkpoint --step --item --json",
    ),
    "preset": (
        "Prints the rules of a model family for a mesh; or which family a model is of.",
        "llama --mesh fsdp=16,tensor=8",
        "family model --mesh --variant --axis",
    ),
    "convert": (
        "Writes rules of a module, a checkpoint or a file to a rule file.",
        "rules.toml rules.json",
        "source output --mesh --variant --overwrite",
    ),
}
