"""The command line, `flax-layoutmap` or `python -m flax_layoutmap`.

`flm` imports its names when they are used, so `--help` loads neither JAX nor Flax.
"""

import io
import os
import re
import sys
import warnings
from collections.abc import Sequence

from flax_layoutmap._cli._parser import make_parser
from flax_layoutmap._cli._sources import UsageError
from flax_layoutmap._core.errors import LayoutError, visible


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0; 1 if the check failed (an error of `lint`, a difference); 2 if
        the command failed; 141 if the output was closed (`| head`).
    """
    args = make_parser().parse(sys.argv[1:] if argv is None else argv)
    # No command needs an accelerator, which a training run may be using.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, os.getcwd())  # as `python -m` does, for --model and --rules
    if isinstance(sys.stdout, io.TextIOWrapper):  # ASCII has no arrows
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = int(args.run(args) or 0)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the code of a program that SIGPIPE ends
    except KeyboardInterrupt:
        return 130
    except (Exception, SystemExit) as error:  # broad: the user's code runs here
        if args.traceback:
            raise
        text = f"flax-layoutmap {args.run.__name__}: {_text_of(error)}"
        print(visible(text, "\n"), file=sys.stderr)
        return 2


def _text_of(error: BaseException) -> str:
    if not isinstance(error, UsageError | LayoutError | OSError):
        return f"{type(error).__name__}: {error} (--traceback shows where)"
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    needs = re.search(r'"jax_num_cpu_devices", (\d+)', text)
    if needs is not None:  # the user's module makes a mesh
        text += f"\nfix: JAX_NUM_CPU_DEVICES={needs[1]} flax-layoutmap …"
    return text


def run() -> None:
    """The command `flax-layoutmap`."""
    # The default also prints a place in our code, which does not help.
    warnings.formatwarning = lambda text, *_, **__: f"warning: {text}\n"
    sys.exit(main())
