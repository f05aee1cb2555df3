"""Two real processes: each reads its own bytes, and one writes what both hold."""

from pathlib import Path

import numpy as np
import pytest
from multiprocess import launch
from multiprocess.safetensors_parts import tensors
from safetensors.numpy import load_file, save_file

pytestmark = pytest.mark.multiprocess


def test_each_process_reads_its_ranges_and_process_0_writes(tmp_path: Path) -> None:
    arrays = tensors()
    (tmp_path / "in").mkdir()
    save_file(arrays, tmp_path / "in" / "model.safetensors")
    ended = launch.run("safetensors_parts", str(tmp_path), processes=2, devices=4)
    total = sum(value.nbytes for value in arrays.values())
    # Of each block of rows, the other half of the first or of the last row: two tensors
    # of four blocks each.
    unread = 2 * 4 * 16 * 4
    for one in ended:
        read = one.answer["read"]
        assert read == one.answer["planned"]
        for name in (
            "rows",
            "columns",
            "transposed rows",
            "transposed columns",
            "layers",
        ):
            assert read[f"{name}, 0"] == total / 2, name
        for name in ("rows", "transposed rows", "layers"):
            assert read[f"{name}, 32768"] == total / 2, name
        for name in ("columns", "transposed columns"):
            # Narrow columns are cut from whole rows.
            assert read[f"{name}, 32768"] == total - unread, name
        assert read["replicated, 0"] == read["replicated, 32768"] == total
    for name in ("transposed columns", "layers"):
        for gap in (0, 32768):
            folder = tmp_path / f"{name} {gap}"
            found: dict[str, np.ndarray] = {}
            for file in sorted(folder.glob("*.safetensors")):
                found |= load_file(file)
            assert len(list(folder.iterdir())) == 3
            assert found.keys() == arrays.keys()
            for held, value in arrays.items():
                np.testing.assert_array_equal(found[held], value)
    for number, one in enumerate(ended):
        said = one.answer["problems"]
        assert "ProcessError" in said["other rules"]
        assert "differs in its leaves" in said["other rules"]
        assert "nowhere" in said["another place"]
        text = "No space left on device" if number == 0 else "process 0 failed"
        assert said["full"].startswith("CheckpointError: cannot save to")
        assert text in said["full"]
    assert not (tmp_path / "full").exists()
