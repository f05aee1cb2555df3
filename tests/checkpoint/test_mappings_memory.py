"""Memory that loading takes, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mapped_families import FAMILIES, heads
from safetensors.numpy import save_file

# A Llama of 230 MiB, in bfloat16.
SIZES = heads(6, 8192, 1024, 16, 16, 64, 4096)

LOAD = """
import json, sys
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import flax_layoutmap as flm

def resident(name):
    # `ru_maxrss` begins with the memory of the process that forked.
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


folder, leaves = sys.argv[1], json.loads(sys.argv[2])
rules = flm.presets.load("llama", "fsdp=2,tensor=4")
target: dict = {}
for path, shape in leaves.items():
    *parents, last = path.split("/")
    node = target
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = jax.ShapeDtypeStruct(shape, "bfloat16")
mapping = flm.checkpoint.mappings.llama()
jax.block_until_ready(jax.numpy.zeros(8) + 1)
before = resident("VmRSS")
model = flm.checkpoint.restore_safetensors(
    folder, target, layout_map=rules, mapping=mapping
)
jax.block_until_ready(model)
grown = resident("VmHWM") - before
held = sum(s.data.nbytes for x in jax.tree.leaves(model) for s in x.addressable_shards)
print(json.dumps({"grown": grown, "held": held}))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="Linux says what a process had."
)
def test_a_load_takes_little_more_than_the_shards(tmp_path: Path) -> None:
    """A loader that holds each tensor twice, or the file, would take twice as much."""
    family = FAMILIES["llama"]
    made: dict[str, Any] = {
        name: np.full(shape, 1.5, ml_dtypes.bfloat16)
        for name, shape in family.stored(SIZES).items()
    }
    save_file(made, tmp_path / "model.safetensors")
    command = [
        sys.executable,
        "-c",
        LOAD,
        str(tmp_path),
        json.dumps(family.model(SIZES, False)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    largest = max(value.nbytes for value in made.values())
    total = sum(value.nbytes for value in made.values())
    # Norms are small, and are on all eight devices.
    assert total <= found["held"] < 1.01 * total
    assert 0.8 * total < found["grown"] < 1.3 * total + largest
