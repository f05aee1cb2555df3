"""A pattern taken apart: the tree of what it reads, for questions about all its paths.

Patterns with look-around, back-references, flags or word boundaries are not understood.
"""

import functools
import re

from flax_layoutmap._patterns import class_end

# Every set of characters is a bit mask over these; a pattern with others is not
# understood. The last two stand for the letters and digits of other scripts.
CHARACTERS = [*map(chr, range(32, 127)), "é", "٣"]
PLACE = {char: at for at, char in enumerate(CHARACTERS)}

_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
_TEXT = re.compile(r"[ -#%-',/-9:->@-Z_`a-z~-]+")
_QUANTIFIES = {"*", "+", "?", "{"}
_GROUP = re.compile(r"\((?:\?:|\?P<[A-Za-z_]\w*>)?(?!\?)")

# A word that is read as a whole, and what stands for it.
_WORD = re.compile(r"(?<![\\\w\[\-^])(\w+)(?![\w?*+])", re.ASCII)
WORD = "~"
_UNSURE_CLASS = re.compile(r"\[\^?\]|\\[\[\]]")
_CLASS = re.compile(r"\[[^\]]*\]")

# ("text", characters) | ("set", mask) | ("start",) | ("end",) | ("cat", nodes)
# | ("alt", nodes) | ("rep", node, least, most or None)
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
    node, at = _alternatives(pattern, 0)
    if at != len(pattern):
        raise NotUnderstood
    return node


@functools.lru_cache(maxsize=4096)
def shape_of(pattern: str) -> tuple[str, list[str]]:
    """The pattern with `~` for each word, and these words: many patterns share a shape.

    Patterns with flags, counts and odd classes are shapes of their own.

    >>> shape_of("layers/.*/(gate|up)/kernel")
    ('~/.*/(~|~)/~', ['layers', 'gate', 'up', 'kernel'])
    """
    if "{" in pattern or WORD in pattern or "(?" in pattern:
        return pattern, [WORD] * pattern.count(WORD)
    pieces = _WORD.split(pattern)
    shape = WORD.join(pieces[::2])
    if "[" in pattern:
        if _UNSURE_CLASS.search(pattern):
            return pattern, []
        if _CLASS.findall(shape) != _CLASS.findall(pattern):
            return pattern, []  # one holds what looks like a word
    return shape, pieces[1::2]


def _alternatives(pattern: str, at: int) -> tuple[Node, int]:
    branches: list[Node] = []
    while True:
        branch, at = _sequence(pattern, at)
        branches.append(branch)
        if at == len(pattern) or pattern[at] == ")":
            return (branches[0] if len(branches) == 1 else ("alt", branches)), at
        at += 1  # the bar


def _sequence(pattern: str, at: int) -> tuple[Node, int]:
    nodes: list[Node] = []
    while at < len(pattern) and pattern[at] not in "|)":
        plain = _TEXT.match(pattern, at)
        if plain is not None:
            at, text = plain.end(), plain.group()
            if len(text) > 1 and pattern[at : at + 1] in _QUANTIFIES:
                at, text = at - 1, text[:-1]  # it is about the last one alone
            node: Node = ("text", text)
        else:
            node, at = _atom(pattern, at)
        quantifier = _QUANTIFIER.match(pattern, at)
        if quantifier is not None:
            at = quantifier.end()
            if pattern.startswith("+", at):
                raise NotUnderstood  # possessive
            if pattern.startswith("?", at):
                at += 1  # lazy: the same paths, in another order
            node = ("rep", node, *_counts(quantifier))
        nodes.append(node)
    return ("cat", nodes), at


def _counts(quantifier: re.Match[str]) -> tuple[int, int | None]:
    plain = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(quantifier.group())
    if plain is not None:
        return plain
    least, comma, most = quantifier.groups()
    if not least and not most:
        raise NotUnderstood  # {} and {,}: plain text to some, a quantifier to others
    if not comma:
        return int(least), int(least)
    return int(least or 0), int(most) if most else None


def _atom(pattern: str, at: int) -> tuple[Node, int]:
    char = pattern[at]
    if char == "(":
        opened = _GROUP.match(pattern, at)
        if opened is None:
            raise NotUnderstood
        node, at = _alternatives(pattern, opened.end())
        return node, at + 1
    if char in "^$":
        return (("start",) if char == "^" else ("end",)), at + 1
    if char in "{}]" or (char == "[" and class_end(pattern, at) is None):
        raise NotUnderstood
    if char == "[":
        end = (class_end(pattern, at) or 0) + 1
        return ("set", _mask(pattern[at:end])), end
    if char != "\\":
        return ("set", _mask(char) if char == "." else _literal(char)), at + 1
    escape = pattern[at : at + 2]
    if escape in (r"\A", r"\Z"):
        return (("start",) if escape == r"\A" else ("end",)), at + 2
    if escape[1].isalnum() and escape[1] not in "dDwWsS":
        raise NotUnderstood
    known = _mask(escape) if escape[1].isalnum() else _literal(escape[1])
    return ("set", known), at + 2


def _literal(char: str) -> int:
    if char not in PLACE or not char.isascii():
        raise NotUnderstood
    return 1 << PLACE[char]


@functools.lru_cache(maxsize=512)
def _mask(text: str) -> int:
    """The characters that `.`, a class or an escape stands for."""
    if not text.isascii() or re.search(r"\[\[|--|&&|~~|\|\|", text):
        raise NotUnderstood  # re may come to read these as sets of sets
    test = re.compile(text)
    return sum(1 << at for at, c in enumerate(CHARACTERS) if test.fullmatch(c))
