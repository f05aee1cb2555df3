"""Real processes over loopback: end to end, values, and disagreements.

The programs are in the folder `multiprocess`. Most are parts, of which many run in one
start of processes; see `launch` there.
"""

import re
import time
from typing import Any

import numpy as np
import pytest
from multiprocess import births, disagree, launch, restores, whole_line

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
    trees = {**whole_line.state_of(state), **dict(births.births())}
    born = both([whole_line.shards(trees, first)])
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
    assert len(born) > (80 if job_part.processes > 2 else 20)
    assert all(len(shards) == 8 for shards in born.values())
    assert born == {path: alone[path] for path in born}
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
        found = whole_line.shards(whole_line.state_of(state), layout_map)
        assert both([found]) == expected
    if job_part.processes == 2:
        # Another mesh shape sums in another order.
        np.testing.assert_allclose(got["resumed"], got["uninterrupted"], rtol=1e-5)
        after = whole_line.train(other, state, 3)
        np.testing.assert_allclose(after, got["uninterrupted"], rtol=1e-5)


@pytest.mark.parametrize("job_part", ["values-2", "values-4"], indirect=True)
def test_host_values_become_global_arrays(job_part: launch.Part) -> None:
    launch.all_hold(job_part.ended, 38)
    # Nothing that was written beside the file is left.
    assert [path.name for path in job_part.folder.iterdir()] == ["rules.toml"]


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
    answers, path = [], job_part.folder / "of these"
    for one in job_part.ended:
        answers.append(one.answer["wrong"])
        assert one.answer["verified"] == 6
        said = one.answer["flipped"]
        assert "1 problem" in said and "not those that were saved" in said
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
    count = job_part.processes
    damaged = "CheckpointError: cannot read the checkpoint"
    for number, said in enumerate(answers):
        told = said["damaged for process 1"]
        if number == 1:
            assert told.startswith(damaged) and "restore another checkpoint" in told
        else:
            assert "not all processes are ready for using what was read" in told
            assert f"process 1 failed: {damaged}" in told
        text = "process 1 differs from process 0 in its"
        assert f"{text} checkpoint" in said["other steps"]
        assert f"{text} broadcast or verify" in said["only one verifies"]
        assert "differs from process 0 in its checkpoint" in said["restore"]
        absent = [*range(count // 2, count)]
        assert f"no device of the processes {absent}" in said["without devices"]
        unseen = ", ".join(map(str, range(1, count)))
        text = f"{unseen} of {count} do not see what process 0 writes to"
        assert f"{text} /proc/self/cwd" in said["save"]
    left = {path.name for path in job_part.folder.glob("home*/*")}
    assert left == {"damaged", "saved", "steps"}, "nothing was written"


@pytest.mark.parametrize(
    "job_part",
    ["disagree-2", pytest.param("disagree-4", marks=pytest.mark.slow)],
    indirect=True,
)
def test_a_process_that_differs_is_named_and_nothing_hangs(
    job_part: launch.Part,
) -> None:
    """All other processes say the same, and process 1 what it has to."""
    answers, folder = [one.answer for one in job_part.ended], job_part.folder
    for case in answers[0]:
        first, differs, *others = (answer[case] for answer in answers)
        assert all(other == first for other in others), case
        if case in disagree.DIFFERENT:
            _, step, parts = disagree.DIFFERENT[case]
            assert first == differs
            assert first.startswith(
                "ProcessError: the processes disagree before "
                f"{step.format(folder=folder)}: process 1 differs from process 0 in "
                f"its {parts}. Build"
            ), (case, first)
        elif case in disagree.FAILING:
            _, error = disagree.FAILING[case]
            error = f"(?s:{error.format(folder=folder)})"
            assert re.match(error, differs), (case, differs)
            assert re.match(
                f"ProcessError: not all processes .*: process 1 failed: {error}", first
            ), (case, first)
        elif case in disagree.ELSEWHERE:
            _, *steps = disagree.ELSEWHERE[case]
            here, there = (str(step).format(folder=folder) for step in steps)
            assert f"disagree before {here}: process 1 is at {there}, not" in first
            assert f"before {there}: process 1 is at {there}, not at {here}" in differs
        else:
            assert first == differs == "fine", case
    assert {"the same", *disagree.FAILING} < set(answers[0])
    assert sorted(path.name for path in folder.iterdir()) == ["saved"]


def test_an_error_in_one_process_ends_the_others() -> None:
    """Not before `shutdown_timeout_seconds`, and then all of them."""
    begin = time.monotonic()
    ended = launch.run("ends", processes=2, devices=1, timeout=60, check=False)
    assert 3 < time.monotonic() - begin < 60
    assert ended[0].code != 0 and ended[1].code != 0
    assert "Shutdown barrier" in ended[0].err
    text = "process 1 failed before creating the model and waits to tell the other"
    assert text in ended[1].err and "ResolveError: 1 leaf does not fit" in ended[1].err


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
