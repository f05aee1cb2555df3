"""What `Resolution.explain` says of a leaf, in pieces that fit other leaves too."""

# What stands before the path of an owner.
_FOLLOWS = ("  because: follows ", "  because: from the layout of ")


def owner_pieces(path: str, owner: str | None) -> tuple[str | int, ...]:
    """What a leaf follows, said by parts of its own path, as in `Kind.explain`.

    >>> owner_pieces("mu/0/up/kernel", "0/up/kernel")
    (3,)
    >>> owner_pieces("0/up/lora_a", "0/up/kernel")
    (-2, '/kernel')
    """
    if owner is None or path == owner:
        return () if owner is None else (0,)
    parts = owner.split("/")
    if path.endswith(f"/{owner}"):
        return (len(parts),)
    same = 0
    for own, other in zip(path.split("/"), parts, strict=False):
        if own != other:
            break
        same += 1
    if not same:
        return (owner,)
    return (-same, "".join(f"/{part}" for part in parts[same:]))


def pieces(text: str, path: str, owner: str | None) -> tuple[str | int, ...]:
    """What `explain` says of a leaf, with its path taken out where it stands.

    Args:
        text: the words.
        path: path of the leaf: the first word.
        owner: what the leaf follows.

    Returns:
        Texts and numbers: 0 for the path, n for its last n parts.

    >>> pieces("a/b (8,)\\n  because: follows b", "a/b", "b")
    (0, ' (8,)\\n  because: follows ', 1)
    """
    found: list[str | int] = [0]
    pending = ""
    named = owner_pieces(path, owner)
    for at, line in enumerate(text.removeprefix(path).split("\n")):
        pending += "\n" if at else ""
        start = next((s for s in _FOLLOWS if line.startswith(f"{s}{owner}")), None)
        if start is not None:
            found += [pending + start, *named]
            pending = line.removeprefix(f"{start}{owner}")
            continue
        count = _quoted(line, path)
        if count is not None:
            quote, rest = line[2], line[3 + len(_last(path, count)) :]
            found += [f"{pending}  {quote}", count]
            pending = rest
            continue
        pending += line
    return (*found, pending) if pending else tuple(found)


def _last(path: str, count: int) -> str:
    return "/".join(path.split("/")[-count:]) if count else path


def _quoted(line: str, path: str) -> int | None:
    """How many last parts of the path a line starts with, as no rule's path."""
    for count in range(path.count("/") + 1):
        name = repr(_last(path, count))
        if name[1:-1] == _last(path, count) and line.startswith(f"  {name} is matched"):
            return count
    return None
