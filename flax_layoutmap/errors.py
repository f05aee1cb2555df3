"""The subclasses of `LayoutError`, for code that distinguishes them.

    LayoutError(ValueError)     everything below
    ├── RuleError               a rule is invalid: a bad regex, value or duplicate key
    ├── MeshError               a mesh cannot be made, is missing, or is abstract
    ├── ResolveError            rules do not fit a tree: rank, divisibility, overlap
    ├── StructureError          a tree has no unique paths, or does not fit another
    ├── CheckpointError         a checkpoint cannot be written, read or used
    └── ProcessError            the processes of one job disagree, or do not connect
    LayoutWarning(UserWarning)  a rule unused, a leaf unmatched, a fallback

`ResolveError` and `CheckpointError` list every problem of a tree in `.problems`.
"""

from flax_layoutmap._core.errors import CheckpointError as CheckpointError
from flax_layoutmap._core.errors import LayoutError as LayoutError
from flax_layoutmap._core.errors import LayoutWarning as LayoutWarning
from flax_layoutmap._core.errors import MeshError as MeshError
from flax_layoutmap._core.errors import ProcessError as ProcessError
from flax_layoutmap._core.errors import ResolveError as ResolveError
from flax_layoutmap._core.errors import RuleError as RuleError
from flax_layoutmap._core.errors import StructureError as StructureError
