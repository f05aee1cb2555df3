"""LayoutMap: a mutable mapping of rules, as a thin wrapper around a RuleSet."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from flax_layoutmap._birth.scope import layout_map_scope
from flax_layoutmap._core.errors import RuleError, did_you_mean
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._place.annotations import settle_metadata
from flax_layoutmap._place.place import place
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.files import (
    read_rules,
    rules_from_json,
    rules_to_json,
    write_rules,
)
from flax_layoutmap._rules.matching import MatchMode, Rule
from flax_layoutmap._rules.rules import (
    OPTIONS,
    SECTIONS,
    Indivisible,
    Overlap,
    RuleSet,
    Unmatched,
    batch_axes,
    make_rules,
)

_MISSING = object()


class _Section(MutableMapping[str, TensorLayout]):
    """Pattern → layout, in order. Only reading (`[]`, `get`) matches patterns."""

    def __init__(self, owner: "LayoutMap", name: str) -> None:
        self._owner = owner
        self._name = name
        self._rules: dict[str, Rule] = {}

    def __getitem__(self, path: str) -> TensorLayout | None:  # type: ignore[override]
        return self.get(path)

    def get(self, path: str, default: Any = None) -> Any:
        """Return the layout of a path: the exact key, a pattern, or else `default`."""
        layout = self._owner.freeze().layout_in(self._name, path)
        return default if layout is None else layout

    def __setitem__(self, key: str, value: Any) -> None:
        self.add(_rule(key, value))

    def add(self, rule: Rule) -> None:
        """Add a rule with options (`rank="skip"`)."""
        if rule.pattern in self._rules:
            raise RuleError(
                f"the key {rule.pattern!r} is already set to "
                f"{self._rules[rule.pattern].layout}; to change it use "
                f".replace({rule.pattern!r}, …), or del it first"
            )
        self._set(rule)

    def replace(self, key: str, value: Any) -> None:
        """Change the layout of an existing key, at the same position."""
        self._need(key)
        self._set(_rule(key, value))

    def _set(self, rule: Rule) -> None:
        mesh = self._owner._mesh
        if mesh is not None and rule.layout.device_mesh is None:
            rule = rule.on(mesh)  # the caller's layout does not change
        self._rules[rule.pattern] = rule
        self._owner._frozen = None

    def __delitem__(self, key: str) -> None:
        self.pop(key)

    def _need(self, key: str) -> None:
        if key not in self._rules:
            raise KeyError(f"no rule {key!r}{did_you_mean(str(key), self._rules)}")

    def pop(self, key: str, default: Any = _MISSING) -> Any:
        """Remove a key and return its layout, or `default` if it is absent."""
        if key not in self._rules and default is not _MISSING:
            return default
        self._need(key)
        self._owner._frozen = None
        return self._rules.pop(key).layout

    def popitem(self) -> tuple[str, TensorLayout]:
        """Remove and return the last rule, as a dict does."""
        key, rule = self._rules.popitem()
        self._owner._frozen = None
        return key, rule.layout

    def setdefault(self, key: str, default: Any = None) -> TensorLayout:
        """Return the layout of an exact key; set it to `default` if it is absent."""
        if key not in self._rules:
            self[key] = default
        return self._rules[key].layout

    def __contains__(self, key: object) -> bool:
        return key in self._rules

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._rules))

    def __len__(self) -> int:
        return len(self._rules)

    def values(self) -> Any:
        """Return the layouts, in order."""
        return [rule.layout for rule in self._rules.values()]

    def items(self) -> Any:
        """Return (pattern, layout) pairs, in order."""
        return [(key, rule.layout) for key, rule in self._rules.items()]

    def update(self, other: Any = (), /, **more: Any) -> None:
        """Add rules from a mapping, pairs, or another map."""
        if isinstance(other, _Section):
            for rule in tuple(other._rules.values()):
                self.add(rule)
            other = ()
        super().update(other, **more)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Section) and self._rules == other._rules

    def __repr__(self) -> str:
        lines = "".join(f"\n  {key!r}: {value}," for key, value in self.items())
        return f"{{{lines}{chr(10) if lines else ''}}}"


class LayoutMap(_Section):
    """Regex rules over leaf paths → layouts.

    This is Keras's `LayoutMap` for JAX and Flax.

    Values: a tuple or list with an entry per dim (`None`, an axis name, a tuple of
    names, or once `...` for any number of dims), a `PartitionSpec`, a `NamedSharding`,
    a `TensorLayout`, or `None` (replicated).

    Reading matches: `layout_map[path]` and `.get(path, default)` look for the exact
    key, then try every pattern, and return None or the default if none matches. All
    other operations use keys literally: `in`, iteration, `len`, `del`, `pop`,
    `setdefault`. Setting an existing key raises; `replace` changes it.

    Patterns see the path of a parameter within its model, `up/kernel`, also in
    `{"policy": model}` and Linen's `params`; a pattern that names the member
    (`^policy/`, `params/up`) also sees the full path. LoRA matrices follow their
    kernel, unless a rule matches them but not the kernel.

    Args:
        device_mesh: the mesh, as anything that `DeviceMesh` accepts; None to add it
            later with `.on(mesh)`.
        match: `"search"` (a pattern matches anywhere in the path), `"match"` (at its
            start, as in tf-keras), `"fullmatch"` (all of it, as in Keras ≥ 3.14).
        overlap: if rules with different layouts match a leaf: `"error"`, or the
            `"first"` or `"last"` wins. Rules with equal layouts do not conflict.
        unmatched: if no rule matches a leaf: `"replicate"` or `"error"`.
        indivisible: if a dim is not divisible by its axes: `"error"`, or `"replicate"`
            this dim (recorded as a fallback).
        batch: mesh axes for the first dim of a batch; None takes the first mesh axis.
        strict: for unused rules and large unmatched leaves: warn once (None), raise
            (True) or do nothing (False, for parts of a model).

    Example:
        >>> import flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
        >>> layout_map["(gate|up)/kernel"] = (None, "model")
        >>> tuple(layout_map["layers/7/mlp/up/kernel"].spec())
        (None, 'model')
    """

    __module__ = "flax_layoutmap"

    def __init__(
        self,
        device_mesh: Any = None,
        *,
        match: MatchMode = "search",
        overlap: Overlap = "error",
        unmatched: Unmatched = "replicate",
        indivisible: Indivisible = "error",
        batch: str | Iterable[str] | None = None,
        strict: bool | None = None,
    ) -> None:
        super().__init__(self, "rules")
        self._options: dict[str, Any] = {
            "match": match,
            "overlap": overlap,
            "unmatched": unmatched,
            "indivisible": indivisible,
            "strict": strict,
        }
        self._mesh = as_mesh(device_mesh)
        self._batch = batch_axes(batch, self._mesh)
        self._frozen: RuleSet | None = None
        self._sections = {name: _Section(self, name) for name in SECTIONS[1:]}
        self.freeze()  # checks the options

    @classmethod
    def from_rules(
        cls,
        rules: Iterable[Any] | Mapping[str, Any],
        device_mesh: Any = None,
        *,
        overlap: Overlap = "first",
        **options: Any,
    ) -> "LayoutMap":
        """Make a map from an ordered list, as in EasyLM, big_vision and T5X.

        `rules` are `(pattern, layout)` pairs or `flm.Rule` objects, or a mapping of
        pattern to layout; the first match wins. `options` are as for `LayoutMap`.
        """
        layout_map = cls(device_mesh, overlap=overlap, **options)
        if isinstance(rules, _Section):
            rules = rules._rules.values()  # with their options
        elif isinstance(rules, Mapping):
            rules = rules.items()
        for rule in make_rules(rules):
            layout_map.add(rule)
        return layout_map

    @classmethod
    def from_rule_set(cls, rules: RuleSet) -> "LayoutMap":
        """Make an editable map from a frozen rule set."""
        layout_map = cls(
            rules.mesh,
            # Without a mesh, `()` means the first axis of a later mesh.
            batch=rules.batch if rules.mesh is not None else rules.batch or None,
            **{name: getattr(rules, name) for name in OPTIONS},
        )
        layout_map._rules.update({rule.pattern: rule for rule in rules.rules})
        for name, section in layout_map._sections.items():
            section._rules.update({rule.pattern: rule for rule in getattr(rules, name)})
        layout_map._frozen = rules  # until the map changes
        return layout_map

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh, or None."""
        return self._mesh

    @property
    def activations(self) -> _Section:
        """Layouts of the outputs of layers, by the paths of their modules.

        A pattern must match up to the end of the path. For a module with several
        outputs, use `mlp/0` or `mlp/name`. Keras's spelling, a key of the map that ends
        in `/output`, works too.
        """
        return self._sections["activations"]

    @property
    def names(self) -> _Section:
        """Layouts by name, for `flm.distribute_tensor(x, "hidden")` in model code."""
        return self._sections["names"]

    @property
    def optimizer(self) -> _Section:
        """Rules for optimizer state, by the paths of parameters (ZeRO-1)."""
        return self._sections["optimizer"]

    def scope(self) -> contextlib.AbstractContextManager[Any, None]:
        """Return `flm.layout_map_scope(self)`, as in tf-keras."""
        return layout_map_scope(self)

    def freeze(self) -> RuleSet:
        """Return the frozen rule set; the same object until the map changes."""
        if self._frozen is None:
            sections: dict[str, Any] = {
                name: tuple(section._rules.values())
                for name, section in self._sections.items()
            }
            self._frozen = RuleSet(
                rules=tuple(self._rules.values()),
                mesh=self._mesh,
                batch=self._batch,
                **self._options,
                **sections,
            )
        return self._frozen

    def on(self, mesh: Any) -> "LayoutMap":
        """Return the same rules on another mesh."""
        return LayoutMap.from_rule_set(self.freeze().on(mesh))

    def copy(self) -> "LayoutMap":
        """Return an independent copy."""
        return LayoutMap.from_rule_set(self.freeze())

    __copy__ = copy

    def resolve(
        self,
        tree: Any,
        *,
        params: Any = None,
        tx: Any = None,
        strict: bool | None = None,
    ) -> Resolution:
        """Resolve the layout of every leaf of a tree; see `flm.resolve`."""
        return resolve(tree, self.freeze(), params=params, tx=tx, strict=strict)

    def shardings(self, tree: Any, *, params: Any = None, tx: Any = None) -> Any:
        """Return a tree of `NamedSharding` with the structure of the given tree.

        For `jax.jit(in_shardings=…, out_shardings=…)`. For a module, it has the
        structure of `nnx.state(module)`. Emits each warning once.
        """
        return self._announced(tree, params, tx).shardings

    def abstract(self, tree: Any, *, params: Any = None, tx: Any = None) -> Any:
        """Return a tree of `jax.ShapeDtypeStruct` with shardings: a restore target."""
        return self._announced(tree, params, tx).abstract()

    def place(self, tree: Any, *, params: Any = None, tx: Any = None) -> Any:
        """Move existing arrays to their layouts; on an error, none is moved.

        `tree` is a module (updated in place and returned), or any tree of arrays;
        `params` and `tx` are as for `flm.resolve`.
        """
        resolution = self._announced(tree, params, tx)
        return settle_metadata(place(tree, resolution), resolution)

    def _announced(self, tree: Any, params: Any, tx: Any) -> Resolution:
        resolution = self.resolve(tree, params=params, tx=tx)
        resolution.announce()
        return resolution

    def explain(self, tree: Any, path: str) -> str:
        """Explain why the leaf at `path` gets its layout; see `Resolution.explain`."""
        return self.resolve(tree).explain(path)

    def to_json(self) -> dict[str, Any]:
        """Return the rules and options as plain JSON values, schema 1."""
        return rules_to_json(self.freeze())

    @classmethod
    def from_json(cls, data: dict[str, Any], *, mesh: Any = None) -> "LayoutMap":
        """Read the values that `to_json` returned; `mesh` as for `from_file`."""
        return cls.from_rule_set(rules_from_json(data, mesh=mesh))

    @classmethod
    def from_file(cls, path: Any, *, mesh: Any = None) -> "LayoutMap":
        """Read rules from a TOML or JSON file; `docs/rule_files.md` has the format.

        `mesh` is the mesh of the rules; None takes the file's mesh, without devices.
        """
        return cls.from_rule_set(read_rules(path, mesh=mesh))

    def to_file(self, path: Any) -> None:
        """Write rules, options and mesh (without devices) as TOML or JSON."""
        write_rules(self.freeze(), path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayoutMap) and self.freeze() == other.freeze()

    def __repr__(self) -> str:
        mesh = "" if self._mesh is None else repr(self._mesh)
        lines = "".join(f"\n  {key!r}: {value}," for key, value in self.items())
        for name, section in self._sections.items():
            for key, value in section.items():
                lines += f"\n  {name}[{key!r}]: {value},"
        return f"LayoutMap({mesh}) {{{lines}{chr(10) if lines else ''}}}"


def _rule(key: str, value: Any) -> Rule:
    """The rule for an entry; a `Rule` as value must have the key as its pattern."""
    if not isinstance(value, Rule):
        return Rule(key, value)
    if value.pattern != key:
        raise RuleError(
            f"the key {key!r} was given a rule for another pattern, {value.pattern!r}; "
            "use .add(rule)"
        )
    return value
