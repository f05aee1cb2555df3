"""What a regular expression can see of a path, found by reading it once.

Two uses. A text that every match must hold lets a rule be passed over without trying
it. And where no pattern can tell two digits apart, `layers/17/kernel` and
`layers/42/kernel` are one question: the paths are folded, and the answer for the
folded path holds for all of them.
"""

import dataclasses
import re
from collections.abc import Iterable

# A {m,n} quantifier that re will read as one; other braces are literal.
_QUANTIFIER = re.compile(r"\{(?:\d+(?:,\d*)?|,\d+)\}")
# Escapes that treat all digits alike, inside and outside of a class.
_PLAIN_ESCAPES = frozenset("dDwWsSbBAZ")
_GROUP = re.compile(r"\(\?(?::|P<[A-Za-z_]+>|=|!|<=|<!|>)")
_PLAIN = re.compile(r"[^\\\[{()}*?|+.^$]+")
_DIGIT = re.compile(r"\d")
# Letters or digits, as many as there are: what is none of both ends a word.
_WORD = re.compile(r"[^\W\d_]+|\d+")


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """What is known of a pattern.

    Attributes:
        understood: whether the pattern sees no digits but those in `chunks`.
        texts: texts that every match holds, longest first.
        words: words that every match has, by themselves: see `words_of`.
        chunks: the runs of plain characters with digits in them, none of which holds
            a `/`: each lies within one part of any path where it matters.
    """

    understood: bool
    texts: tuple[str, ...] = ()
    words: frozenset[str] = frozenset()
    chunks: frozenset[str] = frozenset()


_UNKNOWN = View(False)


def view_of(pattern: str) -> View:
    """Reads a pattern that compiles; what is not understood gives an empty View.

    Digits in a quantifier or in the class range `0-9` split nothing. A literal digit
    does, and goes into `chunks` with the plain characters around it. The texts are the
    runs of plain characters outside of groups, unless there are several alternatives.
    """
    reader = _Reader()
    depth, at, alternatives = 0, 0, False
    while at < len(pattern):
        run = _PLAIN.match(pattern, at)
        if run is not None:
            reader.add(run.group(), depth == 0)
            at = run.end()
            continue
        char, width, literal = pattern[at], 1, ""
        if char == "\\":
            width = 2
            escaped = pattern[at + 1]
            if not escaped.isalnum():
                literal = escaped
            elif escaped not in _PLAIN_ESCAPES:
                return _UNKNOWN  # \1, \x31, \u0031, \N{DIGIT ONE} …
        elif char == "[":
            end = class_end(pattern, at)
            if end is None or not _class_is_blind(pattern[at + 1 : end]):
                return _UNKNOWN
            width = end + 1 - at
        elif char == "{":
            quantifier = _QUANTIFIER.match(pattern, at)
            if quantifier is None:
                return _UNKNOWN
            reader.split_last()
            width = len(quantifier.group())
        elif char == "(":
            depth += 1
            if pattern.startswith("(?", at):
                group = _GROUP.match(pattern, at)
                if group is None:
                    return _UNKNOWN  # flags, comments, conditions, back-references
                width = len(group.group())
        elif char == ")":
            depth -= 1
        elif char == "}":
            return _UNKNOWN
        elif char in "*?":
            reader.split_last()
        elif char == "|":
            alternatives = alternatives or depth == 0
        reader.add(literal, depth == 0)
        at += width
    reader.add("", True)
    texts = () if alternatives else sorted(reader.texts, key=len, reverse=True)
    words = frozenset(word for text in texts for word in _whole_words(text))
    return View(True, tuple(texts), words, frozenset(reader.chunks))


def words_of(path: str) -> list[str]:
    """The runs of letters, and those of digits.

    >>> words_of("layers_17/mlp/fc1")
    ['layers', '17', 'mlp', 'fc', '1']
    """
    return _WORD.findall(path)


def _whole_words(text: str) -> list[str]:
    """The words of each path that holds a text: not what may go on beyond its ends."""
    first, last = _WORD.match(text[:1]), _WORD.match(text[-1:])
    return _WORD.findall(text)[first is not None : -1 if last else None]


class _Reader:
    """Gathers runs of plain characters."""

    def __init__(self) -> None:
        self.run, self.texts = "", set[str]()
        self.chunk, self.chunks = "", set[str]()

    def add(self, literal: str, required: bool) -> None:
        """Takes the next plain characters, or `""` for anything else."""
        if literal and required:
            self.run += literal
        elif self.run:
            self.texts.add(self.run)
            self.run = ""
        if not literal:
            self._end_chunk()
            return
        first, *others = literal.split("/")
        self.chunk += first
        for part in others:
            self._end_chunk()
            self.chunk = part

    def split_last(self) -> None:
        """A quantifier: the last character may be absent, so it stands alone."""
        self.run = self.run[:-1]
        last, self.chunk = self.chunk[-1:], self.chunk[:-1]
        self._end_chunk()
        self.chunk = last

    def _end_chunk(self) -> None:
        if self.chunk and _DIGIT.search(self.chunk):
            self.chunks.add(self.chunk)
        self.chunk = ""


class Folding:
    """Folds the digits of a part of a path, where no pattern can tell them apart.

    A part that holds one of the chunks is kept; in all others every ASCII digit becomes
    one digit, such that no chunk comes into being. So a chunk occurs in the folded path
    just where it occurs in the path, and every understood pattern gives one answer.

    Args:
        chunks: texts without `/` whose digits matter.
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

    Added to them, a path folds to the key only if it is the key.
    """
    return {
        part
        for part in key.split("/")
        if _DIGIT.search(part) and not any(chunk in part for chunk in chunks)
    }


def class_end(pattern: str, start: int) -> int | None:
    """Position of the `]` that closes the class opened at `start`."""
    at = start + 1
    if pattern.startswith("^", at):
        at += 1
    if pattern.startswith("]", at):
        at += 1
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 2
        elif pattern[at] == "]":
            return at
        else:
            at += 1
    return None


def _class_is_blind(body: str) -> bool:
    """Whether a character class holds all digits or none.

    A range whose ends are no digits holds all of them or none, as the digits are
    neighbours; so only a digit, other than in `0-9`, can split them.
    """
    at = 0
    while at < len(body):
        if body.startswith("0-9", at):
            at += 3
            continue
        for end in (False, True):
            char = body[at : at + 1]
            if char == "\\":
                char = body[at + 1]
                if char.isalnum() and char not in _PLAIN_ESCAPES:
                    return False
                at += 1
            elif char.isdigit():
                return False
            at += 1
            # A "-" with something behind it makes a range: read its other end too.
            if end or body[at : at + 1] != "-" or at + 1 >= len(body):
                break
            at += 1
    return True
