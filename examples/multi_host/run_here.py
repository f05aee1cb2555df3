"""Run `train_lm.py` unchanged as several processes of one job.

    python examples/multi_host/run_here.py                      # two processes
    python examples/multi_host/run_here.py --processes 4 -- --steps 50

What comes after `--` goes to `train_lm.py`. Each process has 8 / processes virtual CPU
devices; on a pod slice each host runs the same script (docs/many_hosts.md).
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "train_lm.py"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="Train in several processes, here.")
    parser.add_argument("--processes", type=int, default=2, choices=(1, 2, 4, 8))
    parser.add_argument("rest", nargs="*", help="for train_lm.py, after --")
    options = parser.parse_args()
    job = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(8 // options.processes),
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"127.0.0.1:{free_port()}",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": str(options.processes),
    }
    with tempfile.TemporaryDirectory() as shared:
        command = [sys.executable, str(SCRIPT), "--distributed", *options.rest]
        if not any(word.startswith("--checkpoint-dir") for word in options.rest):
            command.append(f"--checkpoint-dir={shared}")
        started = [
            subprocess.Popen(
                command, env={**job, "KERAS_DISTRIBUTION_PROCESS_ID": str(number)}
            )
            for number in range(options.processes)
        ]
        return max(abs(process.wait()) for process in started)


if __name__ == "__main__":
    sys.exit(main())
