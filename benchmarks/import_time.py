"""What `import flax_layoutmap` loads, and how long the package's own code takes.

    python benchmarks/import_time.py

Answered by fresh interpreters. "Own code" is the sum of the self times of the package's
modules (`-X importtime`). Prints a Markdown table.
"""

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys

PACKAGE = "flax_layoutmap"

# The top-level names of sys.modules that are not of the standard library, as JSON.
LOADED = (
    "import json, sys; print(json.dumps(sorted({name.partition('.')[0]"
    " for name in sys.modules} - set(sys.stdlib_module_names) - {'__main__'})))"
)
BASE = "import jax, flax.nnx"
IMPORT = f"import {PACKAGE} as flm"
# Orbax is what flm.checkpoint exists for; every other public name does without.
USE = (
    f"{IMPORT}; used = [getattr(flm, name) for name in flm.__all__"
    " if name != 'checkpoint']"
)
RESOLVE = f"""
{USE}
import jax, numpy
from flax import nnx
jax.config.update("jax_num_cpu_devices", 8)
layout_map = flm.LayoutMap(flm.DeviceMesh((2, 4), ("data", "model")))
layout_map["kernel"] = (None, "model")
layout_map.resolve(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))).report()
"""


def run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, on CPU."""
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def third_party(code: str) -> set[str]:
    """Top-level third-party modules after some code, without those of `.pth` hooks."""
    idle = json.loads(run(LOADED).stdout)
    loaded = json.loads(run(f"{code}\n{LOADED}").stdout.splitlines()[-1])
    return set(loaded) - set(idle) - {PACKAGE}


def own_seconds(code: str) -> float:
    """Self time of the package's modules while some code runs."""
    line = re.compile(rf"^import time:\s+(\d+) \|\s+\d+ \|\s+{PACKAGE}", re.MULTILINE)
    return sum(map(int, line.findall(run(code, "-X", "importtime").stderr))) / 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    base = third_party(BASE)
    print(f"{datetime.date.today()}, Python {platform.python_version()}; ", end="")
    print(f"medians of {repeats}\n\n| after | third-party modules | own code |")
    print("|---|---|--:|")
    for what, code, known in (
        (f"`import {PACKAGE}`", IMPORT, set()),
        (f"`{BASE}`", BASE, set()),
        ("every public name but `checkpoint` used", USE, base),
        ("a module resolved and reported", RESOLVE, base),
    ):
        extra = third_party(code) - known
        modules = f"{len(extra)} beyond those" if known else str(len(extra))
        names = ", ".join(sorted(extra)) if len(extra) < 5 else ""
        seconds = statistics.median(own_seconds(code) for _ in range(repeats))
        cell = f"{modules} {names}".strip()
        print(f"| {what} | {cell} | {seconds * 1000:.1f} ms |")


if __name__ == "__main__":
    main()
