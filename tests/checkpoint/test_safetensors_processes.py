"""Real processes: each reads its own shards, and one writes the whole tree."""

import numpy as np
import pytest
from multiprocess import launch
from multiprocess.safetensors_parts import tensors
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
def test_each_process_reads_its_shards_and_process_0_writes(
    job_part: launch.Part,
) -> None:
    for name in ("columns", "layers"):
        found: dict[str, np.ndarray] = {}
        for file in sorted((job_part.folder / name).glob("*.safetensors")):
            found |= load_file(file)
        assert len(list((job_part.folder / name).iterdir())) == 3
        assert found.keys() == {"h.0.w", "h.1.w"}
        for held, value in found.items():
            np.testing.assert_array_equal(value, tensors()[held])
    for number, process in enumerate(job_part.ended):
        said = process.answer["problems"]
        assert "ProcessError" in said["other rules"]
        assert "differs from process 0 in its leaves" in said["other rules"]
        assert "nowhere" in said["another place"]
        text = "No space left on device" if number == 0 else "process 0 failed"
        assert said["full"].startswith("CheckpointError: cannot save to")
        assert text in said["full"]
    assert not list((job_part.folder / "full").iterdir())
