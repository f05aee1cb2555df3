"""Which rule lays out the output of a module: `activations`, and Keras's `…/output`."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from flax_layoutmap._core.axes import divisible
from flax_layoutmap._core.errors import RuleError, closest
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._resolve.lay import CONFLICT_FIX
from flax_layoutmap._rules.matching import (
    Matcher,
    Rule,
    is_for_outputs,
)
from flax_layoutmap._rules.records import Remark, news
from flax_layoutmap._rules.rules import RuleSet

# The path of a module or of an output in all its forms (see `paths.forms`); messages
# show the first.
Path = tuple[str, ...]


class OutputRule(NamedTuple):
    """A rule, its name in messages, and what its pattern has after the path."""

    rule: Rule
    name: str
    end: str


class OutputRules:
    """The rules for outputs, and which modules there are.

    Attributes:
        rules: the rule set.
        is_called: whether the module at a path was called.
    """

    def __init__(self, rules: RuleSet) -> None:
        self.is_called: dict[Path, bool] = {}
        self.rules = rules
        self._rules = [
            OutputRule(rule, f"{kind} {at + 1} {rule.pattern!r}", end)
            for kind, section, end in (
                ("activation rule", rules.activations, ""),
                ("rule", rules.rules, "/output"),
            )
            for at, rule in enumerate(section)
            if not end or is_for_outputs(rule)
        ]
        self._chosen: dict[Path, OutputRule | None] = {}

    def learn(self, parameters: Iterable[str]) -> None:
        """Drop rules `…/output` of the map that are for these parameters."""
        own = [x for x in self._rules if x.end]
        if own:
            matcher = Matcher([x.rule for x in own], self.rules.match)
            used = {own[at] for path in parameters for at in matcher.matching(path)}
            self._rules = [x for x in self._rules if x not in used]
            self._chosen.clear()

    def rule_of(self, path: Path) -> OutputRule | None:
        """The rule for an output, activations first."""
        if path not in self._chosen:
            some = self._matching(path, "") or self._matching(path, "/output")
            rules = [x.rule for x in some]
            winner = self.rules.winner(rules, range(len(rules))) if rules else None
            if rules and winner is None:
                listed = ", ".join(f"{x.name} → {x.rule.layout}" for x in some)
                raise RuleError(
                    "rules with different layouts match the output of "
                    f"{path[0]!r}: {listed}; {CONFLICT_FIX}"
                )
            self.rules._fired.update(map(id, rules))
            self._chosen[path] = None if winner is None else some[winner]
        return self._chosen[path]

    def _matching(self, path: Path, end: str) -> Sequence[OutputRule]:
        """The rules of one section that match an output."""
        some = [x for x in self._rules if x.end == end]
        forms = [form + end for form in path]
        matcher = Matcher([x.rule for x in some], self.rules.match, to_end=True)
        return [some[at] for at in matcher.match(forms).rules]

    def layout_of(self, rule: Rule, shape: tuple[int, ...]) -> TensorLayout:
        """The layout of a rule on the mesh; `indivisible` may replicate some dims."""
        layout = rule.layout
        layout = layout if layout.device_mesh else layout.on(self.rules.mesh)
        if self.rules.indivisible == "error" or layout.device_mesh is None:
            return layout
        sizes = layout.device_mesh.axis_sizes
        dims, _ = divisible(shape, layout.dims(len(shape)), sizes)
        return TensorLayout(dims, layout.device_mesh, memory_kind=layout.memory_kind)

    def report_unused(self, report: Callable[[str], None]) -> None:
        """Report once the rules that match no module, now and in earlier calls.

        If some modules were not called, a rule may be for one of their outputs, and is
        no error.
        """
        rules, paths = self.rules, list(self.is_called)
        unused = [
            x.rule.pattern
            for x in self._rules
            if not x.rule.optional and id(x.rule) not in rules._fired
            if not any(x in self._matching(path, x.end) for path in paths)
        ]
        if not unused or not paths or rules.strict is False:
            return
        known = [path[0] for path in paths]
        listed = [
            repr(pattern)
            + "".join(
                f"; the closest is {path!r}"
                for path in closest(pattern.removesuffix("/output"), known)
            )
            for pattern in unused
        ]
        text = (
            f"activation rules that match the output of no module: {', '.join(listed)}"
        )
        if rules.strict and all(self.is_called.values()):
            raise RuleError(f"strict: {text}")
        keys = frozenset(f"no output: {' '.join(unused)}: {path[-1]}" for path in paths)
        for new in news(rules, [Remark(text, keys)]):
            report(new)
