"""Rules as JSON and in files: there and back, extending files, what is refused."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flax_layoutmap as flm

MESH = flm.DeviceMesh.abstract((2, 4), ("data", "model"))

BASE = """\
schema = 1
mesh = "data=2,model=4"
overlap = "first"

[rules]
"q/kernel" = ["-", "model"]
'layers/\\d+/out' = ["model", "-"]
".*" = "replicated"
"""


def write(folder: Path, text: str, name: str = "rules.toml") -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def read(folder: Path, text: str, **options: Any) -> flm.LayoutMap:
    return flm.LayoutMap.from_file(write(folder, text), **options)


def axes(layout_map: flm.LayoutMap) -> dict[str, Any]:
    return {pattern: layout.axes for pattern, layout in layout_map.items()}


def full_map() -> flm.LayoutMap:
    """One of everything that a rule set can hold."""
    layout_map = flm.LayoutMap(
        MESH,
        match="fullmatch",
        overlap="last",
        unmatched="error",
        indivisible="replicate",
        batch=("data", "model"),
        strict=True,
    )
    layout_map["a"] = (None, "model")
    layout_map["b"] = ((("data", "model")), ..., None)
    layout_map["c"] = None
    layout_map.add(flm.Rule("e", ("data",), rank="skip"))
    layout_map["f"] = flm.TensorLayout(("data",), memory_kind="pinned_host")
    layout_map["g"] = flm.TensorLayout(("x",), flm.DeviceMesh.abstract("x=3"))
    layout_map.activations["mlp"] = ("data", ..., None)
    layout_map.names["hidden"] = ("data", None)
    layout_map.optimizer["kernel"] = ("data", "model")
    return layout_map


# ----------------------------------------------------------------- there and back


def test_json() -> None:
    layout_map = flm.LayoutMap(MESH)
    layout_map["(gate|up)/kernel"] = (None, ("data", "model"))
    layout_map["bias"] = None
    data = layout_map.to_json()
    assert data == {
        "schema": 1,
        "mesh": {
            "axis_names": ["data", "model"],
            "shape": [2, 4],
            "axis_types": ["auto", "auto"],
        },
        "batch": ["data"],
        "match": "search",
        "overlap": "error",
        "unmatched": "replicate",
        "indivisible": "error",
        "strict": None,
        "rules": [
            {"pattern": "(gate|up)/kernel", "axes": [None, ["data", "model"]]},
            {"pattern": "bias", "axes": ["..."]},
        ],
        "activations": [],
        "names": [],
        "optimizer": [],
    }
    there = flm.LayoutMap.from_json(data, mesh="data=4,model=2")
    assert there == layout_map.on("data=4,model=2")


def test_what_is_written(tmp_path: Path) -> None:
    full_map().to_file(tmp_path / "rules.toml")
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
        '"e" = { axes = ["data"], rank = "skip" }\n'
        '"f" = { axes = ["data"], memory_kind = "pinned_host" }\n'
        '"g" = { axes = ["x"], mesh = { axis_names = ["x"], shape = [3], '
        'axis_types = ["auto"] } }\n'
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


def test_json_files(tmp_path: Path) -> None:
    """What `to_json` returns, as a checkpoint holds it, and as a person writes it."""
    layout_map = full_map()
    path = write(tmp_path, json.dumps(layout_map.to_json()), "rules.json")
    assert flm.LayoutMap.from_file(path) == layout_map
    layout_map.to_file(path)
    assert flm.LayoutMap.from_json(json.loads(path.read_text())) == layout_map
    text = json.dumps({"schema": 1, "rules": {"up": [None, "model"], "b": ["-", "x"]}})
    by_hand = flm.LayoutMap.from_file(write(tmp_path, text, "rules.json"))
    assert axes(by_hand) == {"up": (None, "model"), "b": (None, "x")}


AXES = ["data", "model", "a b", "ä"]
MESHES = [
    None,
    flm.DeviceMesh.abstract((2,) * 4, AXES),
    flm.DeviceMesh.abstract((2,) * 4, AXES, axis_types="explicit"),
    flm.DeviceMesh.abstract((2,) * 6, (*AXES, "a=1", " b,c")),
]
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
KEYS = st.lists(
    st.sampled_from(["a", "/", '"', "'", "\n", "\x7f", " ", "ä", ".*", r"\d", "#"]),
    min_size=1,
    max_size=6,
).map("".join)
RULES = st.dictionaries(KEYS, LAYOUTS, max_size=5)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rules=RULES,
    optimizer=RULES,
    skip=KEYS,
    optional=st.booleans(),
    mesh=st.sampled_from(MESHES),
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
    optional: bool,
    mesh: Any,
    options: Any,
    name: str,
) -> None:
    layout_map = flm.LayoutMap(mesh, **options)
    layout_map.update(rules)
    layout_map.optimizer.update(optimizer)
    if skip not in layout_map:
        kind = flm.TensorLayout(("data",), memory_kind="pinned_host")
        layout_map.add(flm.Rule(skip, kind, rank="skip", optional=optional))
    path = tmp_path / name
    path.unlink(missing_ok=True)
    layout_map.to_file(path)
    again = flm.LayoutMap.from_file(path)
    assert again == layout_map
    assert list(again) == list(layout_map)
    before = path.read_bytes()
    again.to_file(path)
    assert path.read_bytes() == before


# ------------------------------------------------------------- extending files


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


def test_replicated_is_one_layout(tmp_path: Path) -> None:
    for value in ('"replicated"', "[]", '["..."]', '["...", "-"]'):
        layout_map = read(tmp_path, f'schema = 1\n[rules]\n"a" = {value}\n')
        assert layout_map["a"] == flm.TensorLayout(None)


def test_optional_is_for_the_rules_of_its_file(tmp_path: Path) -> None:
    table = """\
schema = 1
optional = true
[rules]
"up" = ["-", "model"]
"down" = { axes = ["model", "-"], optional = false }
"""
    write(tmp_path, table, "table.toml")
    text = 'schema = 1\nextends = "table.toml"\n[rules]\n"gate" = ["-", "model"]\n'
    rules = read(tmp_path, text).freeze().rules
    assert {rule.pattern: rule.optional for rule in rules} == {
        "up": True,
        "down": False,
        "gate": False,
    }
    every = flm.LayoutMap.from_file(tmp_path / "table.toml")
    every.replace("down", flm.Rule("down", None, optional=True))
    every.to_file(tmp_path / "table.toml")
    assert "\noptional = true\n" in (tmp_path / "table.toml").read_text()


def test_several_files_and_files_that_extend_one(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    write(tmp_path, 'schema = 1\n[rules]\n"a" = ["x"]\n"b" = ["x"]\n', "one.toml")
    text = 'schema = 1\nextends = "../one.toml"\n[rules]\n"b" = ["y"]\n"c" = ["y"]\n'
    two = write(tmp_path / "inner", text, "two.toml")
    assert list(flm.LayoutMap.from_file(two)) == ["a", "b", "c"]  # new ones behind
    text = json.dumps({"schema": 1, "names": {"h": ["z"]}})
    write(tmp_path, text, "three.json")
    text = f'schema = 1\nextends = ["{two}", "three.json", "one.toml"]\n'
    layout_map = read(tmp_path, text)
    assert axes(layout_map) == {"a": ("x",), "b": ("x",), "c": ("y",)}  # one.toml last
    assert list(layout_map.names) == ["h"]


# ------------------------------------------------------------- replacing a file


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = write(tmp_path, "# mine\n" + BASE)
    os.chmod(path, 0o640)
    layout_map = flm.LayoutMap.from_file(path)
    layout_map["new"] = ("data",)
    layout_map.to_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["rules.toml"]
    assert flm.LayoutMap.from_file(path) == layout_map


def test_what_cannot_be_written(tmp_path: Path) -> None:
    layout_map = flm.LayoutMap()
    layout_map["\ud800"] = None
    for name, text in [
        ("rules.toml", "cannot be written: 'utf-8' codec"),
        ("rules.yaml", "a rule file ends in .toml or"),
        ("no/rules.toml", "cannot be written: .*"),
    ]:
        with pytest.raises(flm.errors.RuleError, match=text):
            layout_map.to_file(tmp_path / name)
    assert os.listdir(tmp_path) == []


# ----------------------------------------------------------------------- damage

HEAD = 'schema = 1\nmesh = "data=2,model=4"\n'


def refused(folder: Path, text: str, name: str = "rules.toml", **options: Any) -> str:
    with pytest.raises(flm.errors.RuleError) as caught:
        flm.LayoutMap.from_file(write(folder, text, name), **options)
    return str(caught.value).replace(f"{folder}{os.sep}", "")


def test_every_wrong_value_with_its_file_and_key(tmp_path: Path) -> None:
    base = """\
schema = 1
overlap = "frist"
[names]
"h" = ["modle"]
"""
    text = """\
schema = 1
extends = "base.toml"
mesh = "data=2,model=4"
batch = ["dat"]

[rules]
"(" = "replicated"
"b" = { axis = ["model"] }
"c" = 3
up.kernel = ["model"]
"d" = [3]
"""
    write(tmp_path, base, "base.toml")
    assert refused(tmp_path, text).splitlines() == [
        "8 problems in rules.toml:",
        "  - rules.toml: batch: batch names the axis 'dat', but the mesh "
        "'data=2,model=4' has no such axis; did you mean 'data'?",
        "  - base.toml: overlap must be one of ('error', 'first', 'last'), got "
        "'frist'; did you mean 'first'?",
        "  - rules.toml: rules, '(': the pattern '(' is not a regular expression: "
        "missing ), unterminated subpattern at position 0; escape special characters "
        "with re.escape(...)",
        "  - rules.toml: rules, 'b': unknown key 'axis'; did you mean 'axes'?",
        '  - rules.toml: rules, \'c\': axes must be a list such as ["-", "model"], '
        'or "replicated", got 3',
        "  - rules.toml: rules, 'up': unknown key 'kernel'; a pattern with a '.' in "
        "it needs quotes",
        "  - rules.toml: rules, 'd': not a layout: [3]; use a tuple such as (None, "
        "'model'), None for replicated, a PartitionSpec, a NamedSharding or a "
        "flm.TensorLayout",
        "  - base.toml: names, 'h': the layout ('modle',) names the axis 'modle', but "
        "the mesh 'data=2,model=4' has no such axis; did you mean 'model'?",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rules.toml: schema must be 1, got None; write schema = 1 in the first"),
        ("schema = 2", "rules.toml: schema must be 1, got 2"),
        ("schema = 1\nx", "rules.toml: cannot be read as TOML: Expected '=' after"),
        ("schema = 1\nup/.* = ['-']", "write patterns in single quotes"),
        ("schema = 1\nmacth = 1", "unknown key 'macth'; did you mean 'match'?"),
        ("schema = 1\nextends = 3", "rules.toml: extends must be a file or a list"),
        ("schema = 1\nextends = 'no.toml'", "no.toml: cannot be read as TOML: [Err"),
        ("schema = 1\nextends = 'x.py'", "x.py: a rule file ends in .toml or .json"),
        ("schema = 1\nextends = 'rules.toml'", "rules.toml: extends itself: "),
        ("schema = 1\nrules = 3", "rules.toml: rules: expected a table of patterns"),
        ("schema = 1\nrules = [3]", "rules.toml: rules: an entry has no pattern: 3"),
        ("schema = 1\n[rules]\na = false", "rules.toml: no rule 'a' to drop"),
        ("schema = 1\nmesh = 'data'", "rules.toml: mesh: "),
        ("schema = 1\nmesh = 3", 'mesh: write it as "data=2,model=4", or with axis_'),
        (HEAD + "batch = [3]", "rules.toml: batch: batch names the axis 3"),
        (HEAD + "strict = 'yes'", "rules.toml: strict must be one of (None, True,"),
        (HEAD + '[rules]\n"a" = {}', "it has no axes; write axes = "),
        (HEAD + '[rules]\n"a" = { axes = [], rank = "skp" }', 'must be "error" or'),
        (HEAD + '[rules]\n"a" = { axes = [], memory_kind = 3 }', "memory_kind must"),
        (HEAD + '[rules]\n"a" = ["data", "data"]', "uses the mesh axis 'data' twice"),
        (HEAD + "[rules]\n" + "a" * 100 + " = " + repr("b" * 90), "bbb...bbb"),
        ("schema = 1\nx = " + "[" * 5000, "rules.toml: cannot be read as TOML: "),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "rules.json: expected a table, got []"),
        ("{", "rules.json: cannot be read as JSON: "),
        ('{"schema": 1, "mesh": {"shape": [2]}}', "rules.json: mesh: write it as"),
        ('{"schema": 1, "rules": [{"axes": []}]}', "an entry has no pattern"),
        ('{"schema": 1, "rules": [{"pattern": "a", "axes": ["x"]}, '
         '{"pattern": "a", "axes": ["y"]}]}', "the pattern 'a' occurs twice"),
    ],
)  # fmt: skip
def test_json_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text, "rules.json")


def test_json_extends_nothing() -> None:
    """As there is no folder that a name would be relative to."""
    for data, text in [(None, "expected a table"), ({"extends": "a"}, "key 'extends'")]:
        with pytest.raises(flm.errors.RuleError, match=f"the rules: .*{text}"):
            flm.LayoutMap.from_json(data and {"schema": 1, **data})  # pyright: ignore


def test_another_mesh_has_to_have_the_axes(tmp_path: Path) -> None:
    assert refused(tmp_path, BASE, mesh="data=8").startswith(
        "rules.toml: rule 'q/kernel': the layout (None, 'model') names the axis"
    )


def test_encodings(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(flm.errors.RuleError, match="cannot be read as TOML: 'utf-8'"):
        flm.LayoutMap.from_file(path)
    path.write_bytes(b"\xef\xbb\xbfschema = 1\r\n")  # as some editors write it
    assert len(flm.LayoutMap.from_file(path)) == 0
