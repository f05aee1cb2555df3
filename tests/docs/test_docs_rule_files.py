"""The page about rule files: its files are read, its code runs, its limits are ours."""

import re
from pathlib import Path

import pytest

import flax_layoutmap as flm
from flax_layoutmap._rules import pattern_cost as _pattern_cost
from flax_layoutmap._rules import rules_file as _rules_file
from flax_layoutmap._rules import serialise as _serialise

PAGE = (Path(__file__).parents[2] / "docs" / "rule_files.md").read_text("utf-8")
BLOCKS = re.findall(r"```(toml|json|python)(?: file=(\S+))?\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    ran = 0
    for kind, name, text in BLOCKS:
        if kind == "python":
            exec(compile(text, "rule_files.md", "exec"), names)
            ran += 1
        else:
            (tmp_path / name).write_text(text, "utf-8")
    assert ran == 4
    assert "lm_head/kernel" in flm.LayoutMap.from_file(tmp_path / "rules.toml")


def test_every_key_is_on_the_page() -> None:
    for key in _rules_file._FILE_KEYS | _rules_file._VARIANT_KEYS:
        assert re.search(rf"`\[?{key}\b|\b{key}\b.* = |`\[variants", PAGE), key
    for key in _serialise._ENTRY_KEYS:
        assert f"{key} = " in PAGE


def test_the_limits_are_those_of_the_code() -> None:
    for text in (
        f"{_rules_file.MOST_BYTES >> 20} MiB a file",
        f"{_rules_file.MOST_FILES} files that extend",
        f"{_rules_file.MOST_RULES:,} rules together",
        f"{_pattern_cost.LONGEST_PATTERN:,} characters a pattern",
        f"{_rules_file.MOST_DOTS} dots in a line",
        f"{_pattern_cost.MOST_STEPS / 1e8:.0f}e8 steps on a path of "
        f"{_pattern_cost.USUAL_PATH} characters",
        f"all patterns of the files {_pattern_cost.MOST_STEPS_TOGETHER / 1e9:.0f}e9",
        f"judging the patterns may take {_rules_file.PATIENCE_SECONDS:.0f} s",
    ):
        assert text in PAGE, text
