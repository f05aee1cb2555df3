"""Colours that people with any kind of colour vision can tell apart.

They are Paul Tol's "light" scheme (Colour Schemes, technical note SRON/EPS/TN/09-002),
made for cells with dark words in them: every one of them has a contrast of at least 8
to `INK`. The page of a model has the same in its style sheet, and darker ones for dark
screens.
"""

from flax_layoutmap.draw._scene import NEUTRAL

PALETTE = (
    "#77aadd",
    "#ee8866",
    "#eedd88",
    "#ffaabb",
    "#99ddff",
    "#44bb99",
    "#bbcc33",
    "#aaaa00",
)
# Of those that come a second, third or fourth time.
_HATCHES = (None, "....", "----", "xxxx")
GREY = "#dddddd"

# Words on any of them.
INK = "#14181f"

# One character per colour, for where there are none; as many again for the second time.
FILLS = "█▓▒▚▞▄▀▌▙▜▟▛▐▂▆╬"
NEUTRAL_FILL = "░"


def colour(number: int) -> str:
    """The colour of a number in a scene, as `#rrggbb`."""
    return GREY if number == NEUTRAL else PALETTE[number % len(PALETTE)]


def hatch(number: int) -> str | None:
    """The pattern that tells a colour from its namesakes, as matplotlib writes it."""
    if number == NEUTRAL:
        return "////"
    return _HATCHES[min(number // len(PALETTE), len(_HATCHES) - 1)]


def fill(number: int) -> str:
    """The character that stands for a colour."""
    return NEUTRAL_FILL if number == NEUTRAL else FILLS[number % len(FILLS)]
