"""Real processes over loopback: end to end, values, and disagreements.

The programs are in the folder `multiprocess`. Most are parts, of which many run in one
start of processes; see `launch` there.
"""

import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multiprocess import births, launch, restores, whole_line

import flax_layoutmap as flm
from flax_layoutmap._core import processes as _processes

pytestmark = pytest.mark.multiprocess


def both(answers: list[Any]) -> dict[str, list[Any]]:
    """Path → shards of all processes, in the order of the mesh."""
    paths = answers[0].keys()
    return {path: sorted(sum((one[path] for one in answers), [])) for path in paths}


@pytest.fixture(scope="module")
def in_one_process() -> tuple[Any, Any, Any]:
    """The whole line's state as it is born, its shards, and its first losses."""
    first = whole_line.rules(whole_line.FIRST)
    state = whole_line.begin(first)
    born = both([whole_line.shards(state, first)])
    return state, born, whole_line.train(first, state, 3)


@pytest.mark.slow
@pytest.mark.parametrize("job_part", ["whole_line-2", "whole_line-4"], indirect=True)
def test_the_whole_line(job_part: launch.Part, in_one_process: Any) -> None:
    ended = job_part.ended
    answers = [one.answer for one in ended]
    got = answers[0]
    for name in ("before", "uninterrupted", "resumed"):
        assert all(one[name] == got[name] for one in answers), name
    assert "embed/embedding" in ended[0].out
    assert not any("embed/embedding" in one.out for one in ended[1:])

    # The same in this one process of eight devices: the same shards, bit for bit.
    state, alone, before = in_one_process
    born = both([one["born"] for one in answers])
    assert len(born) > 20 and all(len(shards) == 8 for shards in born.values())
    assert born == alone
    np.testing.assert_allclose(got["before"], before, rtol=1e-5)

    # And what several processes saved, restored by one, into objects that exist.
    other = whole_line.rules(whole_line.OTHER)
    for layout_map, name in (
        (whole_line.rules(whole_line.FIRST), "saved"),
        (other, "moved"),
    ):
        path = job_part.folder / "checkpoint"
        state = flm.checkpoint.restore(path, state, layout_map=layout_map)
        assert int(state["step"]) == 3
        expected = both([one[name] for one in answers])
        assert both([whole_line.shards(state, layout_map)]) == expected
    if job_part.processes == 2:
        # Another mesh shape sums in another order.
        np.testing.assert_allclose(got["resumed"], got["uninterrupted"], rtol=1e-5)
        after = whole_line.train(other, state, 3)
        np.testing.assert_allclose(after, got["uninterrupted"], rtol=1e-5)


@pytest.mark.parametrize("job_part", ["values-2", "values-4"], indirect=True)
def test_host_values_become_global_arrays(job_part: launch.Part) -> None:
    ended = job_part.ended
    for process, one in enumerate(ended):
        wrong = [
            f"{group}: {check}"
            for group, checks in one.answer.items()
            for check, holds in checks.items()
            if not holds
        ]
        assert not wrong, f"process {process}\n{one}"
    assert sum(len(checks) for checks in ended[0].answer.values()) == 57
    # Nothing that was written beside a file is left.
    names = ["a.html", "a.svg", "layouts.json", "rules.toml"]
    assert sorted(path.name for path in job_part.folder.iterdir()) == names


@pytest.mark.slow
@pytest.mark.parametrize("job_part", ["births-4"], indirect=True)
def test_what_is_born_in_four_processes_is_what_one_makes(
    job_part: launch.Part,
) -> None:
    """Models, random state, counters, optimizers: the same shards, bit for bit."""
    together = both([one.answer for one in job_part.ended])
    alone = births.found()
    assert len(alone) > 80
    assert all(len(shards) == 8 for shards in together.values())
    assert together == both([alone])


@pytest.mark.parametrize(
    ("job_part", "readers"),
    [("restores-4", 4), ("restores-4", 2), ("restores-2", 1)],
    ids=["1-4", "4-2", "2-1"],
    indirect=["job_part"],
)
def test_saved_by_some_processes_and_restored_by_others(
    job_part: launch.Part, readers: int
) -> None:
    """Onto five meshes, each process its shards, or the first replica all."""
    answers = [one.answer for one in job_part.ended]
    path = job_part.folder / "of these"
    if readers == 2:
        ended = launch.run("restores", str(path), processes=2, devices=4)
        answers = [one.answer for one in ended]
    elif readers == 1:
        answers = [restores.restore(path)]
    assert len(answers) == readers
    for number, answer in enumerate(answers):
        assert len(answer) == 10
        for case, wrong in answer.items():
            assert not wrong, (number, case)


@pytest.mark.parametrize("job_part", ["storage-2", "storage-4"], indirect=True)
def test_storage_that_is_not_shared(job_part: launch.Part) -> None:
    answers = [one.answer for one in job_part.ended]
    others = [number for number in range(job_part.processes) if number != 1]
    for number in others:
        well = answers[number]["damaged for process 1"]
        assert "not all processes are ready for using what was read" in well
        assert "process 1 failed: CheckpointError: cannot read the checkpoint" in well
    damaged = answers[1]["damaged for process 1"]
    assert damaged.startswith("CheckpointError: cannot read the checkpoint")
    assert "restore another checkpoint" in damaged
    without = [
        number
        for number in range(job_part.processes)
        if number >= job_part.processes / 2
    ]
    unseen = ", ".join(map(str, range(1, job_part.processes)))
    for said in answers:
        assert "process 1 differs in its checkpoint" in said["other steps"]
        for case in ("only one broadcasts", "only one verifies"):
            assert "process 1 differs in its broadcast or verify" in said[case], case
        text = f"no device of the processes {without}"
        assert text in said["a mesh without devices of some"]
        text = f"{unseen} of {job_part.processes} do not see what process 0 writes to"
        assert f"{text} /proc/self/cwd" in said["save"]
        assert "saving /proc/self/cwd/1, not at saving" in said["another path"]
        assert "differs in its checkpoint" in said["restore"]
    left = {path.name for path in job_part.folder.glob("home*/*")}
    assert left == {"damaged", "saved", "steps"}, "nothing was written"


OTHER_MESH = (
    "process 1 differs in its mesh (DeviceMesh('data=4,model=2') instead of "
    "DeviceMesh('data=2,model=4'))"
)


def first_in(part: str, odd: str, usual: str) -> str:
    return (
        f"; the first difference in the {part}: process 1 has {odd!r}, where process 0 "
        f"has {usual!r}"
    )


KEYS, SCOPE = "keys and constants", "creating the models of a scope"
RULE = "Rule('scale', replicated)"
KERNEL = "kernel (8,8) float32, P(-, {})"
DISAGREEMENTS = {
    "another_rule": (
        "creating the model",
        "process 1 differs in its rules, table"
        + first_in("table", KERNEL.format("data"), KERNEL.format("model")),
    ),
    "another_mesh_shape": ("creating the model", OTHER_MESH),
    "another_device_order": (
        "creating the model",
        "process 1 differs in its mesh (other devices, or another order of them, in "
        "DeviceMesh('data=2,model=4'))",
    ),
    "another_width": (
        "creating the model",
        "process 1 differs in its keys and constants, table"
        + first_in(
            "table",
            "bias (16,) float32, replicated",
            "bias (8,) float32, replicated",
        ),
    ),
    "another_optimizer": (
        "creating the optimizer",
        "process 1 differs in its keys and constants, table"
        + first_in(
            "table",
            "opt_state/0/count () int32, replicated",
            "opt_state/0/trace/bias (8,) float32, replicated device",
        ),
    ),
    "another_rule_in_jit": (
        "the first call of step",
        "process 1 differs in its rules" + first_in("rules", RULE, "nothing"),
    ),
    "another_batch_shape": (
        "the first call of step",
        "process 1 differs in its batch shapes, batch values"
        + first_in("batch shapes", "x (4,8) float32", "x (8,8) float32"),
    ),
    "another_batch": (
        "the first call of step",
        "process 1 differs in its batch values",
    ),
    "another_mesh_to_restore_on": (
        "restoring {folder}/saved",
        OTHER_MESH,
    ),
}
# Case → what comes next, the part, and the line of it with another value.
SEED, INPUT = r"\w+:key<fry>\[\] = random_seed\[impl=fry\] ", r"input \d+: "
OTHER_VALUES = {
    "other_values": ("moving a tree", "values", "kernel: "),
    "another_key_to_place": ("moving a tree", "values", "key: "),
    "another_seed": ("creating the model", KEYS, SEED),
    "another_seed_as_argument": ("creating the model", KEYS, INPUT),
    "another_key_of_one_of_many": ("creating the model", KEYS, INPUT),
    "another_constant": ("creating the model", KEYS, INPUT),
    "another_seed_in_a_scope": (SCOPE, KEYS, INPUT),
    "another_number_in_an_optimizer": ("creating the optimizer", KEYS, INPUT),
    "another_number_in_an_optimizer_of_a_scope": (SCOPE, KEYS, INPUT),
}


def test_a_process_that_differs_is_named_and_nothing_hangs(tmp_path: Path) -> None:
    ended = launch.run(
        "disagree", str(tmp_path), processes=2, devices=4, timeout=90, check=False
    )
    answers = [one.answer for one in ended]
    assert all(answers), "\n".join(map(str, ended))
    assert_that_1_differs(answers, tmp_path)

    # At the end process 1 fails where process 0 does not come: its own error, no hang.
    assert ended[0].code == 0
    assert ended[1].code != 0
    assert "flax_layoutmap.errors.ResolveError: 1 leaf does not fit" in ended[1].err


@pytest.mark.slow
@pytest.mark.parametrize("job_part", ["disagree-4"], indirect=True)
def test_one_of_four_that_differs(job_part: launch.Part) -> None:
    assert_that_1_differs([one.answer for one in job_part.ended], job_part.folder)


def assert_that_1_differs(answers: list[dict[str, list[str]]], folder: Path) -> None:
    """All other processes say the same, and process 1 what it has to."""

    def asked(case: str) -> tuple[list[str], list[str]]:
        """What process 0 says, with the others like it, and process 1."""
        told, own, *others = (one.pop(case) for one in answers)
        assert all(other == told for other in others), case
        return told, own

    for case, (what, difference) in DISAGREEMENTS.items():
        point = what.format(folder=folder)
        message = (
            f"the processes disagree before {point}: {difference}. Build mesh, rules, "
            "model, seeds and global batch from the same values in every process"
        )
        told, own = asked(case)
        assert told == own == ["ProcessError", message], case

    for case, (point, part, start) in OTHER_VALUES.items():
        line = rf"'{start}[^']+'"
        told, own = asked(case)
        assert told == own and told[0] == "ProcessError", case
        assert re.fullmatch(
            rf"the processes disagree before {point}: process 1 differs in its {part}; "
            rf"the first difference in the {part}: process 1 has {line}, where process "
            rf"0 has {line}\. Build mesh, rules, model, seeds and global batch from "
            "the same values in every process",
            told[1],
        ), told[1]
    told, own = asked("another_setting_of_jax")
    assert told == own and told[0] == "ProcessError"
    setting = "jax_enable_x64"
    assert "process 1 differs in its keys and constants, settings of JAX" in told[1]
    assert first_in("settings of JAX", f"{setting}=True", f"{setting}=False") in told[1]

    # A process that fails has its own error, and the others are told of it.
    for case, kind, text in (
        ("a_width_that_does_not_divide", "ResolveError", "dim 1 of size 9 does not"),
        ("a_constructor_that_raises", "FileNotFoundError", "no vocabulary here"),
        ("no_checkpoint_to_restore", "CheckpointError", f"{folder / 'nothing'}"),
    ):
        told, own = asked(case)
        assert own[0] == kind and text in own[1]
        assert told[0] == "ProcessError"
        assert f"process 1 failed: {kind}: " in told[1] and text in told[1]

    for case, points in (
        ("another_point", ("creating the model", "creating the optimizer")),
        (
            "another_path_to_save_to",
            (f"saving {folder / '0'}", f"saving {folder / '1'}"),
        ),
    ):
        apart = f"process 1 is at {points[1]}, not at {points[0]}"
        for (kind, text), point in zip(asked(case), points, strict=True):
            assert kind == "ProcessError"
            assert f"the processes disagree before {point}: {apart}. Build" in text
    assert sorted(path.name for path in folder.iterdir()) == ["saved"]

    own = answers[1].pop("one_comes_late")
    assert own == ["fine", ""]
    every = list(range(len(answers)))
    for number in every[:1] + every[2:]:
        assert answers[number].pop("one_comes_late") == [
            "fine",
            f"process {number} has waited 1 s before creating the model and is "
            f"still waiting: the processes {every} of the mesh must all get here, and "
            "at least one has not",
        ]
    assert all(one == {"all_the_same": ["fine", ""]} for one in answers)


@pytest.mark.slow
def test_an_error_in_one_process_ends_the_others() -> None:
    """Not before `shutdown_timeout_seconds`, and then all of them."""
    begin = time.monotonic()
    ended = launch.run("raises", "3", processes=2, devices=1, timeout=60, check=False)
    assert 3 < time.monotonic() - begin < 60
    assert ended[0].code != 0 and ended[1].code != 0
    assert "Shutdown barrier" in ended[0].err
    assert "KeyError: 'no such file in the data of this process'" in ended[1].err


def word(what: str = "creating the model", **parts: str) -> dict[str, Any]:
    """What a process says."""
    return {"what": what, "mesh": ["data=4", "a1"], "parts": parts, "error": ""}


def test_most_processes_are_right() -> None:
    usual, odd = word(rules="1", table="2"), word(rules="3", table="2")
    assert _processes.differences({at: usual for at in range(4)}) == []
    found = _processes.differences({0: odd, 1: usual, 2: usual, 3: usual})
    assert found == ["process 0 differs in its rules"]
    # Of two, the first one is taken to be right.
    assert _processes.differences({0: odd, 1: usual}) == [
        "process 1 differs in its rules"
    ]
    assert _processes.differences({0: usual, 1: word(rules="1")}) == [
        "process 1 differs in its table"
    ]


def test_a_failure_is_told_before_differences() -> None:
    failed = {**word(), "error": "KeyError: 'x'"}
    assert _processes.differences({0: failed, 1: word(rules="1")}) == [
        "process 0 failed: KeyError: 'x'"
    ]
    assert _processes.differences({0: failed}) == ["process 0 failed: KeyError: 'x'"]


def test_a_process_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(_processes, "_gather", lambda *_: ended.wait(30))
    monkeypatch.setattr(_processes, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(_processes, "LIMIT_SECONDS", 0.2)
    speakers = {0: None, 1: None}
    text = r"waited 0 s before creating the model, and gives up: .* \[0, 1\]"
    with pytest.warns(flm.LayoutWarning, match="is still waiting"):
        with pytest.raises(flm.errors.ProcessError, match=text):
            _processes._exchange(word(), speakers, "creating the model")
    # One that failed is not kept from its own error for long.
    found = _processes._exchange(word(), speakers, "saving", gives_up_after=0.05)
    assert found == {}
    ended.set()


def test_one_process_compares_nothing(mesh: flm.DeviceMesh) -> None:
    asked = []
    with _processes.Agreement("creating the model", mesh) as agreement:
        agreement.add(lambda: asked.append(1) or {})
    assert not asked


def test_the_digest_sees_shapes_dtypes_and_values() -> None:
    ones = np.ones((2, 3), np.float32)
    values = [
        [ones],
        [ones.T],
        [ones.view(np.int32)],
        [ones * 2],
        [np.ones((2, 3))],
        [],
        [ones, ones],
        [3],
        [3.0],
        [np.zeros((0, 2))],
    ]
    digests = [_processes.digest_of_values(leaves) for leaves in values]
    assert len(set(digests)) == len(values)
    assert _processes.digest_of_values([np.ones((3, 2), np.float32).T]) == digests[0]


def test_the_launcher_kills_what_does_not_end() -> None:
    with pytest.raises(launch.LaunchError, match=r"killed after 1 s: processes \[1\]"):
        launch.run("badly", "hangs", processes=2, devices=1, timeout=1)


def test_the_launcher_tells_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.2)
    with pytest.raises(
        launch.LaunchError, match=r"killed after \d s: .*\[0\]"
    ) as caught:
        launch.run("badly", "dies", processes=2, devices=1, timeout=60)
    waited, failed = caught.value.ended
    assert waited.code < 0 and waited.out == "process 0 was here\n"
    assert failed.code == 1 and failed.err == "it could not be done\n"
    assert "process 1 was here" in str(caught.value)


@pytest.mark.slow
def test_a_part_that_fails_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part before has its own answer, and the one after runs in another start."""
    monkeypatch.setattr(launch, "GRACE_SECONDS", 1.0)
    names = ("written", "fails", "relayouts")
    parts = {name: launch.Part(name, 2, names, tmp_path) for name in names}
    with pytest.raises(launch.LaunchError, match="^part fails: .*processes") as caught:
        assert not parts["fails"].ended
    well, failed = caught.value.ended
    assert well.answer == "well" and "ValueError" not in well.err
    assert failed.answer is None and failed.code == 1
    assert "ValueError: no such value" in failed.err
    for name in ("written", "relayouts"):
        assert [one.answer is None for one in parts[name].ended] == [False] * 2
        assert "ValueError" not in parts[name].ended[1].err
    assert parts["written"].folder.parent == parts["fails"].folder.parent
    assert parts["relayouts"].folder.parent != parts["fails"].folder.parent


def test_a_part_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "PART_SECONDS", 3.0)
    begin = time.monotonic()
    with pytest.raises(launch.LaunchError, match="^part hangs: failed") as caught:
        assert not launch.Part("hangs", 1, ("hangs",), tmp_path).ended
    assert time.monotonic() - begin < 60
    (ended,) = caught.value.ended
    assert ended.out == "waits for ever\n"
    assert "Timeout" in ended.err and "hangs.py" in ended.err
