"""Names from untrusted sources are escaped in every output.

A name comes from a checkpoint, a file of rules, or a tree of the user's: a key, an axis
of the mesh, a pattern. Each name is hostile here; each public text is one case.
"""

import functools
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from orbax.checkpoint import v1
from rich.console import Console

import flax_layoutmap as flm
from flax_layoutmap._cli import main
from flax_layoutmap._show.terminal import shown_progress
from flax_layoutmap._suggest.suggest import Choice
from flax_layoutmap._tree.paths import escape, unescape

# What a terminal obeys or hides: a new line, what clears the screen and sets its title,
# an 8-bit escape, a bell, text turned around, what has no width, half a letter.
CONTROLS = (
    "x\n  fix: rm -rf /\x1b[2J\x1b]0;owned\x07\x9b2J\r\x07"
    "\u2028\u202e\u2066\u200b\ud800"
)
# Tags, an image, markup of rich, a cell, code, a link, bold, an entity.
MARKUP = (
    '<script>alert(1)</script>"><img src=x onerror=alert(1)>[red]x[/red]a|b'
    "`x` ``y``[a](http://b.c)**x** _y_&lt;b&gt;"
)
HOSTILE = CONTROLS + MARKUP


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def ruled(name: str, **options: Any) -> flm.LayoutMap:
    """The name as an axis, and in a pattern."""
    mesh = flm.DeviceMesh.abstract((2, 4), ("data", name))
    layout_map = flm.LayoutMap(mesh, **options)
    layout_map["kernel"] = (None, name)
    layout_map[f"unused{re.escape(name)}"] = None
    return layout_map


def resolved(name: str, **options: Any) -> flm.Resolution:
    """The name as a key, as an axis, and in a pattern."""
    tree = {name: {"kernel": struct(8, 16)}, "other": {name: struct(64, 64)}}
    return ruled(name, **options).resolve(tree)


def problem(call: Callable[[], Any]) -> str:
    with pytest.raises((flm.LayoutError, KeyError)) as caught:
        call()
    error = caught.value
    texts = [*map(str, error.args), *map(str, getattr(error, "problems", ()))]
    return "\n".join([str(error), *texts])


def misfit(name: str) -> Any:
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract((2, 4), ("data", name)))
    layout_map["kernel"] = (None, name)
    return layout_map.resolve({name: {"kernel": struct(8, 7)}})


def warned(name: str) -> str:
    resolution = resolved(name)
    with pytest.warns(flm.LayoutWarning) as caught:
        resolution.announce()
    return "\n".join(str(w.message) for w in caught)


def shown(thing: Any, *, is_terminal: bool) -> str:
    """What is printed, without the colours that rich itself adds."""
    file = io.StringIO()
    if is_terminal:
        console = Console(file=file, force_terminal=True, width=1000)
        console.print(thing)
    else:
        thing.show(file)
    return re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())


@functools.cache
def compared(name: str) -> Any:
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract((2, 4), ("data", name)))
    layout_map["kernel"] = ("data", name)
    tree = {name: {"kernel": struct(8, 16)}, f"{name}2": struct(8)}
    return resolved(name).diff(layout_map.resolve(tree))


def drawn(name: str) -> Any:
    return flm.draw.array(resolved(name)[f"{escape(name)}/kernel"])


def linted(name: str) -> str:
    issues = flm.lint(resolved(name))
    assert issues
    return str(issues)


@functools.cache
def planned(name: str) -> Any:
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
    layout_map["kernel"] = (None, "model")

    def step(params: Any) -> Any:
        return jax.tree.map(lambda leaf: (leaf @ leaf.T).sum(), params)

    step.__name__ = step.__qualname__ = name.replace("\ud800", "?")
    return flm.pod.plan(step, {name: {"kernel": struct(8, 16)}}, layout_map=layout_map)


def suggested(name: str) -> flm.Suggestion:
    """The name as the step, as an axis, and in a pattern."""
    choice = Choice(name, ruled(name), planned(name), 1)
    return flm.Suggestion(step=name, tried=(choice,), why=name, notes=(name,))


TEXTS: dict[str, Callable[[str], str]] = {
    "report": lambda name: resolved(name).report(),
    "remarks": lambda name: "\n".join(resolved(name).remarks()),
    "show": lambda name: shown(resolved(name), is_terminal=False),
    "rich": lambda name: shown(resolved(name), is_terminal=True),
    "repr": lambda name: repr(resolved(name)),
    "explain": lambda name: "\n".join(
        resolved(name).explain(path) for path in resolved(name).paths
    ),
    "no such path": lambda name: problem(lambda: resolved(name).explain(name * 2)),
    "error": lambda name: problem(lambda: misfit(name)),
    "strict": lambda name: problem(lambda: resolved(name, strict=True).announce()),
    "warning": warned,
    "diff": lambda name: compared(name).report(),
    "diff in colours": lambda name: shown(compared(name), is_terminal=True),
    "lint": linted,
    "check": lambda name: problem(
        lambda: flm.lint(resolved(name), max_replicated=0.02).raise_if_any()
    ),
    "plan": lambda name: planned(name).report(),
    "plan in colours": lambda name: shown(planned(name), is_terminal=True),
    "suggestion": lambda name: str(suggested(name)),
    "suggestion in colours": lambda name: shown(suggested(name), is_terminal=True),
    "mesh": lambda name: str(flm.DeviceMesh.abstract((2,), (name,))),
    "drawing": lambda name: flm.draw.model(resolved(name)).text(),
    "drawing in colours": lambda name: shown(
        flm.draw.model(resolved(name)), is_terminal=True
    ),
    "array": lambda name: drawn(name).text(),
}


def assert_seen(text: str) -> None:
    """Everything in a text has a glyph, and no name begins a line."""
    hidden = {letter for letter in text if not letter.isprintable() and letter != "\n"}
    assert hidden == set()
    assert not re.search(r"^\s*fix: rm", text, re.MULTILINE)


@pytest.mark.parametrize("exit", TEXTS)
def test_texts_show_every_character(exit: str) -> None:
    assert_seen(TEXTS[exit](HOSTILE))


@pytest.mark.parametrize("exit", ["rich", "drawing in colours", "plan in colours"])
def test_markup_of_rich_is_text(exit: str) -> None:
    assert "[red]x[/red]" in TEXTS[exit]("[red]x[/red]")


HTML: dict[str, Callable[[str], str]] = {
    "model": lambda name: flm.draw.model(resolved(name)).html(),
    "notebook": lambda name: resolved(name)._repr_html_(),
    "empty": lambda name: flm.resolve(
        {}, flm.LayoutMap(flm.DeviceMesh.abstract((2,), (name,)))
    )._repr_html_(),
    "array": lambda name: drawn(name).html(),
    "array in a notebook": lambda name: drawn(name)._repr_html_(),
    "mesh": lambda name: flm.draw.mesh(resolved(name).mesh).html(),
}


@pytest.mark.parametrize("exit", HTML)
def test_pages_have_no_tags_of_names(exit: str) -> None:
    text = HTML[exit](HOSTILE)
    assert_seen(text)
    assert "<script>alert" not in text and "<img src" not in text


def test_json_gives_names_back_without_raw_controls() -> None:
    resolution = resolved(HOSTILE)
    for text in (resolution.report("json"), compared(HOSTILE).report("json")):
        assert_seen(text)
    read = json.loads(resolution.report("json"))
    assert read["rules"]["mesh"]["axis_names"] == ["data", HOSTILE]
    assert [leaf["path"] for leaf in read["leaves"]] == list(resolution.paths)


@pytest.mark.parametrize("kind", ["toml", "json"])
def test_files_of_rules_show_what_they_hold(kind: str, tmp_path: Path) -> None:
    name = "\x1b[2J\u202e\u2066\u200b\x7f\x9b"
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract((2, 4), ("data", name)))
    layout_map[f"up{re.escape(name)}/kernel"] = (None, name)
    path = tmp_path / f"rules.{kind}"
    layout_map.to_file(path)
    assert_seen(path.read_text("utf-8"))
    assert flm.LayoutMap.from_file(path).freeze() == layout_map.freeze()


# ------------------------------------------------------------------------- paths


def test_a_path_is_one_line_that_can_be_seen() -> None:
    name, part = HOSTILE, escape(HOSTILE)
    assert part.isprintable() and "/" not in part and unescape(part) == name
    assert set(resolved(name).paths) == {f"{part}/kernel", f"other/{part}"}
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("model=2"))
    layout_map[f"^{re.escape(part)}/kernel"] = ("model",)
    tree = {name: {"kernel": struct(8)}}
    assert layout_map.resolve(tree)[f"{part}/kernel"].rule is not None
    assert jax.tree.structure(layout_map.resolve(tree).specs) == jax.tree.structure(
        {name: {"kernel": 0}}
    )


# ------------------------------------------------------------------- checkpoints

STORED = [
    *("\x1b[2J", "x\n  fix: rm -rf /", "\u202e"),
    *("<script>alert(1)</script>", "[red]x[/red]"),
]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that was written without us."""
    path = tmp_path_factory.mktemp("foreign") / "there"
    v1.save(str(path), {name: {"kernel": np.ones((4, 8))} for name in STORED})
    return path


def test_foreign_checkpoints_are_shown_and_read(foreign: Path) -> None:
    rules: Any = {"layout_map": flm.LayoutMap("data=2,model=4", strict=False)}
    info = flm.checkpoint.inspect(foreign)
    paths = sorted(f"{escape(name)}/kernel" for name in STORED)
    assert sorted(leaf.path for leaf in info.leaves) == paths
    assert_seen(str(info))
    assert_seen(str(flm.checkpoint.plan(foreign, **rules)))
    assert set(flm.checkpoint.restore(foreign, **rules)) == set(STORED)
    target = {"x": struct(4)}
    assert_seen(problem(lambda: flm.checkpoint.restore(foreign, target, **rules)))


def test_a_forged_record_cannot_speak(tmp_path: Path) -> None:
    """Its paths, axes and versions are those of somebody else."""
    path = tmp_path / "ours"
    flm.checkpoint.save(path, {"evil": {"kernel": jnp.ones((4, 8))}})
    file = path / "_CHECKPOINT_METADATA"
    data = json.loads(file.read_text("utf-8").replace("evil", r"e\u001b[2Jvil"))
    record = data["custom_metadata"]["flax_layoutmap"]
    record["versions"] = {"jax": "0\x1b[2J\nfix: rm"}
    file.write_text(json.dumps(data))
    try:
        assert_seen(str(flm.checkpoint.inspect(path)))
    except flm.errors.CheckpointError as error:
        assert_seen(str(error))


def test_safetensors_with_hostile_names(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(dict.fromkeys(STORED, np.ones(4)), path)
    assert_seen(str(flm.checkpoint.inspect(path)))
    path.write_bytes(path.read_bytes().replace(b'"F64"', b'"\\r""', 1))
    assert_seen(problem(lambda: flm.checkpoint.inspect(path)))


# -------------------------------------------------------------- the command line

COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": (),
    "report": ("--rules", "RULES"),
    "explain": ("--rules", "RULES", "PATH"),
    "lint": ("--rules", "RULES"),
}


@pytest.mark.parametrize("command", [*COMMANDS, "fails"])
def test_commands_print_no_command(
    command: str, foreign: Path, tmp_path: Path, capsys: Any
) -> None:
    rules = flm.LayoutMap(flm.DeviceMesh.abstract((2, 2), ("data", "\x1b[2J")))
    rules["kernel"] = (None, "\x1b[2J")
    rules["x\u202ey"] = None
    file = tmp_path / "rules.json"
    rules.to_file(file)
    where = [str(foreign)] if command == "inspect" else ["--checkpoint", str(foreign)]
    path = f"{escape(STORED[0])}/kernel"
    if command == "fails":
        assert main(["inspect", str(tmp_path / "no\x1b[2J")]) == 2
    else:
        given = {"RULES": str(file), "PATH": path}
        more = [given.get(word, word) for word in COMMANDS[command]]
        assert main([command, *where, *more]) in (0, 1)
    told = capsys.readouterr()
    assert_seen(told.out)
    assert_seen(told.err)


def test_arguments_that_are_none_are_told_as_words(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", "one", "two\x1b[2J\r"])
    assert_seen(capsys.readouterr().err)


def test_progress_has_no_markup(capfd: Any) -> None:
    with shown_progress("restoring [red]x\x07\u202e", 10, True, lambda: 0):
        pass
    told = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capfd.readouterr().err)
    assert r"restoring [red]x\x07\u202e" in told
