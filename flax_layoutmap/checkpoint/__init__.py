"""Save checkpoints with Orbax, and restore them onto any mesh by rules.

`save` writes the leaves of a tree by canonical paths, with the rules in the metadata.
`restore` reads every leaf directly into the shards of the rules (or the target), on
a mesh of any shape, with the user's own objects as target or with none.

A checkpoint is an ordinary Orbax directory: a nested dict whose keys are the parts of
the paths (without the `value` of NNX Variables; numbers as strings), which
`orbax.checkpoint.v1.load` reads with a target of its own; shardings are not stored.
What Orbax does not keep is in its custom metadata, under the key `flax_layoutmap`.
"""

from flax_layoutmap.checkpoint import mappings as mappings
from flax_layoutmap.checkpoint._metadata import CheckpointInfo as CheckpointInfo
from flax_layoutmap.checkpoint._metadata import LeafInfo as LeafInfo
from flax_layoutmap.checkpoint._restore import inspect as inspect
from flax_layoutmap.checkpoint._restore import plan as plan
from flax_layoutmap.checkpoint._restore import resolve as resolve
from flax_layoutmap.checkpoint._restore import restore as restore
from flax_layoutmap.checkpoint._restore import verify as verify
from flax_layoutmap.checkpoint._safetensors_restore import (
    restore_safetensors as restore_safetensors,
)
from flax_layoutmap.checkpoint._safetensors_save import (
    save_safetensors as save_safetensors,
)
from flax_layoutmap.checkpoint._save import save as save
from flax_layoutmap.checkpoint._training import Checkpointer as Checkpointer
