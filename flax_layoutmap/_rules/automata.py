"""Patterns as automata: the states that a regular expression goes through."""

from flax_layoutmap._rules.patterns import ANY, PLACE, Node, NotUnderstood

_MOST_STATES = 4_000


class Automaton:
    """The states of one pattern.

    `steps`: state → (characters, next state) or None. `free`: state → (next state,
    where), without reading; where is `""`, `"start"` or `"end"`.
    """

    def __init__(self, node: Node) -> None:
        self.steps: list[tuple[int, int] | None] = []
        self.free: list[list[tuple[int, str]]] = []
        self.first = self._state()
        self.last = self._build(node, self.first)

    def _state(self) -> int:
        if len(self.steps) >= _MOST_STATES:
            raise NotUnderstood
        self.steps.append(None)
        self.free.append([])
        return len(self.steps) - 1

    def _build(self, node: Node, start: int) -> int:
        """Add the states of a node behind `start`; the state at its end."""
        kind = node[0]
        if kind == "text":
            for char in node[1]:
                known = char.isascii() and char in PLACE
                mask = 1 << PLACE[char] if known else ANY
                start = self._build(("set", mask), start)
            return start
        if kind == "set":
            begin, end = self._state(), self._state()
            self.free[start].append((begin, ""))
            self.steps[begin] = (node[1], end)
            return end
        if kind in ("start", "end"):
            end = self._state()
            self.free[start].append((end, kind))
            return end
        if kind == "cat":
            for part in node[1]:
                start = self._build(part, start)
            return start
        if kind == "behind":
            return start
        end = self._state()
        if kind == "alt":
            for branch in node[1]:
                self.free[self._build(branch, start)].append((end, ""))
            return end
        if kind == "ahead":
            inside = self._state()
            self._build(node[1], inside)  # it leads nowhere
            self.free[start] += [(inside, ""), (end, "")]
            return end
        _, inner, least, most = node
        if max(least, most or 0) > _MOST_STATES:
            raise NotUnderstood  # repeating an empty node needs no states
        for _ in range(least):
            start = self._build(inner, start)
        if most is None:
            again = self._state()
            self.free[start].append((again, ""))
            self.free[self._build(inner, again)].append((again, ""))
            start = again
        for _ in range((most or least) - least):
            self.free[start].append((end, ""))
            start = self._build(inner, start)
        self.free[start].append((end, ""))
        return end
