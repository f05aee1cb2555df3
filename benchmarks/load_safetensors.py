"""Benchmark loading safetensors into shards against handwritten code.

    python benchmarks/load_safetensors.py

Eight tensors of bfloat16, 512 MiB together in one file that `safetensors` writes, are
loaded onto eight devices of one process: by rows, by columns, and transposed into rows
and columns. Each cell runs in a process of its own, in turn, several rounds. The file
is in the page cache. Prints a Markdown table of medians. Then come what each of four
processes would read, as planned, and the memory that whole models take, by their
mappings and presets.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec  # noqa: E402

import flax_layoutmap as flm  # noqa: E402
from flax_layoutmap.checkpoint import mappings  # noqa: E402

TENSORS, ROWS, COLUMNS = 8, 4096, 8192
NUMPY = "`safetensors.numpy.load_file`, `device_put`"
SLICES = "`safe_open`, `get_slice`, `make_array_from_callback`"
ORBAX = "Orbax v1, its safetensors layout"
OURS = "**restore_safetensors**"
ROWS_OF = (NUMPY, SLICES, ORBAX, OURS)
# What is made of a tensor: its axes, and whether it is transposed first.
KINDS: dict[str, tuple[tuple[Any, ...], bool]] = {
    "rows": (("x", None), False),
    "columns": ((None, "x"), False),
    "transposed, rows": (("x", None), True),
    "transposed, columns": ((None, "x"), True),
}


def mesh_of(count: int = 8) -> Mesh:
    """All devices on one axis."""
    return Mesh(np.array(jax.devices()[:count]), ("x",), axis_types=(AxisType.Auto,))


def loader(row: str, kind: str, folder: str) -> Callable[[], Any] | None:
    """How a row loads the file; None where it cannot."""
    axes, turned = KINDS[kind]
    sharding = NamedSharding(mesh_of(), PartitionSpec(*axes))
    file = f"{folder}/model.safetensors"
    if row == OURS:
        layout_map = flm.LayoutMap(sharding.mesh)
        layout_map["."] = axes
        return lambda: ours(folder, layout_map, turned)
    if row == NUMPY:
        from safetensors.numpy import load_file

        def load() -> Any:
            found = load_file(file)
            return [
                jax.device_put(x.T if turned else x, sharding) for x in found.values()
            ]

        return load
    if row == SLICES:
        from safetensors import safe_open

        def sliced() -> Any:
            shape = (COLUMNS, ROWS) if turned else (ROWS, COLUMNS)
            with safe_open(file, "np") as opened:

                def part(name: str) -> Callable[[Any], Any]:
                    held = opened.get_slice(name)
                    if turned:
                        return lambda index: held[index[::-1]].T
                    return lambda index: held[index]

                return [
                    jax.make_array_from_callback(shape, sharding, part(name))
                    for name in opened.keys()
                ]

        return sliced
    if turned:
        return None  # it reads tensors as they are
    from orbax.checkpoint import v1

    def orbax() -> Any:
        context = v1.Context()
        context.checkpoint_layout = v1.options.CheckpointLayout.SAFETENSORS
        shape = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.bfloat16, sharding=sharding)
        with context:
            return v1.load(folder, {f"w{at}": shape for at in range(TENSORS)})

    return orbax


def ours(folder: str, layout_map: Any, turned: bool, **options: Any) -> Any:
    """The row of this library."""
    shape = (COLUMNS, ROWS) if turned else (ROWS, COLUMNS)
    target = {
        f"w{at}": jax.ShapeDtypeStruct(shape, "bfloat16") for at in range(TENSORS)
    }
    steps = mappings.transpose() if turned else ()
    mapping = [(r"(w\d)", r"\1", steps)]
    return flm.checkpoint.restore_safetensors(
        folder, target, layout_map=layout_map, mapping=mapping, **options
    )


def bytes_read() -> int:
    """Bytes that this process has read with system calls."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def resident(name: str) -> int:
    """Bytes of memory of this process: `VmRSS` now, `VmHWM` at its peak."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def run_row(row: str, kind: str, folder: str) -> None:
    """Measure one row in this process, and print JSON."""
    load = loader(row, kind, folder)
    if load is None:
        print(json.dumps(None))
        return
    jax.block_until_ready(jnp.zeros(8) + 1)  # the backend is up
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins here
    read, start, cpu = bytes_read(), time.perf_counter(), time.process_time()
    made = jax.block_until_ready(load())
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    read = bytes_read() - read
    peak = resident("VmHWM")
    total = sum(
        float(jnp.sum(x[::97, ::89].astype("float32"))) for x in jax.tree.leaves(made)
    )
    result = {"seconds": seconds, "cpu": cpu, "read": read, "grown": peak - before}
    print(json.dumps({**result, "sum": round(total, 3)}))


# ------------------------------------------------------------------------- models

D, HEADS, HIDDEN, VOCAB, LAYERS = 1024, 16, 4096, 8192, 10
# Name → family, whether its layers are stacked, whether the file is in float8.
MODELS = {
    "Llama": ("llama", False, False),
    "Llama, layers stacked": ("llama", True, False),
    "Qwen 3, float8 to bfloat16": ("qwen3", False, True),
}


def write_model(folder: str, float8: bool) -> None:
    """A file with the names of Llama, in bfloat16, or float8 with scales."""
    from safetensors.numpy import save_file

    rng, found = np.random.default_rng(0), {}

    def add(name: str, *shape: int, scaled: bool = False) -> None:
        value = rng.random(shape, np.float32)
        found[name] = value.astype(jnp.float8_e4m3fn if scaled else jnp.bfloat16)
        if scaled:
            blocks = [-(-size // 128) for size in shape]
            found[f"{name}_scale_inv"] = rng.random(blocks, np.float32)

    add("model.embed_tokens.weight", VOCAB, D)
    add("lm_head.weight", VOCAB, D)
    add("model.norm.weight", D)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name in "qkvo":
            add(f"{at}.self_attn.{name}_proj.weight", D, D, scaled=float8)
        for name in ("gate", "up"):
            add(f"{at}.mlp.{name}_proj.weight", HIDDEN, D, scaled=float8)
        add(f"{at}.mlp.down_proj.weight", D, HIDDEN, scaled=float8)
        for name in ("input_layernorm", "post_attention_layernorm"):
            add(f"{at}.{name}.weight", D)
    save_file(found, f"{folder}/model.safetensors")


def model_target(stacked: bool) -> Any:
    """The leaves of that model."""

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def layer(*lead: int) -> dict[str, Any]:
        heads = (HEADS, D // HEADS)
        wide = {"kernel": leaf(*lead, D, HIDDEN)}
        attention: dict[str, Any] = {
            name: {"kernel": leaf(*lead, D, *heads)}
            for name in ("query", "key", "value")
        }
        return {
            "attention": attention | {"out": {"kernel": leaf(*lead, *heads, D)}},
            "mlp": {
                **{"gate": wide, "up": wide},
                "down": {"kernel": leaf(*lead, HIDDEN, D)},
            },
            "attention_norm": {"scale": leaf(*lead, D)},
            "mlp_norm": {"scale": leaf(*lead, D)},
        }

    return {
        "embed": {"embedding": leaf(VOCAB, D)},
        "lm_head": {"kernel": leaf(D, VOCAB)},
        "norm": {"scale": leaf(D)},
        "layers": layer(LAYERS) if stacked else [layer() for _ in range(LAYERS)],
    }


def load_model(name: str, folder: str) -> dict[str, float]:
    """The memory that a load in this process takes."""
    family, stacked, _ = MODELS[name]
    rules = flm.presets.load(family, "fsdp=2,tensor=4")
    mapping = getattr(mappings, family)(scanned=stacked)
    target = model_target(stacked)
    jax.block_until_ready(jnp.zeros(8) + 1)  # the backend is up
    before = resident("VmRSS")
    made = jax.block_until_ready(
        flm.checkpoint.restore_safetensors(
            folder, target, layout_map=rules, mapping=mapping
        )
    )
    leaves = jax.tree.leaves(made)
    return {
        "grown": resident("VmHWM") - before,
        "shards": sum(s.data.nbytes for x in leaves for s in x.addressable_shards),
        "largest": max(x.nbytes for x in leaves),
    }


def print_models() -> None:
    """Print the table of models."""
    print("\n| model | its shards, MiB | largest leaf | peak RSS, MiB more |", end="")
    print(" ÷ shards | ÷ (1.1 × shards + a leaf) |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, (_, _, float8) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_model(folder, float8)
            command = [sys.executable, __file__, "--row", name, "--folder", folder]
            done = subprocess.run(command, stdout=-1, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        shards, largest, grown = (
            found[key] / 2**20 for key in ("shards", "largest", "grown")
        )
        print(f"| {name} | {shards:.0f} | {largest:.0f} | {grown:.0f} |", end="")
        print(f" {grown / shards:.2f} | {grown / (1.1 * shards + largest):.2f} |")


def write(folder: str) -> None:
    """The file, as `safetensors` writes it."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    bits = {
        f"w{at}": rng.integers(0, 1 << 14, (ROWS, COLUMNS), np.uint16).view(
            jnp.bfloat16
        )
        for at in range(TENSORS)
    }
    save_file(bits, f"{folder}/model.safetensors")


def share_of(kind: str, folder: str) -> float:
    """What the first of four processes reads ÷ what it needs, as planned."""
    from flax_layoutmap.checkpoint import _mapping_blocks, _safetensors_header
    from flax_layoutmap.checkpoint._mapping import Source
    from flax_layoutmap.checkpoint._safetensors_read import bytes_to_read

    axes, turned = KINDS[kind]
    shape = (COLUMNS, ROWS) if turned else (ROWS, COLUMNS)
    steps = (mappings.transpose(),) if turned else ()
    blocks = Source(("w0",), steps).recipes(shape)[0].blocks
    tensor = _safetensors_header.open_safetensors(folder).tensors["w0"]
    sharding = NamedSharding(mesh_of(), PartitionSpec(*axes))
    pieces = []
    for device in range(2):  # of eight
        index = sharding.devices_indices_map(shape)[jax.devices()[device]]
        box = [part.indices(n)[:2] for part, n in zip(index, shape, strict=True)]
        out = np.empty([b - a for a, b in box], jnp.bfloat16)
        pieces += [p for _, p in _mapping_blocks.pieces_of(blocks, box, out)]
    needed = sum(piece.out.size for piece in pieces) * 2
    return bytes_to_read(tensor, pieces) / needed


def main() -> int:
    """Print the table; 1 if the rows disagree about the numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    for name in ("--row", "--kind", "--folder"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row in MODELS:
        print(json.dumps(load_model(given.row, given.folder)))
        return 0
    if given.row:
        run_row(given.row, given.kind, given.folder)
        return 0
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    shares = {}
    with tempfile.TemporaryDirectory() as folder:
        write(folder)
        for _ in range(given.rounds):
            for kind in KINDS:
                for row in ROWS_OF:
                    command = [sys.executable, __file__, "--row", row, "--kind", kind]
                    command += ["--folder", folder]
                    done = subprocess.run(command, stdout=-1, text=True, check=True)
                    cell = json.loads(done.stdout.splitlines()[-1])
                    if cell is not None:
                        cells.setdefault((row, kind), []).append(cell)
                        print(
                            f"  {kind}, {row}: {cell['seconds']:.2f}", file=sys.stderr
                        )
        shares = {kind: share_of(kind, folder) for kind in KINDS}
    names = ("jax", "safetensors", "orbax-checkpoint")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    print(
        f"{datetime.date.today()}, {os.cpu_count()} CPU cores, "
        f"Python {platform.python_version()}, {versions}; medians of {given.rounds}\n"
    )
    print("| into | row | seconds | CPU | MiB read by calls | peak RSS, MiB more |")
    print("|---|---|--:|--:|--:|--:|")
    for kind in KINDS:
        for row in ROWS_OF:
            if (row, kind) not in cells:
                print(f"| {kind} | {row} | cannot | | | |")
                continue
            found = cells[row, kind]
            seconds, cpu, read, grown = (
                statistics.median(cell[name] for cell in found)
                for name in ("seconds", "cpu", "read", "grown")
            )
            mapped = "mapped" if read < 1 << 26 else f"{read / 2**20:.0f}"
            times = f"{seconds:.2f} | {cpu:.2f}"
            print(f"| {kind} | {row} | {times} | {mapped} | {grown / 2**20:.0f} |")
    print(
        "\nBytes that each of four processes reads ÷ bytes that it needs, as planned: "
    )
    print(", ".join(f"{kind} {share:.2f}" for kind, share in shares.items()))
    print_models()
    sums = {kind: {c["sum"] for (_, k), f in cells.items() if k == kind for c in f}
            for kind in KINDS}  # fmt: skip
    return 0 if all(len(found) == 1 for found in sums.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
