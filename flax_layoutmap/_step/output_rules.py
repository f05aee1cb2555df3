"""Which rule lays out the output of a module: `activations`, and Keras's `…/output`."""

from collections.abc import Callable, Iterable

from flax_layoutmap._core.errors import RuleError, closest
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._resolve.lay import divisible
from flax_layoutmap._rules.matching import (
    Matcher,
    Rule,
    is_for_outputs,
    reaching_the_end,
)
from flax_layoutmap._rules.rules import Remark, RuleSet, news

# The path of a module or of an output in all its forms (see `paths.forms`); messages
# show the first.
Path = tuple[str, ...]


class OutputRules:
    """The rules for outputs, and which modules there are.

    Attributes:
        rules: the rule set.
        is_called: whether the module at a path was called.
    """

    def __init__(self, rules: RuleSet) -> None:
        self.is_called: dict[Path, bool] = {}
        self.rules = rules
        # Rules in Keras's spelling, except those for parameters (see `learn`).
        self._outputs = [rule for rule in rules.rules if is_for_outputs(rule)]
        self._chosen: dict[Path, Rule | None] = {}

    def learn(self, parameters: Iterable[str]) -> None:
        """Drop rules `…/output` of the map that are for these parameters."""
        if self._outputs:
            matcher = Matcher(self._outputs, self.rules.match)
            used = {at for path in parameters for at in matcher.matching(path)}
            kept = [rule for at, rule in enumerate(self._outputs) if at not in used]
            self._outputs = kept
            self._chosen.clear()

    def rule_of(self, path: Path) -> Rule | None:
        """The rule for an output, activations first."""
        if path not in self._chosen:
            rules = self._matching(path)
            winner = self.rules.winner(rules, range(len(rules))) if rules else None
            if rules and winner is None:
                listed = (f"{rule.pattern!r} → {rule.layout}" for rule in rules)
                raise RuleError(
                    "rules with different layouts match the output of "
                    f"{path[0]!r}: {', '.join(listed)}; "
                    'make one narrower, or use overlap="first" or "last"'
                )
            self._chosen[path] = None if winner is None else rules[winner]
        return self._chosen[path]

    def _matching(self, path: Path) -> list[Rule]:
        """The rules for an output, and record that they match one."""
        outputs = [f"{form}/output" for form in path]
        for rules, names in (self.rules.activations, path), (self._outputs, outputs):
            at = reaching_the_end(rules, self.rules.match, names)
            if at:
                self.rules._caches.fired.update(id(rules[number]) for number in at)
                return [rules[number] for number in at]
        return []

    def layout_of(self, rule: Rule, shape: tuple[int, ...]) -> TensorLayout:
        """The layout of a rule on the mesh; `indivisible` may replicate some dims."""
        layout = (
            rule.layout if rule.layout.device_mesh else rule.layout.on(self.rules.mesh)
        )
        if self.rules.indivisible == "error" or layout.device_mesh is None:
            return layout
        sizes = layout.device_mesh.axis_sizes
        dims, _ = divisible(layout.dims(len(shape)), shape, sizes)
        return TensorLayout(dims, layout.device_mesh, memory_kind=layout.memory_kind)

    def report_unused(self, report: Callable[[str], None]) -> None:
        """Report once the rules that match no module, now and in earlier calls.

        If some modules were not called, a rule may be for one of their outputs, and is
        no error.
        """
        rules, paths = self.rules, list(self.is_called)
        unused = [
            rule.pattern
            for end, some in (("", rules.activations), ("/output", self._outputs))
            for rule in some
            if not rule.optional
            and id(rule) not in rules._caches.fired
            and not any(
                reaching_the_end([rule], rules.match, [form + end for form in path])
                for path in paths
            )
        ]
        if not unused or not paths or rules.strict is False:
            return
        known = [path[0] for path in paths]
        near = [closest(pattern.removesuffix("/output"), known) for pattern in unused]
        listed = [
            repr(pattern) + "".join(f"; the closest is {path!r}" for path in found)
            for pattern, found in zip(unused, near, strict=True)
        ]
        text = (
            f"activation rules that match the output of no module: {', '.join(listed)}"
        )
        if rules.strict and all(self.is_called.values()):
            raise RuleError(f"strict: {text}")
        about = f"no output: {' '.join(unused)}"
        remark = Remark(text, about, frozenset(path[-1] for path in paths))
        for new in news(rules, [remark]):
            report(new)
