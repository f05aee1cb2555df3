"""Regex rules → sharded models, optimizers and checkpoints, for JAX and Flax.

This package has the names that training scripts use. Submodules are `checkpoint`,
`convert`, `draw`, `pod`, `presets` and `testing`; `dtensor` and `keras` have further
functions of these libraries, and `errors` has the kinds of errors. Names are imported
when they are first used, so `import flax_layoutmap` loads neither JAX nor Flax.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flax_layoutmap import checkpoint as checkpoint
    from flax_layoutmap import convert as convert
    from flax_layoutmap import draw as draw
    from flax_layoutmap import dtensor as dtensor
    from flax_layoutmap import errors as errors
    from flax_layoutmap import keras as keras
    from flax_layoutmap import pod as pod
    from flax_layoutmap import presets as presets
    from flax_layoutmap import testing as testing
    from flax_layoutmap._birth.create import create as create
    from flax_layoutmap._birth.create import create_optimizer as create_optimizer
    from flax_layoutmap._birth.scope import layout_map_scope as layout_map_scope
    from flax_layoutmap._core.errors import LayoutError as LayoutError
    from flax_layoutmap._core.errors import LayoutWarning as LayoutWarning
    from flax_layoutmap._core.layout import TensorLayout as TensorLayout
    from flax_layoutmap._core.mesh import DeviceMesh as DeviceMesh
    from flax_layoutmap._layout_map import LayoutMap as LayoutMap
    from flax_layoutmap._lint.lint import lint as lint
    from flax_layoutmap._place.batch import distribute_batch as distribute_batch
    from flax_layoutmap._place.batch import pad_batch as pad_batch
    from flax_layoutmap._place.dtensor import relayout as relayout
    from flax_layoutmap._place.dtensor import relayout_like as relayout_like
    from flax_layoutmap._place.place import distribute_tensor as distribute_tensor
    from flax_layoutmap._place.reshard import reshard as reshard
    from flax_layoutmap._resolve.resolution import Resolution as Resolution
    from flax_layoutmap._resolve.resolve import resolve as resolve
    from flax_layoutmap._rules.matching import Rule as Rule
    from flax_layoutmap._rules.rules import RuleSet as RuleSet
    from flax_layoutmap._step.accumulate import accumulate as accumulate
    from flax_layoutmap._step.activations import activation_scope as activation_scope
    from flax_layoutmap._step.jit import jit as jit
    from flax_layoutmap._suggest.suggest import Suggestion as Suggestion
    from flax_layoutmap._suggest.suggest import suggest as suggest

    __version__: str

# Public name → the module that defines it; None for a module that is itself public.
_HOMES = {
    "DeviceMesh": "_core.mesh",
    "LayoutError": "_core.errors",
    "LayoutMap": "_layout_map",
    "LayoutWarning": "_core.errors",
    "Resolution": "_resolve.resolution",
    "Rule": "_rules.matching",
    "RuleSet": "_rules.rules",
    "Suggestion": "_suggest.suggest",
    "TensorLayout": "_core.layout",
    "accumulate": "_step.accumulate",
    "activation_scope": "_step.activations",
    "checkpoint": None,
    "convert": None,
    "create": "_birth.create",
    "create_optimizer": "_birth.create",
    "distribute_batch": "_place.batch",
    "distribute_tensor": "_place.place",
    "draw": None,
    "dtensor": None,
    "errors": None,
    "jit": "_step.jit",
    "keras": None,
    "layout_map_scope": "_birth.scope",
    "lint": "_lint.lint",
    "pad_batch": "_place.batch",
    "pod": None,
    "presets": None,
    "relayout": "_place.dtensor",
    "relayout_like": "_place.dtensor",
    "reshard": "_place.reshard",
    "resolve": "_resolve.resolve",
    "suggest": "_suggest.suggest",
    "testing": None,
}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


# Hidden from type checkers, for which any misspelt name would be an `object`.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a public name on its first use (PEP 562) and keep it."""
        if name == "__version__":
            from importlib.metadata import version

            value = version("flax-layoutmap")
        elif name in _HOMES:
            from importlib import import_module

            home = import_module(f"{__name__}.{_HOMES[name] or name}")
            value = getattr(home, name) if _HOMES[name] else home
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The public names, whether or not they have been used yet."""
    return [*__all__, "__version__"]
