"""The command line, `flax-layoutmap` or `python -m flax_layoutmap`.

Only the parser is here at the start: `--help` imports neither JAX nor Flax.
"""

import os
import sys
from collections.abc import Sequence

from flax_layoutmap._cli._parser import parser

# What a command found, and what kept it from looking.
FOUND, FAILED = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments; None for those of the program.

    Returns:
        0: done, and nothing is wrong. 1: done, and something was found (a finding of
        `lint`, a difference, a checkpoint that is not as saved). 2: it could not be
        done; the reason is on stderr.
    """
    args = parser().parse_args(argv)
    # Nothing here computes on an accelerator, which a training run may hold.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, os.getcwd())  # as `python -m` does, for --model and --rules
    from flax_layoutmap._cli import _commands
    from flax_layoutmap._cli._sources import UsageError
    from flax_layoutmap._errors import LayoutError

    try:
        return int(getattr(_commands, args.command)(args))
    except (UsageError, LayoutError, OSError, KeyError, AssertionError) as error:
        if args.traceback:
            raise
        text = error.args[0] if isinstance(error, KeyError) else error
        print(f"flax-layoutmap {args.command}: {text}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130
    finally:
        sys.path.remove(os.getcwd())


def run() -> None:
    """The command `flax-layoutmap`."""
    sys.exit(main())
