"""The command line, `flax-layoutmap` or `python -m flax_layoutmap`.

Only the parser is here at the start: `--help` imports neither JAX nor Flax.
"""

import io
import os
import re
import sys
import warnings
from collections.abc import Sequence

from flax_layoutmap._cli._parser import make_parser
from flax_layoutmap._core.errors import LayoutError, visible

# The exit codes of a command that failed, and of one whose output was closed
# (as for a program that SIGPIPE ends). A command itself returns 0 or 1.
FAILED, CLOSED = 2, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments; None for those of the program.

    Returns:
        0: done, and nothing is wrong. 1: done, and the check failed (an error of
        `lint`, a difference, a damaged checkpoint). 2: it failed; the reason is on
        stderr. 141: the output was closed (`| head`).
    """
    args = make_parser().parse(sys.argv[1:] if argv is None else argv)
    # Nothing here computes on an accelerator, which a training run may hold.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    here = os.getcwd()
    sys.path.insert(0, here)  # as `python -m` does, for --model and --rules
    from flax_layoutmap._cli import _commands
    from flax_layoutmap._cli._sources import UsageError

    if isinstance(sys.stdout, io.TextIOWrapper):  # ASCII has no arrows
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = int(getattr(_commands, args.command)(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except (Exception, SystemExit) as error:  # broad: a step is the user's code
        if args.traceback:
            raise
        is_ours = isinstance(error, UsageError | LayoutError | OSError)
        text = f"flax-layoutmap {args.command}: {_text_of(error, is_ours)}"
        print(visible(text, "\n"), file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130
    finally:
        if here in sys.path:  # the user's code may have changed it
            sys.path.remove(here)


def _text_of(error: BaseException, is_ours: bool) -> str:
    if not is_ours:
        return f"{type(error).__name__}: {error} (--traceback shows where)"
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    needs = re.search(r'"jax_num_cpu_devices", (\d+)', text)
    if needs is not None:  # a module of the user makes a mesh
        text += f"\nfix: JAX_NUM_CPU_DEVICES={needs[1]} flax-layoutmap …"
    return text


def run() -> None:
    """The command `flax-layoutmap`."""
    # A place in the code says nothing here.
    warnings.formatwarning = lambda text, *_, **__: f"warning: {text}\n"
    sys.exit(main())
