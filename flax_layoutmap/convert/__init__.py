"""Convert the rules of other libraries.

Each function gives every leaf the layout that its source gives it, or raises a
`RuleError` with the entry that cannot be expressed as rules over paths.
"""

from flax_layoutmap.convert._shardings import from_logical, from_shardings
from flax_layoutmap.convert._tables import (
    from_keras,
    from_partition_rules,
    from_tp_plan,
)

__all__ = [
    "from_keras",
    "from_logical",
    "from_partition_rules",
    "from_shardings",
    "from_tp_plan",
]
