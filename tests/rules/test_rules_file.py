"""Rule files: round trips, extends, variants, comments, damage, limits."""

import importlib.util
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import test_serialise
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patterns import PATTERNS, compiles

import flax_layoutmap as flm
from flax_layoutmap._rules import rules_file as _rules_file
from flax_layoutmap._rules.pattern_cost import slow_because

MESH = flm.DeviceMesh.abstract((2, 4), ("data", "model"))
OTHER = flm.DeviceMesh.abstract("data=2,model=2,expert=2")

BASE = """\
schema = 1
mesh = "data=2,model=4"
overlap = "first"

[rules]
"q/kernel" = ["-", "model"]
'layers/\\d+/out' = ["model", "-"]
".*" = "replicated"
"""

needs_tomlkit = pytest.mark.skipif(
    importlib.util.find_spec("tomlkit") is None,
    reason="Comments are kept by tomlkit, which is not installed here.",
)


def write(folder: Path, text: str, name: str = "rules.toml") -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def read(folder: Path, text: str, **options: Any) -> flm.LayoutMap:
    return flm.LayoutMap.from_file(write(folder, text), **options)


def axes(layout_map: flm.LayoutMap) -> dict[str, Any]:
    return {pattern: layout.axes for pattern, layout in layout_map.items()}


# ----------------------------------------------------------------- there and back


@pytest.mark.parametrize("name", ["rules.toml", "rules.json"])
def test_there_and_back(tmp_path: Path, name: str) -> None:
    layout_map = test_serialise.full_map()
    layout_map[r"layers/\d+/it's"] = ("data",)
    layout_map['a"b\n\x7fä\\d'] = ("data",)
    layout_map.to_file(tmp_path / name)
    assert flm.LayoutMap.from_file(tmp_path / name) == layout_map
    assert list(flm.LayoutMap.from_file(str(tmp_path / name))) == list(layout_map)


def test_what_is_written(tmp_path: Path) -> None:
    test_serialise.full_map().to_file(tmp_path / "rules.toml")
    assert (tmp_path / "rules.toml").read_text() == (
        "schema = 1\n"
        'mesh = "data=2,model=4"\n'
        'batch = ["data", "model"]\n'
        'match = "fullmatch"\n'
        'overlap = "last"\n'
        'unmatched = "error"\n'
        'indivisible = "replicate"\n'
        "strict = true\n"
        "\n"
        "[rules]\n"
        '"a" = ["-", "model"]\n'
        '"b" = [["data", "model"], "...", "-"]\n'
        '"c" = "replicated"\n'
        '"d" = ["data", "..."]\n'
        '"e" = { axes = ["data"], rank = "skip" }\n'
        '"f" = { axes = ["data"], memory_kind = "pinned_host" }\n'
        '"g" = { axes = ["x"], mesh = "x=3" }\n'
        "\n"
        "[activations]\n"
        '"mlp" = ["data", "...", "-"]\n'
        "\n"
        "[names]\n"
        '"hidden" = ["data", "-"]\n'
        "\n"
        "[optimizer]\n"
        '"kernel" = ["data", "model"]\n'
    )


def test_a_small_map_is_a_small_file(tmp_path: Path) -> None:
    layout_map = flm.LayoutMap()
    layout_map[r"layers/\d+/up"] = ("model",)
    layout_map.to_file(tmp_path / "rules.toml")
    assert (tmp_path / "rules.toml").read_text() == (
        'schema = 1\nmatch = "search"\noverlap = "error"\n\n'
        "[rules]\n'layers/\\d+/up' = [\"model\"]\n"
    )


@pytest.mark.parametrize(
    "mesh",
    [
        None,
        flm.DeviceMesh.abstract("x=3", axis_types="explicit"),
        flm.DeviceMesh.abstract((2, 2), ("a", "b"), axis_types=("auto", "explicit")),
        flm.DeviceMesh.abstract((2, 2), ("a=1", "b,c")),
        flm.DeviceMesh.abstract((2,), (" a ",)),
    ],
)
@pytest.mark.parametrize("name", ["rules.toml", "rules.json"])
def test_meshes(tmp_path: Path, mesh: Any, name: str) -> None:
    for batch in (None, ()):
        layout_map = flm.LayoutMap(mesh, batch=batch)
        layout_map.to_file(tmp_path / name)
        assert flm.LayoutMap.from_file(tmp_path / name) == layout_map


def test_devices_are_not_written(tmp_path: Path, mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh)
    layout_map["a"] = ("data",)
    path = tmp_path / "rules.toml"
    layout_map.to_file(path)
    assert flm.LayoutMap.from_file(path).device_mesh == MESH
    assert flm.LayoutMap.from_file(path, mesh=mesh) == layout_map
    assert flm.LayoutMap.from_file(path, mesh="data=4,model=2") == layout_map.on(
        "data=4,model=2"
    )


def test_what_to_json_returns_reads_too(tmp_path: Path) -> None:
    """As it stands in the metadata of a checkpoint: schema 1, rules as a list."""
    layout_map = test_serialise.full_map()
    path = write(tmp_path, json.dumps(layout_map.to_json()), "rules.json")
    assert flm.LayoutMap.from_file(path) == layout_map
    layout_map.to_file(path)
    assert flm.LayoutMap.from_json(json.loads(path.read_text())) == layout_map


def test_json_as_a_person_writes_it(tmp_path: Path) -> None:
    text = json.dumps({"schema": 1, "rules": {"up": [None, "model"], "b": ["-", "x"]}})
    read_ = flm.LayoutMap.from_file(write(tmp_path, text, "rules.json"))
    assert axes(read_) == {"up": (None, "model"), "b": (None, "x")}


AXES = ["data", "model", "a b", "ä"]
LAYOUTS = st.one_of(
    st.none(),
    st.permutations(AXES).flatmap(
        lambda names: st.tuples(
            st.sampled_from([None, names[0], (names[0], names[1])]),
            st.sampled_from([None, ..., names[2]]),
            st.sampled_from([None, names[3]]),
        )
    ),
)
KEYS = st.one_of(PATTERNS, st.text(min_size=1, max_size=12)).filter(
    lambda text: compiles(text) and slow_because(text) is None
)
RULES = st.dictionaries(KEYS, LAYOUTS, max_size=5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rules=RULES,
    optimizer=RULES,
    skip=KEYS,
    mesh=st.booleans(),
    options=st.fixed_dictionaries(
        {},
        optional={
            "match": st.sampled_from(["search", "match", "fullmatch"]),
            "overlap": st.sampled_from(["error", "first", "last"]),
            "unmatched": st.sampled_from(["replicate", "error"]),
            "indivisible": st.sampled_from(["error", "replicate"]),
            "batch": st.lists(st.sampled_from(AXES), max_size=2, unique=True),
            "strict": st.sampled_from([None, True, False]),
        },
    ),
    name=st.sampled_from(["rules.toml", "rules.json"]),
)
def test_any_rules_there_and_back(
    tmp_path: Path,
    rules: Any,
    optimizer: Any,
    skip: str,
    mesh: bool,
    options: Any,
    name: str,
) -> None:
    on = flm.DeviceMesh.abstract((2,) * 4, AXES) if mesh else None
    layout_map = flm.LayoutMap(on, **options)
    layout_map.update(rules)
    layout_map.optimizer.update(optimizer)
    if skip not in layout_map:
        kind = flm.TensorLayout(("data",), memory_kind="pinned_host")
        layout_map.add(flm.Rule(skip, kind, rank="skip"))
    path = tmp_path / name
    path.unlink(missing_ok=True)
    layout_map.to_file(path)
    again = flm.LayoutMap.from_file(path)
    assert again == layout_map
    assert list(again) == list(layout_map)
    before = path.read_bytes()
    again.to_file(path)
    assert path.read_bytes() == before


# ------------------------------------------------------------- extends, variants


def test_extends(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    write(tmp_path / "shared", BASE, "base.toml")
    text = """\
schema = 1
extends = "shared/base.toml"
[rules]
"new" = ["data"]
"q/kernel" = ["data", "model"]
'layers/\\d+/out' = false
"""
    layout_map = read(tmp_path, text)
    assert layout_map.device_mesh == MESH
    # The new one is in front, where it wins; the old one stays where it was.
    assert list(axes(layout_map).items()) == [
        ("new", ("data",)),
        ("q/kernel", ("data", "model")),
        (".*", (...,)),
    ]


@pytest.mark.parametrize("value", ['"replicated"', "[]", '["..."]', '["...", "-"]'])
def test_replicated_is_one_layout(tmp_path: Path, value: str) -> None:
    layout_map = read(tmp_path, f'schema = 1\n[rules]\n"a" = {value}\n')
    assert layout_map["a"] == flm.TensorLayout(None)


@pytest.mark.parametrize("way", ["up", "absolute", "link", "of a link", "not there"])
def test_what_is_extended_is_in_the_folder(tmp_path: Path, way: str) -> None:
    """Unless `within` says so; also where a file in the folder extends another one."""
    own = tmp_path / "own"
    (own / "below").mkdir(parents=True)
    base = write(tmp_path, BASE, "base.toml")
    name = {"up": "../base.toml", "absolute": str(base), "link": "link.toml"}.get(way)
    if way == "link":
        (own / "link.toml").symlink_to(base)
    elif way == "of a link":
        write(own / "below", 'schema = 1\nextends = "../../base.toml"\n', "a.toml")
        name = "below/a.toml"
    elif way == "not there":
        name = "../nothing.toml"
    text = f'schema = 1\nextends = "{name}"\n'
    message = refused(own, text)
    said = "../../base.toml" if way == "of a link" else name
    assert f":2: extends {said!r}, which is not in {own.resolve()}: put it" in message
    assert message.endswith("LayoutMap.from_file(path, within=folder)")
    if way != "not there":
        assert read(own, text, within=tmp_path) == read(tmp_path, BASE)
    # Up and down again is the folder itself.
    write(own, BASE, "mine.toml")
    again = 'schema = 1\nextends = "../own/mine.toml"\n'
    assert read(own, again) == read(own, BASE)


def test_new_rules_are_behind_unless_the_first_wins(tmp_path: Path) -> None:
    write(tmp_path, BASE.replace('"first"', '"last"'), "base.toml")
    text = 'schema = 1\nextends = ["base.toml"]\n[rules]\n"new" = ["data"]\n'
    assert list(read(tmp_path, text))[-1] == "new"


def test_several_files_and_files_that_extend_one(tmp_path: Path) -> None:
    write(tmp_path, 'schema = 1\n[rules]\n"a" = ["x"]\n"b" = ["x"]\n', "one.toml")
    write(
        tmp_path, 'schema = 1\nextends = "one.toml"\n[rules]\n"b" = ["y"]\n', "2.toml"
    )
    text = json.dumps({"schema": 1, "names": {"h": ["z"]}})
    write(tmp_path, text, "three.json")
    text = 'schema = 1\nextends = ["2.toml", "three.json", "one.toml"]\n'
    layout_map = read(tmp_path, text)
    assert axes(layout_map) == {"a": ("x",), "b": ("x",)}  # one.toml, once more
    assert list(layout_map.names) == ["h"]


VARIANTS = (
    BASE
    + """\
[variants.serve]
batch = []
unmatched = "error"
[variants.serve.rules]
"q/kernel" = ["model", "-"]
[variants.serve.names]
"hidden" = ["model"]

[variants.experts]
mesh_axes = ["expert"]
[variants.experts.rules]
"experts/.*" = ["expert", "..."]

[variants.large]
mesh = "data=64,model=16"
"""
)


def test_a_variant_by_name(tmp_path: Path) -> None:
    plain, serve = read(tmp_path, VARIANTS), read(tmp_path, VARIANTS, variant="serve")
    assert axes(plain)["q/kernel"] == (None, "model")
    assert axes(serve)["q/kernel"] == ("model", None)
    assert list(axes(serve)) == list(axes(plain))
    assert (plain.freeze().batch, serve.freeze().batch) == (("data",), ())
    assert serve.freeze().unmatched == "error" and list(serve.names) == ["hidden"]
    assert str(read(tmp_path, VARIANTS, variant="large").device_mesh) == (
        "data=64,model=16"
    )


def test_a_variant_by_the_axes_of_the_mesh(tmp_path: Path) -> None:
    assert "experts/.*" not in read(tmp_path, VARIANTS)
    there = read(tmp_path, VARIANTS, mesh=OTHER)
    assert next(iter(there)) == "experts/.*"
    both = read(tmp_path, VARIANTS, mesh=OTHER, variant="serve")
    assert "experts/.*" in both and axes(both)["q/kernel"] == ("model", None)


def test_a_variant_of_a_file_that_is_extended(tmp_path: Path) -> None:
    write(tmp_path, VARIANTS, "base.toml")
    text = """\
schema = 1
extends = "base.toml"
[variants.serve.rules]
"own" = ["data"]
"""
    layout_map = read(tmp_path, text, variant="serve")
    assert axes(layout_map)["q/kernel"] == ("model", None) and "own" in layout_map


# --------------------------------------------------------------------- comments

COMMENTED = """\
# Rules of the small model.
schema = 1
mesh = "data=2,model=4"  # one pod
match = "search"
overlap = "first"

# ---- attention
[rules]
# column
"q/kernel" = ["-", "model"]  # heads
"k/kernel" = [
  "-",
  "model",  # heads too
]

# the rest
".*" = "replicated"

# ---- activations
[names]
"hidden" = ["data"]  # rows
"""


@needs_tomlkit
def test_comments_stay(tmp_path: Path) -> None:
    path = write(tmp_path, COMMENTED)
    layout_map = flm.LayoutMap.from_file(path)
    layout_map.to_file(path)
    assert path.read_text() == COMMENTED
    layout_map.replace("q/kernel", ("data", "model"))
    layout_map.names["heads"] = ("model",)
    changed = flm.LayoutMap.from_rules(
        {"new": ("data",), **dict(layout_map.items())},
        MESH,
        overlap="first",
        strict=True,
    )
    changed.names.update(layout_map.names)
    changed.optimizer["kernel"] = ("data", None)
    changed.to_file(path)
    assert flm.LayoutMap.from_file(path) == changed
    assert list(flm.LayoutMap.from_file(path)) == list(changed)
    assert (
        path.read_text()
        == """\
# Rules of the small model.
schema = 1
mesh = "data=2,model=4"  # one pod
match = "search"
overlap = "first"
strict = true

# ---- attention
[rules]
"new" = ["data"]
# column
"q/kernel" = ["data", "model"]  # heads
"k/kernel" = [
  "-",
  "model",  # heads too
]

# the rest
".*" = "replicated"

# ---- activations
[names]
"hidden" = ["data"]  # rows
"heads" = ["model"]

[optimizer]
"kernel" = ["data", "-"]
"""
    )


@needs_tomlkit
def test_comments_of_what_goes_and_moves(tmp_path: Path) -> None:
    path = write(tmp_path, COMMENTED)
    layout_map = flm.LayoutMap(MESH, overlap="first")
    layout_map[".*"] = None
    layout_map["k/kernel"] = (None, "model")
    layout_map.to_file(path)
    assert list(flm.LayoutMap.from_file(path)) == [".*", "k/kernel"]
    text = path.read_text()
    assert text.index('# the rest\n".*"') < text.index('# column\n"k/kernel" = [')
    assert "[names]" not in text


@needs_tomlkit
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.dictionaries(st.sampled_from(list("abcd")), LAYOUTS, max_size=4),
    after=st.dictionaries(st.sampled_from(list("abcde")), LAYOUTS, max_size=5),
    names=st.booleans(),
    strict=st.booleans(),
)
def test_a_file_with_comments_holds_what_was_written(
    tmp_path: Path, before: Any, after: Any, names: bool, strict: bool
) -> None:
    path = tmp_path / "rules.toml"
    path.unlink(missing_ok=True)
    old = flm.LayoutMap()
    old.update(before)
    old.names["n"] = ("data",)
    old.to_file(path)
    lines = path.read_text().splitlines()
    commented = [line for at, line in enumerate(lines) for line in (f"# {at}", line)]
    write(tmp_path, "\n".join(commented) + "\n# end\n")
    assert flm.LayoutMap.from_file(path) == old
    new = flm.LayoutMap(strict=strict or None)
    new.update(after)
    if names:
        new.names["n"] = ("model",)
    new.to_file(path)
    again = flm.LayoutMap.from_file(path)
    assert again == new and list(again) == list(new)


def test_comments_need_tomlkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = write(tmp_path, COMMENTED)
    layout_map = flm.LayoutMap.from_file(path)
    layout_map.to_file(path)  # nothing to change
    layout_map["new"] = ("data",)
    with pytest.raises(flm.errors.RuleError) as caught:
        layout_map.to_file(path)
    assert str(caught.value) == (
        f"{path}: to keep its comments needs tomlkit; run pip install "
        "'flax-layoutmap[toml]', or write to another file"
    )
    assert path.read_text() == COMMENTED
    layout_map.to_file(write(tmp_path, BASE, "plain.toml"))
    assert flm.LayoutMap.from_file(tmp_path / "plain.toml") == layout_map


def test_what_would_be_lost_is_refused(tmp_path: Path) -> None:
    layout_map = read(tmp_path, VARIANTS)
    with pytest.raises(flm.errors.RuleError) as caught:
        layout_map.to_file(tmp_path / "rules.toml")
    assert str(caught.value) == (
        f"{tmp_path / 'rules.toml'}: holds 'variants', which would be lost; write to "
        "another file, or edit this one by hand"
    )
    assert (tmp_path / "rules.toml").read_text() == VARIANTS


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = write(tmp_path, BASE)
    os.chmod(path, 0o640)
    layout_map = flm.LayoutMap.from_file(path)
    layout_map["new"] = ("data",)
    layout_map.to_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["rules.toml"]
    with pytest.raises(flm.errors.RuleError, match="cannot be written: No such file"):
        layout_map.to_file(tmp_path / "no" / "rules.toml")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("(a+)+", None, "rules, rule 1 '(a+)+': the pattern may take very long: "),
        ("a", ("-",), "rules, rule 1 'a': an axis '-' has a meaning in files"),
    ],
)
def test_what_no_file_can_hold(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    layout_map = flm.LayoutMap()
    layout_map[key] = value
    with pytest.raises(flm.errors.RuleError) as caught:
        layout_map.to_file(tmp_path / "rules.toml")
    assert "these rules cannot be in a file:" in str(caught.value)
    assert message in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_text_that_is_none(tmp_path: Path) -> None:
    layout_map = flm.LayoutMap()
    layout_map["\ud800"] = None
    with pytest.raises(flm.errors.RuleError, match="a pattern is not valid Unicode"):
        layout_map.to_file(tmp_path / "rules.toml")
    with pytest.raises(
        flm.errors.RuleError, match="a file of rules ends in .toml or .json"
    ):
        layout_map.to_file(tmp_path / "rules.yaml")


# ----------------------------------------------------------------------- damage

HEAD = 'schema = 1\nmesh = "data=2,model=4"\n'


def refused(folder: Path, text: str, **options: Any) -> str:
    with pytest.raises(flm.errors.RuleError) as caught:
        read(folder, text, **options)
    return str(caught.value).replace(f"{folder}{os.sep}", "")


def test_every_problem_with_its_line(tmp_path: Path) -> None:
    text = """\
schema = 1
mesh = "data=2,model=4"
macth = "search"
overlap = "frist"
batch = ["dat"]

[rules]
"q/kernel" = ["-", "modle"]
"(" = "replicated"
"b" = { axis = ["model"] }
"c" = 3
up.kernel = ["model"]
"d" = [3]
'(\\d+)+' = ["model"]
"e" = false
"""
    assert refused(tmp_path, text).splitlines() == [
        "11 problems in rules.toml:",
        "  - rules.toml:3: unknown key 'macth'; did you mean 'match'?",
        "  - rules.toml:15: there is no rule 'e' to drop",
        "  - rules.toml:8: rules, 'q/kernel': the layout (None, 'modle') names the "
        "axis 'modle', but the mesh 'data=2,model=4' has no such axis; did you mean "
        "'model'?",
        "  - rules.toml:9: rules, '(': the pattern '(' is not a regular expression: "
        "missing ), unterminated subpattern at position 0; escape special characters "
        "with re.escape(...)",
        "  - rules.toml:10: rules, 'b': unknown key 'axis'; did you mean 'axes'?",
        '  - rules.toml:11: rules, \'c\': axes must be a list such as ["-", "model"], '
        'or "replicated", got 3',
        "  - rules.toml:12: rules, 'up': unknown key 'kernel'; a pattern with a '.' in "
        "it needs quotes",
        "  - rules.toml:13: rules, 'd': a dim is an axis, a list of axes, '-' (not "
        "sharded) or '...' (any number of dims), got 3",
        "  - rules.toml:14: rules, '(\\\\d+)+': the pattern may take very long to try: "
        "a repetition in it can read one text in several ways, so that each further "
        "character doubles the time; write it so that the next character tells how it "
        "goes on: ([^/]+/)* in place of (.*/)*, a{0,9} in place of (a?){9}, [^/]+ in "
        "place of .*; drop .* at the ends",
        "  - rules.toml:4: overlap: overlap must be one of ('error', 'first', 'last'), "
        "got 'frist'; did you mean 'first'?",
        "  - rules.toml:5: batch: the mesh 'data=2,model=4' has no axis 'dat'; did you "
        "mean 'data'?",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rules of schema None cannot be read; this is schema 1; write schema = 1"),
        ("schema = 2", "rules.toml: rules of schema 2 cannot be read; this is"),
        ("schema = true", "rules of schema True cannot be read"),
        ("schema = 1\nx", "rules.toml: is no TOML: Expected '=' after a key"),
        ("a = 1\na = 2", "rules.toml: is no TOML: Cannot overwrite a value"),
        (HEAD + '[rules]\n"a" = ["x"]\n"a" = ["x"]', "is no TOML: Cannot overwrite"),
        ("schema = 1\nextends = 3", "rules.toml:2: extends must be a file or a list"),
        ("schema = 1\nextends = 'no.toml'", "rules.toml:2: extends 'no.toml', but"),
        ("schema = 1\nextends = 'x.py'", "x.py: a file of rules ends in .toml or"),
        ("schema = 1\nextends = 'rules.toml'", "rules.toml: extends itself: "),
        ("schema = 1\nvariants = 3", "rules.toml:2: variants must be tables"),
        ("schema = 1\nvariants.x = 3", "the variant 'x' is no table"),
        ("schema = 1\n[variants.x]\nrule = 1", "rules.toml:3: unknown key 'rule' in "
         "variant 'x'; did you mean 'rules'?"),
        (HEAD + "[variants.x]\nmesh_axes = 'data'", "mesh_axes must be a list of axis"),
        ("schema = 1\nrules = 3", "rules.toml:2: rules must be a table of patterns"),
        ("schema = 1\nrules = [3]", "rules, entry 1: it needs a pattern and axes"),
        ("schema = 1\nmesh = 'data'", "rules.toml:2: mesh: cannot read 'data'"),
        ("schema = 1\nmesh = 'data=-1'", "mesh: an abstract mesh has no devices"),
        ("schema = 1\nmesh = 3", 'mesh: write it as "data=2,model=4", got 3'),
        ("schema = 1\nmesh = { shape = [2] }", "mesh: it needs axis_names and shape"),
        (HEAD + "batch = 3", "batch: batch must be a list of axis names, got 3"),
        (HEAD + "strict = 'yes'", "strict: strict must be one of (None, True, False)"),
        (HEAD + "match = 3", "match: match must be one of"),
        (HEAD + '[rules]\n"a" = {}', "it has no axes; write axes = "),
        (HEAD + '[rules]\n"a" = { axes = [], rank = "skp" }', "did you mean 'skip'?"),
        (HEAD + '[rules]\n"a" = { axes = [], memory_kind = 3 }', "memory_kind must"),
        (HEAD + '[rules]\n"a" = ["data", "data"]', "uses the mesh axis 'data' twice"),
        (HEAD + '[rules]\n"a" = { axes = ["x"], mesh = "y=2" }', "has no such axis"),
        (HEAD + '[rules]\n"a" = [["data", 3]]', "got ['data', 3]"),
        (HEAD + "[rules]\n" + "a" * 100 + " = " + repr("b" * 90), " …"),
        ("schema = 1\nx = " + "[" * 5000, "rules.toml: nested too deeply"),
        ("schema = " + "1" * 5000, "rules.toml: is no TOML: "),
    ],
)  # fmt: skip
def test_damaged_files(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds a list, not a table"),
        ("{", "rules.json: is no JSON: "),
        ('{"schema": 1, "rules": {"a": ["x"], "a": ["y"]}}', "the key 'a' is there"),
        ("[" * 200_000, "rules.json: nested too deeply"),
        ('{"schema": 1, "rules": [{"pattern": "a", "axes": ["x"]}, '
         '{"pattern": "a", "axes": ["y"]}]}', "the pattern 'a' is there twice"),
        ('{"schema": 1,\n"rules": [\n{"pattern": "a", "axes": 3}]}', "rules.json:3: "),
    ],
)  # fmt: skip
def test_damaged_json(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text, "rules.json")
    with pytest.raises(flm.errors.RuleError) as caught:
        flm.LayoutMap.from_file(path)
    assert message in str(caught.value)


def test_no_text_and_no_file(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(flm.errors.RuleError, match="is no TOML: 'utf-8' codec"):
        flm.LayoutMap.from_file(path)
    with pytest.raises(flm.errors.RuleError, match="x.toml: is no file"):
        (tmp_path / "x.toml").mkdir()
        flm.LayoutMap.from_file(tmp_path / "x.toml")
    path.write_bytes(b"\xef\xbb\xbfschema = 1\r\n")  # as some editors write it
    assert len(flm.LayoutMap.from_file(path)) == 0


def test_no_such_variant(tmp_path: Path) -> None:
    assert refused(tmp_path, VARIANTS, variant="serv") == (
        "rules.toml: there is no variant 'serv'; did you mean 'serve'?; it has "
        "'serve', 'experts', 'large'"
    )
    assert "it has none" in refused(tmp_path, BASE, variant="serve")


def test_a_file_is_data(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = (
        f"schema = 1\n[rules]\n\"__import__('os').mkdir('{mark}')\" = \"replicated\"\n"
    )
    assert len(read(tmp_path, text)) == 1
    assert not mark.exists()


# ----------------------------------------------------------------------- limits


def test_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "larger than 1048576 bytes" in refused(tmp_path, "#" * ((1 << 20) + 1))
    monkeypatch.setattr(_rules_file, "MOST_RULES", 2)
    assert "rules.toml: more than 2 rules" in refused(tmp_path, BASE)
    monkeypatch.setattr(_rules_file, "MOST_FILES", 3)
    for number in range(4):
        text = f"schema = 1\nextends = '{number + 1}.toml'\n"
        write(tmp_path, text, f"{number}.toml")
    assert "more than 3 files extend each other" in refused(
        tmp_path, "schema = 1\nextends = '0.toml'\n"
    )


def test_what_is_slow_together(tmp_path: Path) -> None:
    """Each alone may be slow; many of them are refused, when written too."""
    patterns = [f".*a.*b.*c.*{number}" for number in range(10)]
    lines = "".join(f'"{pattern}" = []\n' for pattern in patterns)
    text = refused(tmp_path, f"schema = 1\n[rules]\n{lines}")
    assert "together the patterns may take 2.3e+09 steps on a path of 100 char" in text
    layout_map = flm.LayoutMap.from_rules(dict.fromkeys(patterns))
    with pytest.raises(flm.errors.RuleError, match="together the patterns may take"):
        layout_map.to_file(tmp_path / "other.toml")
    assert len(read(tmp_path, "schema = 1\n[rules]\n" + lines[:40])) == 2


def test_dots(tmp_path: Path) -> None:
    text = "schema = 1\n" + "a." * 33 + "b = 1\n"
    assert "is no TOML: line 2 has more than 32 dots" in refused(tmp_path, text)


def test_cycles(tmp_path: Path) -> None:
    write(tmp_path, "schema = 1\nextends = 'rules.toml'\n", "a.toml")
    assert "a.toml" in refused(tmp_path, "schema = 1\nextends = 'a.toml'\n")


def test_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rules_file, "PATIENCE_SECONDS", -1.0)
    assert refused(tmp_path, BASE).startswith(
        "rules.toml:6: to check the patterns up to here took more than -1 s"
    )


def test_hostile_files_come_back(tmp_path: Path) -> None:
    """Not a measurement: without a bound none of these would come back."""
    evil = ["(a|aa)" * 40, "(a*)*b" * 20, "(.*)(.*)(.*)(.*)(.*)(.*)x", "((a?){9}){9}"]
    evil += ["(?:a?){60}[b]", "(a?){30}[b]", "(?:|a){30}[b]", "(?:){4000000000}"]
    lines = [f"'{pattern}{number}' = []" for number, pattern in enumerate(evil * 50)]
    began = time.thread_time()
    text = refused(tmp_path, "schema = 1\n[rules]\n" + "\n".join(lines))
    assert text.startswith("400 problems in ")
    assert time.thread_time() - began < 60


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(flm.errors.RuleError, match=r"pipe.toml: is no file"):
        flm.LayoutMap.from_file(tmp_path / "pipe.toml")
