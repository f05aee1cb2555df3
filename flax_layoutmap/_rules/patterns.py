"""Parse regular expressions: a pattern as a tree, and what it requires of a path.

`read` parses a pattern once. `view_of` gives a `Matcher` the texts that a match
holds and the digits that matter; `automata` and `pattern_cost` build on the tree.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Every set of characters is a bit mask over these. `é` and `٣` stand for the letters
# and digits of other scripts, the last ones for characters that paths do not have.
CHARACTERS = [*map(chr, range(32, 127)), "é", "٣"]
ALL_CHARACTERS = [*CHARACTERS, "\n", "\t", "\0", "\xa0", "–"]
PLACE = {char: at for at, char in enumerate(CHARACTERS)}
ANY = (1 << len(ALL_CHARACTERS)) - 1
_NOT_ASCII = ANY & ~((1 << PLACE["~"] + 1) - 1)
_DIGITS = sum(1 << PLACE[digit] for digit in "0123456789")

_MOST_NESTED = 50

# Plain characters without a meaning of their own.
_TEXT = re.compile(r"[ -#%-',/-9:->@-Z_`a-z~-]+")
_QUANTIFIER = re.compile(r"[*+?]|\{(?=[\d,])(\d*)(,?)(\d*)\}")
_GROUP = re.compile(
    r"\((?:\?(?P<kind>:|P<[A-Za-z_]\w*>|>|=|!|<=|<!|[aimsu]*(?:-[ims]+)?:))?(?!\?)"
)
_FLAGS = re.compile(r"\(\?[aimsu]+[):-]")
# Flags for the whole pattern, back-references, and word boundaries read no character.
_EMPTY = re.compile(r"\(\?(?:[aimsu]+|P=\w+)\)|\\(?:[bB]|[1-9]\d?(?!\d))")
_ESCAPE = re.compile(r"\\(?:N\{[^}]*\}|x..|u.{4}|U.{8}|[0-7]{3}|0[0-7]?|.)", re.DOTALL)
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
# `re` warns of these: it may come to read them as operations on sets.
_SETS_OF_SETS = re.compile(r"\[\[|--|&&|~~|\|\|")

# ("text", characters) | ("set", mask) | ("start",) | ("end",) | ("cat", nodes)
# | ("alt", nodes) | ("rep", node, least, most or None) | ("ahead", node)
# | ("behind", node)
Node = tuple


class NotUnderstood(Exception):
    """The pattern has a construct that the parser does not support."""

    def __init__(self, reason: str = "it is too complicated to check") -> None:
        super().__init__(reason)


class Tree(NamedTuple):
    """A parsed pattern; its root matches everything that the pattern matches.

    It is exact if it matches nothing else: not with look-around, back-references,
    flags, word boundaries, or characters beyond ASCII. It is foldable if its texts
    stand for themselves and nothing else in it distinguishes digits.
    """

    root: Node
    is_exact: bool
    is_foldable: bool


@functools.lru_cache(maxsize=4096)
def read(pattern: str) -> Tree:
    """Parse a pattern that compiles.

    Raises NotUnderstood for comments, conditions, verbose flags, look-behind with
    choices, and groups that are nested too deeply.
    """
    if _TEXT.fullmatch(pattern):
        return Tree(("text", pattern), True, True)
    reader = _Reader(pattern)
    root = reader.alternatives()
    if reader.at != len(pattern):
        raise NotUnderstood
    return Tree(root, reader.is_exact, reader.is_foldable)


class _Reader:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.at, self.depth = pattern, 0, 0
        self.has_flags = "(?" in pattern and _FLAGS.search(pattern) is not None
        self.is_exact = self.is_foldable = not self.has_flags

    def alternatives(self) -> Node:
        branches = [self.sequence()]
        while self.pattern.startswith("|", self.at):
            self.at += 1
            branches.append(self.sequence())
        return branches[0] if len(branches) == 1 else ("alt", tuple(branches))

    def sequence(self) -> Node:
        pattern, nodes = self.pattern, list[Node]()
        follows_text = False
        while self.at < len(pattern) and pattern[self.at] not in "|)":
            node = self.text() or self.atom()
            quantifier = _QUANTIFIER.match(pattern, self.at)
            if quantifier is not None:
                node = self.repeated(node, quantifier)
            is_text = node[0] == "text"
            if is_text and follows_text:
                nodes[-1] = ("text", nodes[-1][1] + node[1])
            else:
                nodes.append(node)
            follows_text = is_text
        return nodes[0] if len(nodes) == 1 else ("cat", tuple(nodes))

    def text(self) -> Node | None:
        """Plain characters; one that is repeated is not among them."""
        plain = None if self.has_flags else _TEXT.match(self.pattern, self.at)
        if plain is None:
            return None
        self.at, text = plain.end(), plain.group()
        if len(text) > 1 and self.pattern.startswith(tuple("*+?{"), self.at):
            self.at, text = self.at - 1, text[:-1]
        return ("text", text)

    def repeated(self, node: Node, quantifier: re.Match[str]) -> Node:
        self.at = quantifier.end()
        if self.pattern.startswith("+", self.at):
            self.is_exact = False  # possessive: it tries less
            self.at += 1
        elif self.pattern.startswith("?", self.at):
            self.at += 1  # lazy: the same paths, in another order
        usual = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(quantifier.group())
        if usual is not None:
            return ("rep", node, *usual)
        least, comma, most = quantifier.groups()
        if not least and not most:
            self.is_exact = self.is_foldable = False  # {,}: some read plain text
        if not comma:
            return ("rep", node, int(least), int(least))
        return ("rep", node, int(least or 0), int(most) if most else None)

    def atom(self) -> Node:
        pattern, begin = self.pattern, self.at
        char = pattern[begin]
        empty = _EMPTY.match(pattern, begin)
        if empty is not None:
            self.at, self.is_exact = empty.end(), False
            self.is_foldable &= empty.group() in (r"\b", r"\B")
            return ("cat", ())
        if char == "(":
            return self.group()
        if char == "\\":
            return self.escape()
        if char == "[":
            found = _CLASS.match(pattern, begin)
            if found is None:
                raise NotUnderstood
            self.at = found.end()
            return ("set", self.mask(found.group()))
        self.at += 1
        if char in "^$":
            return ("start",) if char == "^" else ("end",)
        if char == ".":
            return ("set", self.mask(char))
        if char in "{}":
            self.is_exact = self.is_foldable = False
        return self.literal(char)

    def group(self) -> Node:
        opened = _GROUP.match(self.pattern, self.at)
        if opened is None:
            raise NotUnderstood
        self.depth += 1
        if self.depth > _MOST_NESTED:
            raise NotUnderstood("it is nested too deeply")
        self.at = opened.end()
        node = self.alternatives()
        self.at += 1
        self.depth -= 1
        kind = opened["kind"] or ":"
        if kind == ":" or kind.startswith("P"):
            return node
        self.is_exact = False
        if kind in ("<=", "<!"):  # of fixed length: one step, if without choices
            if not is_plain(node):
                raise NotUnderstood
            return ("behind", node)
        return ("ahead", node) if kind in ("=", "!") else node

    def escape(self) -> Node:
        found = _ESCAPE.match(self.pattern, self.at)
        assert found is not None  # it compiles
        escape = found.group()
        self.at = found.end()
        if escape in (r"\A", r"\Z"):
            return ("start",) if escape == r"\A" else ("end",)
        if escape[1:] in tuple("dDwWsS"):
            return ("set", self.mask(escape))
        if escape[1].isalnum():
            self.is_exact = self.is_foldable = False
            return ("set", ANY)
        return self.literal(escape[1])

    def literal(self, char: str) -> Node:
        if self.has_flags:
            return ("set", self.mask(re.escape(char)))
        self.is_exact &= " " <= char <= "~"
        return ("text", char)

    def mask(self, text: str) -> int:
        """The characters that a literal, `.`, a class or an escape stands for."""
        if _SETS_OF_SETS.search(text):
            self.is_exact = self.is_foldable = False
            return ANY
        mask = _mask(text)
        self.is_foldable &= mask & _DIGITS in (0, _DIGITS)
        if not text.isascii() or not text.isprintable():
            self.is_exact = False
            return ANY
        if self.has_flags and (len(text) > 2 or text[-1].isalpha() or text == "."):
            mask |= _mask(text, re.I | re.S) | _mask(text, re.I | re.A) | _NOT_ASCII
        return mask


def is_plain(node: Node) -> bool:
    """Whether there is one way to read it."""
    if node[0] == "cat":
        return all(map(is_plain, node[1]))
    return node[0] in ("text", "set", "start", "end")


@functools.lru_cache(maxsize=512)
def _mask(text: str, flags: int = 0) -> int:
    test = re.compile(text, flags)
    return sum(1 << at for at, c in enumerate(ALL_CHARACTERS) if test.fullmatch(c))


# ------------------------------------------------------ what a match needs of a path


_DIGIT = re.compile(r"\d")
# Runs of letters or of digits; any other character ends a word.
_WORD = re.compile(r"[^\W\d_]+|\d+")


class View(NamedTuple):
    """What is known of the paths that a pattern matches.

    A pattern is understood if it distinguishes no digits but those in `chunks`, which
    are runs of plain characters without a `/`. Every match has the `texts` (longest
    first) and, as whole words, the `words` (see `words_of`).
    """

    understood: bool
    texts: tuple[str, ...] = ()
    words: frozenset[str] = frozenset()
    chunks: frozenset[str] = frozenset()


_UNKNOWN, _NONE = View(False), frozenset[str]()


def view_of(pattern: str) -> View:
    """The View of a pattern that compiles."""
    try:
        tree = read.__wrapped__(pattern)  # not cached: a Rule calls it once
    except NotUnderstood:
        return _UNKNOWN
    if not tree.is_foldable:
        return _UNKNOWN
    found = list(_texts(tree.root, True))
    required = {text: None for text, in_every_match in found if in_every_match}
    texts = tuple(sorted(required, key=len, reverse=True))
    words = frozenset([word for text in texts for word in _whole_words(text)])
    chunks = _NONE
    if _DIGIT.search(pattern):
        parts = [part for text, _ in found for part in text.split("/")]
        chunks = frozenset(filter(_DIGIT.search, parts))
    return View(True, texts, words, chunks)


def _texts(node: Node, required: bool) -> Iterator[tuple[str, bool]]:
    """The texts of a tree, each with whether every match holds it."""
    kind = node[0]
    if kind == "text":
        yield node[1], required
    elif kind in ("cat", "alt"):
        for part in node[1]:
            yield from _texts(part, required and kind == "cat")
    elif kind == "rep":
        yield from _texts(node[1], required and node[2] > 0)
    elif kind in ("ahead", "behind"):
        yield from _texts(node[1], False)


def words_of(path: str) -> list[str]:
    """The runs of letters, and those of digits.

    >>> words_of("layers_17/mlp/fc1")
    ['layers', '17', 'mlp', 'fc', '1']
    """
    return _WORD.findall(path)


def _whole_words(text: str) -> list[str]:
    """The words of each path that holds a text: not what may go on beyond its ends."""
    return _WORD.findall(text)[text[0].isalnum() : -1 if text[-1].isalnum() else None]


class Folding:
    """Replaces the digits of a part of a path where no pattern distinguishes them.

    Without chunks, `layers/17/kernel` and `layers/42/kernel` become equal. A part that
    holds a chunk (a text with digits that a pattern needs) is kept; elsewhere every
    ASCII digit becomes one digit, chosen so that no chunk appears. So a chunk occurs in
    the folded path just where it occurs in the path, and every understood pattern gives
    the same answer.
    """

    def __init__(self, chunks: Iterable[str]) -> None:
        self._chunks = frozenset(chunks)
        self._lengths = sorted({len(chunk) for chunk in self._chunks})

    def __call__(self, part: str) -> str:
        """The folded part; of the same length."""
        if part.isalpha() or self._holds_chunk(part):
            return part
        for table in _TO_DIGIT.values():
            folded = part.translate(table)
            if not self._holds_chunk(folded):
                return folded
        return part

    def _holds_chunk(self, part: str) -> bool:
        return any(
            part[at : at + length] in self._chunks
            for length in self._lengths
            for at in range(len(part) - length + 1)
        )


_TO_DIGIT = {
    digit: {ord(other): digit for other in "0123456789"} for digit in "0123456789"
}


def key_chunks(key: str, chunks: Iterable[str]) -> set[str]:
    """Parts of a key with digits that hold none of the chunks.

    With them as chunks too, a path folds to the key only if it is the key.
    """
    return {
        part
        for part in key.split("/")
        if _DIGIT.search(part) and not any(chunk in part for chunk in chunks)
    }
