"""Rules from those of other libraries.

Each function gives the answers of its source, leaf by leaf, or raises a `RuleError`
that names the entry which rules by paths cannot express.
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
