"""Measure what `import flax_layoutmap` loads and how long it takes.

    python benchmarks/import_time.py

Three questions, each answered by fresh interpreters: which third-party modules come
with the import alone (none should), which come once every public name that needs no
Orbax has been used (none beyond those of `import jax, flax.nnx`), and how long the
package's own modules take (`-X importtime`, the sum of their self times; at most
0.15 s). Prints one Markdown table; the exit status is 1 if a target was missed.
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
from collections.abc import Iterable

PACKAGE = "flax_layoutmap"
OWN_SECONDS = 0.15

# The top-level names of sys.modules that come from no standard library, as JSON.
_REPORT = (
    "import json, sys; print(json.dumps(sorted({name.partition('.')[0]"
    " for name in sys.modules} - set(sys.stdlib_module_names) - {'__main__'})))"
)
_BASE = "import jax, flax.nnx"
_IMPORT = f"import {PACKAGE} as flm"
# Orbax is what flm.checkpoint exists for; every other public name must do without.
_USE = (
    f"{_IMPORT}; used = [getattr(flm, name) for name in flm.__all__"
    " if name != 'checkpoint']"
)
_WORK = f"""
{_USE}
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
    """Top-level third-party modules that a fresh interpreter has after some code.

    What the interpreter has before any code (`.pth` hooks) does not count.
    """
    idle = json.loads(run(_REPORT).stdout)
    loaded = json.loads(run(f"{code}\n{_REPORT}").stdout.splitlines()[-1])
    return set(loaded) - set(idle) - {PACKAGE}


def own_import_seconds(code: str) -> tuple[float, list[tuple[str, float]]]:
    """Self time of the package's modules while some code runs.

    Returns:
        The sum in seconds, and (module, seconds), the slowest first.
    """
    line = re.compile(rf"import time:\s+(\d+) \|\s+\d+ \|\s+({PACKAGE}\S*)$")
    found = [
        (match[2], int(match[1]) / 1e6)
        for text in run(code, "-X", "importtime").stderr.splitlines()
        if (match := line.match(text))
    ]
    if not found:
        raise RuntimeError(f"-X importtime names no module of {PACKAGE}")
    return sum(seconds for _, seconds in found), sorted(found, key=lambda x: -x[1])


def listed(names: Iterable[str]) -> str:
    """Module names for a table cell."""
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none"


def verdict(reached: bool) -> str:
    """The last column."""
    return "PASS" if reached else "FAIL"


def rows(repeats: int) -> list[tuple[str, str, str, str]]:
    """The table: what, measured, target, verdict."""
    alone = third_party(_IMPORT)
    base = third_party(_BASE)
    beyond = {
        "every public name but `checkpoint` used": third_party(_USE) - base,
        "a module resolved and reported": third_party(_WORK) - base,
    }
    table = [
        (
            "third-party modules after `import flax_layoutmap`",
            listed(alone),
            "none",
            verdict(not alone),
        ),
        (
            "control: third-party modules after `import jax, flax.nnx`",
            f"{len(base)}, `jax` and `flax` among them",
            "more than 2",
            verdict({"jax", "flax"} < base),
        ),
    ]
    for what, extra in beyond.items():
        text = f"third-party modules beyond that: {what}"
        table.append((text, listed(extra), "none", verdict(not extra)))
    for what, code in (("import alone", _IMPORT), ("every name used", _USE)):
        sums = [own_import_seconds(code) for _ in range(repeats)]
        seconds = statistics.median(total for total, _ in sums)
        slowest = ", ".join(f"`{n}` {s * 1000:.1f} ms" for n, s in sums[-1][1][:3])
        table.append(
            (
                f"own code, {what} (median of {repeats}; slowest: {slowest})",
                f"{seconds * 1000:.1f} ms",
                f"≤ {OWN_SECONDS * 1000:.0f} ms",
                verdict(seconds <= OWN_SECONDS),
            )
        )
    return table


def main(arguments: list[str]) -> int:
    """Run the benchmark; the exit status is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    table = rows(parser.parse_args(arguments).repeats)
    python = platform.python_version()
    print(f"{datetime.date.today()}, {os.cpu_count()} CPU cores, Python {python}\n")
    print("| what | measured | target | |\n|---|---|---|---|")
    for row in table:
        print("| " + " | ".join(row) + " |")
    return int(any(row[-1] == "FAIL" for row in table))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
