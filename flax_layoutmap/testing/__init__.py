"""Test helpers: rules that cover a model, and golden files of layouts.

The fixture `layout_golden` and the flag `--update-layouts` come with the package.
"""

from flax_layoutmap.testing._covers import assert_covers as assert_covers
from flax_layoutmap.testing._golden import assert_golden as assert_golden
from flax_layoutmap.testing._golden import write_golden as write_golden
