"""Rules from those of other libraries, and back.

Each function returns a `LayoutMap` whose answers are those of the source, leaf by leaf,
or raises a `RuleError` that names the entry which cannot be said.
"""

from flax_layoutmap.convert._shardings import from_shardings as from_shardings

__all__ = ["from_shardings"]
