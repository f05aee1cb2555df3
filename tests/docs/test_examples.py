"""Each example runs to its end in a process of its own, with tiny settings."""

import re
from pathlib import Path

import forks
import numpy as np
import pytest
from helpers import ROOT

TINY = ("--steps=6", "--batch=8", "--seq=16", "--dim=32", "--layers=1")


def run_example(name: str, *flags: str, devices: int | None = None) -> forks.Done:
    """Runs an example on CPU; `devices=None` leaves their number to the example."""
    more = {"COLUMNS": "120"}
    if devices is not None:
        more["JAX_NUM_CPU_DEVICES"] = str(devices)
    return forks.run([str(ROOT / "examples" / name), *flags], more)


def table_of(output: str) -> tuple[list[int], np.ndarray]:
    """Reads the printed table back: the steps, and the losses of each run."""
    lines = re.findall(r"^│ +(\d+) +│(.*)│$", output, flags=re.MULTILINE)
    losses = [[float(cell) for cell in cells.split("│")] for _, cells in lines]
    return [int(step) for step, _ in lines], np.array(losses)


@pytest.mark.slow
def test_train_lm_continues_on_another_mesh_and_on_one_device(tmp_path: Path) -> None:
    done = run_example("train_lm.py", *TINY, f"--checkpoint-dir={tmp_path}")
    assert done.code == 0, done.err
    assert "layers/0/attention/query/kernel" in done.out  # the report
    for run in ("uninterrupted", "data=4,model=2", "data=1,model=1"):
        assert run in done.out
    steps, losses = table_of(done.out)
    assert steps == [3, 4, 5]
    assert losses.shape == (3, 3)
    assert np.ptp(losses, axis=1).max() < 0.01
    assert np.ptp(losses, axis=0).min() > 0.01  # training moves the loss much more
    assert (tmp_path / "step-3").is_dir()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_train_lm_in_two_processes() -> None:
    done = run_example("multi_host/run_here.py", "--", *TINY)
    assert done.code == 0, done.err
    assert done.out.count("layers/0/attention/query/kernel") == 1, "process 0 prints"
    steps, losses = table_of(done.out)
    assert steps == [3, 4, 5] and losses.shape == (3, 2)
    assert np.ptp(losses, axis=1).max() < 0.01
    alone = run_example("train_lm.py", "--distributed")
    assert alone.code == 2 and "needs a --checkpoint-dir" in alone.err


@pytest.mark.slow
def test_train_lm_on_one_device_says_so() -> None:
    done = run_example("train_lm.py", *TINY, devices=1)
    assert done.code == 0, done.err
    assert "There is only one device" in done.out
    steps, losses = table_of(done.out)
    assert losses.shape == (3, 2)
    assert np.ptp(losses, axis=1).max() < 0.01


@pytest.mark.slow
def test_train_linen_continues_on_another_mesh() -> None:
    done = run_example("train_linen.py", "--steps=6")
    assert done.code == 0, done.err
    assert "attention_{0,1}/query/kernel ×2" in done.out  # the report
    assert "mesh data=2,model=4" in done.out  # where it began
    assert "restored on data=4,model=2" in done.out
    steps, losses = table_of(done.out)
    assert steps == [3, 4, 5]
    assert losses.shape == (3, 2)
    assert np.ptp(losses, axis=1).max() < 0.01


@pytest.mark.slow
def test_load_hugging_face_reads_its_own_checkpoint_and_one_of_transformers() -> None:
    done = run_example("load_hugging_face.py")
    assert done.code == 0, done.err
    assert "'model.safetensors.index.json'" in done.out
    assert re.search(r"model=4: loaded [\d,]+ bytes of files in", done.out)
    assert re.search(
        r"layers/3/attention/out/kernel +\(8, 32, 256\) +\('model', None, 'data'\) +"
        r"\(2, 32, 128\) per device",
        done.out,
    )
    assert "within the tolerance" in done.out
    folder = ROOT / "tests" / "golden" / "hf_llama_sharded"
    done = run_example("load_hugging_face.py", f"--checkpoint={folder}")
    assert done.code == 0, done.err
    assert "data=4,model=2: loaded " in done.out
    assert "within the tolerance" in done.out


def test_layout_that_does_not_fit_ends_the_run_before_anything_is_made() -> None:
    done = run_example("train_lm.py", *TINY, "--heads=2", "--mesh=data=2,model=4")
    assert done.code != 0
    for part in ("layers/0/attention/query/kernel", "(32,2,16)", "'model'", "size 4"):
        assert part in done.err
    assert "tokens/s" not in done.out
