"""A pattern taken apart: the tree of what it reads, for questions about all its paths.

For questions about what a pattern matches, those with look-around, back-references,
flags or word boundaries are not understood. For what `re` may try, a tree that reads
more than the pattern will do.
"""

import functools
import re

from flax_layoutmap._rules.patterns import class_end

# Every set of characters is a bit mask over these; a pattern with others is not
# understood. The last two stand for the letters and digits of other scripts.
CHARACTERS = [*map(chr, range(32, 127)), "é", "٣"]
PLACE = {char: at for at, char in enumerate(CHARACTERS)}
# What no path is written with, but a pattern may tell apart: bits behind the others.
_FURTHER = [*CHARACTERS, "\n", "\t", "\0", "\xa0", "–"]
ANY = (1 << len(_FURTHER)) - 1
_NOT_ASCII = ANY & ~((1 << PLACE["~"] + 1) - 1)

_QUANTIFIER = re.compile(r"[*+?]|\{(?=[\d,])(\d*)(,?)(\d*)\}")
_TEXT = re.compile(r"[ -#%-',/-9:->@-Z_`a-z~-]+")
_QUANTIFIES = {"*", "+", "?", "{"}
_GROUP = re.compile(
    r"\((?:\?(?P<kind>:|P<[A-Za-z_]\w*>|>|=|!|<=|<!|[aimsu]*(?:-[ims]+)?:))?(?!\?)"
)
_EMPTY = re.compile(r"\(\?(?:[aimsu]+|P=\w+)\)|\\(?:[bB]|[1-9]\d?(?!\d))")
_ESCAPE = re.compile(r"\\(?:N\{[^}]*\}|x..|u.{4}|U.{8}|[0-7]{3}|0[0-7]?|.)", re.DOTALL)
_FLAGS = re.compile(r"\(\?[aimsu]+[):-]")
_SETS_OF_SETS = re.compile(r"\[\[|--|&&|~~|\|\|")

# A word that is read as a whole, and what stands for it.
_WORD = re.compile(r"(?<![\\\w\[\-^])(\w+)(?![\w?*+])", re.ASCII)
WORD = "~"
_UNSURE_CLASS = re.compile(r"\[\^?\]|\\[\[\]]")
_CLASS = re.compile(r"\[[^\]]*\]")

# ("text", characters) | ("set", mask) | ("start",) | ("end",) | ("cat", nodes)
# | ("alt", nodes) | ("rep", node, least, most or None); of `parse_more` also
# ("aside", node): look-ahead
Node = tuple


class NotUnderstood(Exception):
    """The pattern has something that no automaton here does."""


@functools.lru_cache(maxsize=4096)
def parse(pattern: str) -> Node:
    """The pattern as a tree of nodes.

    Raises:
        NotUnderstood: it holds more than characters, classes, groups, alternatives,
            quantifiers and anchors.
    """
    reader = _Reader(pattern)
    node = reader.whole()
    if not reader.is_exact:
        raise NotUnderstood
    return node


def parse_more(pattern: str) -> Node:
    """A tree that reads what `re` tries to read with the pattern, and maybe more.

    Raises:
        NotUnderstood: it has comments, conditions, verbose flags, or look-behind with
            choices.
    """
    return _Reader(pattern).whole()


@functools.lru_cache(maxsize=4096)
def shape_of(pattern: str) -> tuple[str, list[str]]:
    """The pattern with `~` for each word, and these words: many patterns share a shape.

    Patterns with flags, counts and odd classes are shapes of their own.

    >>> shape_of("layers/.*/(gate|up)/kernel")
    ('~/.*/(~|~)/~', ['layers', 'gate', 'up', 'kernel'])
    """
    if "{" in pattern or WORD in pattern or "(?" in pattern.replace("(?:", ""):
        return pattern, [WORD] * pattern.count(WORD)
    pieces = _WORD.split(pattern)
    shape = WORD.join(pieces[::2])
    if "[" in pattern:
        if _UNSURE_CLASS.search(pattern):
            return pattern, []
        if _CLASS.findall(shape) != _CLASS.findall(pattern):
            return pattern, []  # one holds what looks like a word
    return shape, pieces[1::2]


class _Reader:
    """Reads a pattern from left to right.

    Attributes:
        is_exact: whether the tree reads just what the pattern does, so far.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0
        self.has_flags = _FLAGS.search(pattern) is not None
        self.is_exact = not self.has_flags

    def whole(self) -> Node:
        node = self.alternatives()
        if self.at != len(self.pattern):
            raise NotUnderstood
        return node

    def alternatives(self) -> Node:
        branches = [self.sequence()]
        while self.pattern.startswith("|", self.at):
            self.at += 1
            branches.append(self.sequence())
        return branches[0] if len(branches) == 1 else ("alt", branches)

    def sequence(self) -> Node:
        pattern, nodes = self.pattern, list[Node]()
        while self.at < len(pattern) and pattern[self.at] not in "|)":
            plain = None if self.has_flags else _TEXT.match(pattern, self.at)
            if plain is not None:
                self.at, text = plain.end(), plain.group()
                if len(text) > 1 and pattern[self.at : self.at + 1] in _QUANTIFIES:
                    self.at, text = self.at - 1, text[:-1]  # about the last one alone
                node: Node = ("text", text)
            else:
                node = self.atom()
            quantifier = _QUANTIFIER.match(pattern, self.at)
            if quantifier is not None:
                self.at = quantifier.end()
                if pattern.startswith("+", self.at):
                    self.beyond()  # possessive: it tries less
                    self.at += 1
                elif pattern.startswith("?", self.at):
                    self.at += 1  # lazy: the same paths, in another order
                node = ("rep", node, *self.counts(quantifier))
            nodes.append(node)
        return ("cat", nodes)

    def counts(self, quantifier: re.Match[str]) -> tuple[int, int | None]:
        plain = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(quantifier.group())
        if plain is not None:
            return plain
        least, comma, most = quantifier.groups()
        if not least and not most:
            self.beyond()  # {,}: plain text to some
        if not comma:
            return int(least), int(least)
        return int(least or 0), int(most) if most else None

    def beyond(self) -> Node:
        """Notes that there is something that no automaton does; reads nothing."""
        self.is_exact = False
        return ("cat", [])

    def atom(self) -> Node:
        pattern, begin = self.pattern, self.at
        char = pattern[begin]
        empty = _EMPTY.match(pattern, begin)
        if empty is not None:
            self.at = empty.end()
            return self.beyond()
        if char == "(":
            return self.group()
        if char == "\\":
            return self.escape()
        self.at += 1
        if char in "^$":
            return ("start",) if char == "^" else ("end",)
        if char == "[":
            end = class_end(pattern, begin)
            if end is None:
                raise NotUnderstood
            self.at = end + 1
            return ("set", self.mask(pattern[begin : end + 1]))
        if char in "{}]":
            self.beyond()
        return ("set", self.mask(char if char == "." else re.escape(char)))

    def group(self) -> Node:
        opened = _GROUP.match(self.pattern, self.at)
        if opened is None:
            raise NotUnderstood
        self.at = opened.end()
        node = self.alternatives()
        self.at += 1
        kind = opened["kind"] or ":"
        if kind == ":" or kind.startswith("P"):
            return node
        nothing = self.beyond()
        if kind in ("<=", "<!"):  # of one length: one step, if it may not choose
            if not _is_plain(node):
                raise NotUnderstood
            return nothing
        return ("aside", node) if kind in ("=", "!") else node

    def escape(self) -> Node:
        found = _ESCAPE.match(self.pattern, self.at)
        assert found is not None  # it compiles
        escape = found.group()
        self.at = found.end()
        if escape in (r"\A", r"\Z"):
            return ("start",) if escape == r"\A" else ("end",)
        if escape[1].isalnum() and escape[1:] not in tuple("dDwWsS"):
            self.beyond()
            return ("set", ANY)
        return ("set", self.mask(escape))

    def mask(self, text: str) -> int:
        """The characters that a literal, `.`, a class or an escape stands for."""
        if not text.isascii() or not text.isprintable() or _SETS_OF_SETS.search(text):
            self.beyond()  # re may come to read these as sets of sets
            return ANY
        mask = _mask(text)
        if self.has_flags and (len(text) > 2 or text[-1].isalpha() or text == "."):
            mask |= _mask(text, re.I | re.S) | _mask(text, re.I | re.A) | _NOT_ASCII
        return mask


def _is_plain(node: Node) -> bool:
    """Whether there is one way to read it."""
    if node[0] == "cat":
        return all(map(_is_plain, node[1]))
    return node[0] in ("text", "set", "start", "end")


@functools.lru_cache(maxsize=512)
def _mask(text: str, flags: int = 0) -> int:
    test = re.compile(text, flags)
    return sum(1 << at for at, c in enumerate(_FURTHER) if test.fullmatch(c))
