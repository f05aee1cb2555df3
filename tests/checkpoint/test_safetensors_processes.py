"""Real processes: each reads only its bytes, and one writes the whole tree."""

import numpy as np
import pytest
from multiprocess import launch
from multiprocess.safetensors_parts import scaled_tensors, tensors
from safetensors.numpy import load_file

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(
    "job_part",
    [
        "safetensors_parts-2",
        pytest.param("safetensors_parts-4", marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_each_process_reads_its_ranges_and_process_0_writes(
    job_part: launch.Part,
) -> None:
    arrays, scaled = tensors(), scaled_tensors()
    total = sum(value.nbytes for value in arrays.values())
    needed = total / job_part.processes
    row = 4 * 32
    # Bytes of each process for two tensors, where narrow columns are cut from whole
    # rows: what is before and after them in a block of rows is left out.
    if job_part.processes == 2:
        rows = needed
        # Four blocks of 16 rows, and half the columns of each.
        columns = total - 2 * 4 * row / 2
    else:
        # One block of 32 rows, and half the columns.
        rows = total / 2 - 2 * row / 2
        # Two blocks of 16 rows, and half the columns of each.
        columns = total / 2 - 2 * 2 * row / 2
    for one in job_part.ended:
        read = one.answer["read"]
        assert read == one.answer["planned"]
        for name in (
            "rows",
            "columns",
            "transposed rows",
            "transposed columns",
            "layers",
        ):
            assert read[f"{name}, 0"] == needed, name
        assert read["layers, 32768"] == needed
        for name in ("rows", "transposed rows"):
            assert read[f"{name}, 32768"] == rows, name
        for name in ("columns", "transposed columns"):
            assert read[f"{name}, 32768"] == columns, name
        assert read["replicated, 0"] == read["replicated, 32768"] == total
        # Half of the weights; and half of the scales, but those of float8 are few.
        assert one.answer["scaled"] == {
            name: sum(scaled[tensor].nbytes // parts for tensor, parts in of.items())
            for name, of in {
                "kept": {"w": 2, "w_scale_inv": 2},
                "float8": {"w": 2, "w_scale_inv": 1},
                "MXFP4": {"e_blocks": 2, "e_scales": 2},
            }.items()
        }
    for name in ("transposed columns", "layers"):
        for gap in (0, 32768):
            folder = job_part.folder / f"{name} {gap}"
            found: dict[str, np.ndarray] = {}
            for file in sorted(folder.glob("*.safetensors")):
                found |= load_file(file)
            assert len(list(folder.iterdir())) == 3
            assert found.keys() == arrays.keys()
            for held, value in arrays.items():
                np.testing.assert_array_equal(found[held], value)
    for number, one in enumerate(job_part.ended):
        said = one.answer["problems"]
        assert "ProcessError" in said["other rules"]
        assert "differs in its leaves" in said["other rules"]
        assert "nowhere" in said["another place"]
        text = "No space left on device" if number == 0 else "process 0 failed"
        assert said["full"].startswith("CheckpointError: cannot save to")
        assert text in said["full"]
    assert not (job_part.folder / "full").exists()
