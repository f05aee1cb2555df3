"""Regex rules → sharded models, optimizers and checkpoints, for JAX and Flax.

Names are imported when they are first used, so `import flax_layoutmap` alone loads
neither JAX nor Flax.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flax_layoutmap import checkpoint as checkpoint
    from flax_layoutmap import draw as draw
    from flax_layoutmap import pod as pod
    from flax_layoutmap import testing as testing
    from flax_layoutmap._birth.create import create as create
    from flax_layoutmap._birth.create import create_optimizer as create_optimizer
    from flax_layoutmap._birth.layout_scope import layout_map_scope as layout_map_scope
    from flax_layoutmap._core.errors import CheckpointError as CheckpointError
    from flax_layoutmap._core.errors import LayoutError as LayoutError
    from flax_layoutmap._core.errors import LayoutWarning as LayoutWarning
    from flax_layoutmap._core.errors import MeshError as MeshError
    from flax_layoutmap._core.errors import ProcessError as ProcessError
    from flax_layoutmap._core.errors import ResolveError as ResolveError
    from flax_layoutmap._core.errors import RuleError as RuleError
    from flax_layoutmap._core.errors import StructureError as StructureError
    from flax_layoutmap._core.fetch import check_layout as check_layout
    from flax_layoutmap._core.fetch import fetch_layout as fetch_layout
    from flax_layoutmap._core.fetch import is_distributed as is_distributed
    from flax_layoutmap._core.initialize import get_device_count as get_device_count
    from flax_layoutmap._core.initialize import initialize as initialize
    from flax_layoutmap._core.initialize import list_devices as list_devices
    from flax_layoutmap._core.layout import TensorLayout as TensorLayout
    from flax_layoutmap._core.mesh import DeviceMesh as DeviceMesh
    from flax_layoutmap._layout_map import LayoutMap as LayoutMap
    from flax_layoutmap._lint.lint import lint as lint
    from flax_layoutmap._place.batch import distribute_batch as distribute_batch
    from flax_layoutmap._place.batch import pad_batch as pad_batch
    from flax_layoutmap._place.call import call_with_layout as call_with_layout
    from flax_layoutmap._place.pack import pack as pack
    from flax_layoutmap._place.pack import unpack as unpack
    from flax_layoutmap._place.place import distribute_tensor as distribute_tensor
    from flax_layoutmap._place.relayout import copy_to_mesh as copy_to_mesh
    from flax_layoutmap._place.relayout import relayout as relayout
    from flax_layoutmap._place.relayout import relayout_like as relayout_like
    from flax_layoutmap._resolve.resolution import Resolution as Resolution
    from flax_layoutmap._resolve.resolve import resolve as resolve
    from flax_layoutmap._rules.records import ResolvedLeaf as ResolvedLeaf
    from flax_layoutmap._rules.rules import Rule as Rule
    from flax_layoutmap._rules.rules import RuleSet as RuleSet
    from flax_layoutmap._rules.scope import default_mesh as default_mesh
    from flax_layoutmap._rules.scope import get_default_mesh as get_default_mesh
    from flax_layoutmap._show.diff import ResolutionDiff as ResolutionDiff
    from flax_layoutmap._show.snapshot import LeafChange as LeafChange
    from flax_layoutmap._step.activations import activation_scope as activation_scope
    from flax_layoutmap._step.jit import jit as jit

    __version__: str

# Public name → the module that defines it; None for a module that is itself public.
_HOMES = {
    "CheckpointError": "_core.errors",
    "DeviceMesh": "_core.mesh",
    "LayoutError": "_core.errors",
    "LayoutMap": "_layout_map",
    "LayoutWarning": "_core.errors",
    "LeafChange": "_show.snapshot",
    "MeshError": "_core.errors",
    "ProcessError": "_core.errors",
    "Resolution": "_resolve.resolution",
    "ResolutionDiff": "_show.diff",
    "ResolveError": "_core.errors",
    "ResolvedLeaf": "_rules.records",
    "Rule": "_rules.rules",
    "RuleError": "_core.errors",
    "RuleSet": "_rules.rules",
    "StructureError": "_core.errors",
    "TensorLayout": "_core.layout",
    "activation_scope": "_step.activations",
    "call_with_layout": "_place.call",
    "check_layout": "_core.fetch",
    "checkpoint": None,
    "copy_to_mesh": "_place.relayout",
    "create": "_birth.create",
    "create_optimizer": "_birth.create",
    "default_mesh": "_rules.scope",
    "distribute_batch": "_place.batch",
    "distribute_tensor": "_place.place",
    "draw": None,
    "fetch_layout": "_core.fetch",
    "get_default_mesh": "_rules.scope",
    "is_distributed": "_core.fetch",
    "get_device_count": "_core.initialize",
    "initialize": "_core.initialize",
    "jit": "_step.jit",
    "layout_map_scope": "_birth.layout_scope",
    "lint": "_lint.lint",
    "list_devices": "_core.initialize",
    "pack": "_place.pack",
    "pad_batch": "_place.batch",
    "pod": None,
    "relayout": "_place.relayout",
    "relayout_like": "_place.relayout",
    "resolve": "_resolve.resolve",
    "testing": None,
    "unpack": "_place.pack",
}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


# Hidden from type checkers, which would take any misspelt name for an `object`.
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
