"""Real processes over loopback: the whole line, values, and disagreements.

The programs are in the folder `multiprocess`; each test starts one of them once, as a
start costs more than most of what is tested.
"""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint
import pytest
from multiprocess import births, launch, whole_line

import flax_layoutmap as flm
from flax_layoutmap import _processes

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
@pytest.mark.parametrize(("processes", "words"), [(2, ()), (4, ("short",))])
def test_the_whole_line(
    processes: int, words: tuple[str, ...], in_one_process: Any, tmp_path: Path
) -> None:
    ended = launch.run(
        *("whole_line", str(tmp_path), *words),
        processes=processes,
        devices=8 // processes,
    )
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
        path = tmp_path / "checkpoint"
        state = flm.checkpoint.restore(path, state, layout_map=layout_map)
        assert int(state["step"]) == 3
        expected = both([one[name] for one in answers])
        assert both([whole_line.shards(state, layout_map)]) == expected
    if not words:
        # Another mesh shape sums in another order.
        np.testing.assert_allclose(got["resumed"], got["uninterrupted"], rtol=1e-5)
        after = whole_line.train(other, state, 3)
        np.testing.assert_allclose(after, got["uninterrupted"], rtol=1e-5)


@pytest.mark.parametrize("processes", [2, 4])
def test_host_values_become_global_arrays(processes: int, tmp_path: Path) -> None:
    ended = launch.run(
        "values", str(tmp_path), processes=processes, devices=8 // processes
    )
    for process, one in enumerate(ended):
        wrong = [
            f"{group}: {check}"
            for group, checks in one.answer.items()
            for check, holds in checks.items()
            if not holds
        ]
        assert not wrong, f"process {process}\n{one}"
    assert sum(len(checks) for checks in ended[0].answer.values()) == 51
    # Nothing that was written beside a file is left.
    names = ["a.html", "a.json", "a.txt", "layouts.json", "rules.toml"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.slow
def test_what_is_born_in_four_processes_is_what_one_makes() -> None:
    """Models, random state, counters, optimizers: the same shards, bit for bit."""
    ended = launch.run("births", processes=4, devices=2)
    together = both([one.answer for one in ended])
    alone = births.found()
    assert len(alone) > 80
    assert all(len(shards) == 8 for shards in together.values())
    assert together == both([alone])


@pytest.mark.parametrize(
    ("savers", "readers", "strategies"),
    [
        (1, 4, ["direct", "aligned", "broadcast", "auto"]),
        (4, 2, ["aligned", "auto"]),
        (2, 1, ["aligned", "auto"]),
    ],
    ids=["1-4", "4-2", "2-1"],
)
def test_saved_by_some_processes_and_restored_by_others(
    savers: int, readers: int, strategies: list[str], tmp_path: Path
) -> None:
    """Onto five meshes: the values, and the bytes that were planned."""
    path = str(tmp_path / "a")
    launch.run("restores", "save", path, processes=savers, devices=8 // savers)
    ended = launch.run(
        *("restores", "restore", path, *strategies),
        processes=readers,
        devices=8 // readers,
    )
    assert len(ended[0].answer) == 5 * len(strategies)
    for number, one in enumerate(ended):
        for case, found in one.answer.items():
            assert not found["wrong"], (number, case)
            planned, read = found["planned"], found["read"]
            # The metadata is read too. Chunks that several devices of a process need
            # are read once or more, as the reads happen to meet.
            repeats = (
                8 // readers if set(found["strategies"].values()) != {"aligned"} else 1
            )
            assert planned * 0.99 <= read <= planned * repeats * 1.01 + 40_000, case
        aligned = one.answer["columns aligned"]
        assert aligned["read"] <= 1.05 * aligned["needed"] + 40_000
        assert set(aligned["strategies"].values()) == {"aligned"}


def test_storage_that_is_not_shared(tmp_path: Path) -> None:
    for process in range(2):
        layout_map = flm.LayoutMap("x=8", strict=False)
        layout_map["w"] = ("x",)
        tree = {"w": np.arange(8.0, dtype=np.float32) + process}
        flm.checkpoint.save(
            tmp_path / str(process), layout_map.place(tree), layout_map=layout_map
        )
    v1: Any = orbax.checkpoint.v1
    v1.save(tmp_path / "plain", {"w": np.ones(8, np.float32)})
    random = np.random.default_rng(0).random(8192, np.float32)
    v1.save(tmp_path / "large", {"w": random})
    ended = launch.run("storage", str(tmp_path), processes=2, devices=4)
    well, damaged = (one.answer["damaged for process 1"] for one in ended)
    assert "not all processes are ready for using what was read" in well
    assert "process 1 failed: CheckpointError: cannot read the checkpoint" in well
    assert damaged.startswith("CheckpointError: cannot read the checkpoint")
    assert "leaf 'w'" in damaged
    for one in ended:
        assert "process 1 differs in its checkpoint" in one.answer["other steps"]
        for case in ("other strategies", "only one verifies"):
            assert "differs in its strategy, host_memory or verify" in one.answer[case]
        assert one.answer["other limits"] == "nothing"  # the portions are the same
        assert (
            "no device of the processes [1]"
            in one.answer["a mesh without devices of process 1"]
        )
        assert (
            "process 1 of 2 do not see what process 0 writes to /proc/self/cwd"
            in one.answer["save"]
        )
        assert "saving /proc/self/cwd/1, not at saving" in one.answer["another path"]
        assert "process 1 differs in its checkpoint" in one.answer["restore"]
    left = {path.name for path in tmp_path.glob("home*/*")}
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


RULE = "rules 3: {'pattern': 'scale', 'axes': ['...']}"
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
        "process 1 differs in its table"
        + first_in(
            "table",
            "bias (16,) float32, replicated",
            "bias (8,) float32, replicated",
        ),
    ),
    "another_optimizer": (
        "creating the optimizer",
        "process 1 differs in its table"
        + first_in(
            "table",
            "opt_state/0/count () int32, replicated",
            "opt_state/0/trace/bias (8,) float32, replicated, device",
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
    "other_values": ("moving a tree", "process 1 differs in its values"),
}


def test_a_process_that_differs_is_named_and_nothing_hangs(tmp_path: Path) -> None:
    ended = launch.run(
        "disagree", str(tmp_path), processes=2, devices=4, timeout=90, check=False
    )
    first, second = (one.answer for one in ended)
    assert first and second, "\n".join(map(str, ended))
    for case, (what, difference) in DISAGREEMENTS.items():
        point = what.format(folder=tmp_path)
        message = (
            f"the processes disagree before {point}: {difference}. Build mesh, rules, "
            "model and global batch from the same values in every process"
        )
        assert first.pop(case) == second.pop(case) == ["ProcessError", message], case

    # A process that fails has its own error, and the other one is told of it.
    for case, kind, text in (
        ("a_width_that_does_not_divide", "ResolveError", "dim 1 of size 9 does not"),
        ("a_constructor_that_raises", "FileNotFoundError", "no vocabulary here"),
        ("no_checkpoint_to_restore", "CheckpointError", f"{tmp_path / 'nothing'}"),
    ):
        told, own = first.pop(case), second.pop(case)
        assert own[0] == kind and text in own[1]
        assert told[0] == "ProcessError"
        assert f"process 1 failed: {kind}: " in told[1] and text in told[1]

    for case, points in (
        ("another_point", ("creating the model", "creating the optimizer")),
        (
            "another_path_to_save_to",
            (f"saving {tmp_path / '0'}", f"saving {tmp_path / '1'}"),
        ),
    ):
        for answers, point in zip((first, second), points, strict=True):
            kind, text = answers.pop(case)
            assert kind == "ProcessError"
            apart = f"process 1 is at {points[1]}, not at {points[0]}"
            assert f"the processes disagree before {point}: {apart}. Build" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]

    assert first.pop("one_comes_late") == [
        "fine",
        "process 0 has waited 1 s before creating the model and goes on waiting: the "
        "processes [0, 1] of the mesh must all come here, and at least one has not",
    ]
    assert second.pop("one_comes_late") == ["fine", ""]
    assert first == second == {"all_the_same": ["fine", ""]}

    # At the end process 1 fails where process 0 does not come: its own error, no hang.
    assert ended[0].code == 0
    assert ended[1].code != 0
    assert "flax_layoutmap.ResolveError: 1 leaf does not fit" in ended[1].err


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
    with pytest.warns(flm.LayoutWarning, match="goes on waiting"):
        with pytest.raises(flm.ProcessError, match=text):
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
