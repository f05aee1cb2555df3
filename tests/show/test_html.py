"""What a notebook shows: the words of the report, with markup in names escaped."""

import html
import io
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import treescope

import flax_layoutmap as flm

KINDS = (
    "mesh",
    "map",
    "empty map",
    "lint",
    "no findings",
    "diff",
    "plan",
    "suggestion",
)
NAME = "a<b>&'/kernel"
TREE = {"a<b>&'": {"kernel": jax.ShapeDtypeStruct((8, 16), jnp.float32)}}


def maps() -> tuple[flm.LayoutMap, flm.LayoutMap]:
    mesh = flm.DeviceMesh.abstract((2, 4), ("data", "model"))
    first, second = flm.LayoutMap(mesh), flm.LayoutMap(mesh)
    first["kernel"] = (None, "model")
    first["<i>missing</i>"] = ("model", None)
    first.activations["layers/<u>"] = ("data", ...)
    second["kernel"] = ("model", None)
    return first, second


def shown() -> dict[str, tuple[Any, list[str]]]:
    """What is shown, and words that are in it."""
    first, second = maps()
    now = first.resolve(TREE)
    plan = flm.pod.plan(jnp.sin, jnp.ones((8, 8)), mesh="a<b=8")
    suggestion = flm.suggest(
        lambda x: x + 1,
        jnp.ones((8, 8)),
        mesh="a<b=8",
        donate_argnames="x",
        check=False,
    )
    return {
        "mesh": (
            flm.DeviceMesh.abstract((4,), ("a<b",)),
            ["DeviceMesh('a<b=4'", "Auto"],
        ),
        "map": (first, ["<i>missing</i>", "activations", "layers/<u>", "mesh data=2"]),
        "empty map": (flm.LayoutMap(), ["no mesh"]),
        "lint": (flm.lint(now), ["<i>missing</i>", "LM101 warning", "fix: del"]),
        "no findings": (flm.lint(second.resolve(TREE)), ["no findings"]),
        "diff": (now.diff(second.resolve(TREE)), [NAME, "1 moved"]),
        "plan": (plan, ["plan of sin on mesh a<b=8"]),
        "suggestion": (
            suggestion,
            ["suggestion for <lambda> on mesh a<b=8", "per device"],
        ),
    }


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[Any, list[str]]]:
    return shown()


@pytest.mark.parametrize("kind", KINDS)
def test_the_words_of_the_report(
    results: dict[str, tuple[Any, list[str]]], kind: str
) -> None:
    value, words = results[kind]
    page = value._repr_html_()
    text = html.unescape(re.sub(r"<[^>]*>", "", page))
    assert all(word in re.sub(r"\s+", " ", text) for word in words), text
    tags = set(re.findall(r"</?(\w+)", page))
    assert tags <= {"pre", "span", "table", "caption", "tr", "th", "td"}


def test_treescope_shows_the_same(results: dict[str, tuple[Any, list[str]]]) -> None:
    """It adds the page of a value to its text."""
    value, _ = results["map"]
    page = treescope.render_to_html(value, compressed=False)
    assert value._repr_html_() in html.unescape(page)


def test_a_file_gets_the_text_in_a_notebook_too(
    results: dict[str, tuple[Any, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    file = io.StringIO()
    results["diff"][0].show(file)
    assert "1 moved" in file.getvalue()
