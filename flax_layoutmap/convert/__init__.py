"""Rules from those of other libraries, and back.

Each function gives the answers of its source, leaf by leaf, or raises a `RuleError`
that names the entry which cannot be said.
"""

from flax_layoutmap.convert._keras import from_keras as from_keras
from flax_layoutmap.convert._keras import to_keras as to_keras
from flax_layoutmap.convert._logical import from_logical as from_logical
from flax_layoutmap.convert._partition_rules import (
    from_partition_rules as from_partition_rules,
)
from flax_layoutmap.convert._partition_rules import (
    to_partition_rules as to_partition_rules,
)
from flax_layoutmap.convert._shardings import from_shardings as from_shardings
from flax_layoutmap.convert._tp_plan import from_tp_plan as from_tp_plan
from flax_layoutmap.convert._tp_plan import to_tp_plan as to_tp_plan

__all__ = [
    "from_keras",
    "from_logical",
    "from_partition_rules",
    "from_shardings",
    "from_tp_plan",
    "to_keras",
    "to_partition_rules",
    "to_tp_plan",
]
