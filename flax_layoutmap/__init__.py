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
    from flax_layoutmap._activations import activation_scope as activation_scope
    from flax_layoutmap._batch import distribute_batch as distribute_batch
    from flax_layoutmap._batch import pad_batch as pad_batch
    from flax_layoutmap._call import call_with_layout as call_with_layout
    from flax_layoutmap._create import create as create
    from flax_layoutmap._create import create_optimizer as create_optimizer
    from flax_layoutmap._diff import ResolutionDiff as ResolutionDiff
    from flax_layoutmap._errors import CheckpointError as CheckpointError
    from flax_layoutmap._errors import LayoutError as LayoutError
    from flax_layoutmap._errors import LayoutWarning as LayoutWarning
    from flax_layoutmap._errors import MeshError as MeshError
    from flax_layoutmap._errors import ProcessError as ProcessError
    from flax_layoutmap._errors import ResolveError as ResolveError
    from flax_layoutmap._errors import RuleError as RuleError
    from flax_layoutmap._errors import StructureError as StructureError
    from flax_layoutmap._fetch import check_layout as check_layout
    from flax_layoutmap._fetch import fetch_layout as fetch_layout
    from flax_layoutmap._fetch import is_distributed as is_distributed
    from flax_layoutmap._initialize import get_device_count as get_device_count
    from flax_layoutmap._initialize import initialize as initialize
    from flax_layoutmap._initialize import list_devices as list_devices
    from flax_layoutmap._issues import Issue as Issue
    from flax_layoutmap._issues import format_issues as format_issues
    from flax_layoutmap._jit import jit as jit
    from flax_layoutmap._layout import TensorLayout as TensorLayout
    from flax_layoutmap._layout_map import LayoutMap as LayoutMap
    from flax_layoutmap._layout_scope import layout_map_scope as layout_map_scope
    from flax_layoutmap._lint import check as check
    from flax_layoutmap._lint import lint as lint
    from flax_layoutmap._mesh import DeviceMesh as DeviceMesh
    from flax_layoutmap._pack import pack as pack
    from flax_layoutmap._pack import unpack as unpack
    from flax_layoutmap._place import distribute_tensor as distribute_tensor
    from flax_layoutmap._records import ResolvedLeaf as ResolvedLeaf
    from flax_layoutmap._relayout import copy_to_mesh as copy_to_mesh
    from flax_layoutmap._relayout import relayout as relayout
    from flax_layoutmap._relayout import relayout_like as relayout_like
    from flax_layoutmap._resolution import Resolution as Resolution
    from flax_layoutmap._resolve import resolve as resolve
    from flax_layoutmap._rules import Rule as Rule
    from flax_layoutmap._rules import RuleSet as RuleSet
    from flax_layoutmap._scope import default_mesh as default_mesh
    from flax_layoutmap._scope import get_default_mesh as get_default_mesh
    from flax_layoutmap._snapshot import LeafChange as LeafChange

    __version__: str

# Public name → the module that defines it; None for a module that is itself public.
_HOMES = {
    "CheckpointError": "_errors",
    "DeviceMesh": "_mesh",
    "Issue": "_issues",
    "LayoutError": "_errors",
    "LayoutMap": "_layout_map",
    "LayoutWarning": "_errors",
    "LeafChange": "_snapshot",
    "MeshError": "_errors",
    "ProcessError": "_errors",
    "Resolution": "_resolution",
    "ResolutionDiff": "_diff",
    "ResolveError": "_errors",
    "ResolvedLeaf": "_records",
    "Rule": "_rules",
    "RuleError": "_errors",
    "RuleSet": "_rules",
    "StructureError": "_errors",
    "TensorLayout": "_layout",
    "activation_scope": "_activations",
    "call_with_layout": "_call",
    "check": "_lint",
    "check_layout": "_fetch",
    "checkpoint": None,
    "copy_to_mesh": "_relayout",
    "create": "_create",
    "create_optimizer": "_create",
    "default_mesh": "_scope",
    "distribute_batch": "_batch",
    "distribute_tensor": "_place",
    "draw": None,
    "fetch_layout": "_fetch",
    "format_issues": "_issues",
    "get_default_mesh": "_scope",
    "is_distributed": "_fetch",
    "get_device_count": "_initialize",
    "initialize": "_initialize",
    "jit": "_jit",
    "layout_map_scope": "_layout_scope",
    "lint": "_lint",
    "list_devices": "_initialize",
    "pack": "_pack",
    "pad_batch": "_batch",
    "pod": None,
    "relayout": "_relayout",
    "relayout_like": "_relayout",
    "resolve": "_resolve",
    "testing": None,
    "unpack": "_pack",
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
