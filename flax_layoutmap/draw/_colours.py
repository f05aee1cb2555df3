"""The colours of pictures."""

from typing import NamedTuple


class Colour(NamedTuple):
    """A colour, and the character that stands for it where there are no colours."""

    hex: str
    character: str
    is_warning: bool = False  # has a broken red outline as well


# Paul Tol's "light" scheme (Colour Schemes, technical note SRON/EPS/TN/09-002), which
# people with any kind of colour vision can tell apart, made for dark text: each has a
# contrast of at least 8 to INK.
_HEX = "77aadd ee8866 eedd88 ffaabb 99ddff 44bb99 bbcc33 aaaa00".split()
PALETTE = [Colour(f"#{h}", c) for h, c in zip(_HEX, "█▓▒▚▞▄▀▌", strict=True)]
GREY = Colour("#dddddd", "░")  # replicated
OTHERS = Colour("#cbb8ea", "▗")  # layouts beyond the palette
NO_RULE = Colour("#dddddd", "?", is_warning=True)
INK = "#14181f"  # text on any of them
