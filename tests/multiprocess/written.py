"""Meshes and layouts as text and bytes, written and read in every process.

A part (see `launch`).
"""

import pickle
from pathlib import Path
from typing import Any

import flax_layoutmap as flm

MESH = flm.DeviceMesh("data=2,model=4")
LAYOUT = flm.TensorLayout((None, ("model", "data")), MESH)


def main(folder: Path) -> dict[str, Any]:
    return {
        "text": MESH.to_string(),
        "bytes": MESH.as_proto().SerializeToString().hex(),
        "pickle": pickle.dumps(LAYOUT).hex(),
        "ids": MESH.local_device_ids(),
        "places": MESH.local_device_locations(),
        "offsets": LAYOUT.offset_to_shard(),
        "again": [
            flm.TensorLayout.from_string(LAYOUT.to_string()) == LAYOUT,
            flm.TensorLayout.from_str(LAYOUT.serialized_string()) == LAYOUT,
            pickle.loads(pickle.dumps(LAYOUT)) == LAYOUT,
            flm.DeviceMesh.from_string(MESH.to_string()) == MESH,
        ],
    }
