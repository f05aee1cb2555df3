"""Every way in which a restore of Orbax fails, or goes wrong in silence, and ours.

One table. Each row damages a checkpoint or asks for something that it does not have.
The error says which checkpoint, which leaf or file, what is wrong and what to do; the
target is what it was. (Rows of the async saves are in `test_checkpointer_exit.py`.)
"""

import dataclasses
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_layoutmap as flm

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]


class Net(nnx.Module):
    def __init__(self, width: int = 64, head: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(32, width, rngs=rngs)
        self.scale = nnx.Param(jnp.ones((), jnp.float32))
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))
        if head:
            self.head = nnx.Linear(width, 8, rngs=rngs)


@dataclasses.dataclass
class Case:
    """A checkpoint that may be damaged, and what is asked of it."""

    path: Path
    target: Any
    options: dict[str, Any]


Change = Callable[[Case], object]


def edited(name: str, change: Callable[[Path], object]) -> Change:
    """Damages the files of a name."""

    def damage(case: Case) -> None:
        files = [case.path / name] if "*" not in name else case.path.glob(name)
        for file in list(files):
            change(file)

    return damage


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def zeroed(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def flipped(file: Path) -> None:
    """Flips a bit in the middle, where the numbers of the largest array are."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def into(target: Callable[[], Any]) -> Change:
    """Asks for another target."""

    def change(case: Case) -> None:
        case.target = target()

    return change


def at(place: Callable[[Path], Path]) -> Change:
    """Asks for another path."""

    def change(case: Case) -> None:
        case.path = place(case.path)

    return change


def asking(**options: Any) -> Change:
    """Asks for something else."""

    def change(case: Case) -> None:
        case.options.update(options)

    return change


def laid_out(mesh: str, rules: dict[str, Any]) -> Change:
    """Asks for other layouts."""

    def change(case: Case) -> None:
        size = math.prod(int(axis.split("=")[1]) for axis in mesh.split(","))
        devices = jax.devices()[:size]
        layout_map = flm.LayoutMap(flm.DeviceMesh(mesh, devices=devices), strict=False)
        layout_map.update(rules)
        case.options["layout_map"] = layout_map

    return change


def with_dtype(name: str, dtype: Any) -> Callable[[], Net]:
    def make() -> Net:
        net = Net()
        variable = getattr(net, name)
        variable.set_value(variable.get_value().astype(dtype))
        return net

    return make


def kernel_of(*shape: int) -> Callable[[], Any]:
    def make() -> Net:
        net = Net()
        net.up.kernel.set_value(jnp.zeros(shape))
        return net

    return make


def made(path: Path, *parts: str) -> Path:
    folder = path.parent.joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def junk(path: Path) -> Path:
    folder = made(path, "junk")
    (folder / "notes").write_text("x")
    return folder


# Row → what is done, and phrases of the error, `{path}` being the checkpoint.
REFUSED: dict[str, tuple[Change, list[str]]] = {
    # ---- trees that differ
    "a leaf that the checkpoint does not have": (
        into(lambda: Net(head=True)),
        ["cannot restore {path}", "head/kernel (64,8)", "not in the checkpoint"],
    ),
    "a leaf that has another name": (
        asking(rename={"up/kernel": "up/kernels"}),
        [
            "up/kernel (32,64)",
            "not in the checkpoint; did you mean 'up/kernels'? then "
            "pass rename={'^up/kernels$': 'up/kernel'}",
        ],
    ),
    "a leaf that the target does not have": (
        into(lambda: nnx.state(Net())["up"]),
        ["cannot restore {path}", "pass target={'up': target}"],
    ),
    "leaves that only the checkpoint has": (
        into(lambda: {"up": nnx.state(Net())["up"]}),
        ["scale ()", "not in the target", "to leave it out: exclude='^scale$'"],
    ),
    "an abstract leaf that is to be kept": (
        lambda case: (
            into(lambda: nnx.eval_shape(lambda: Net(head=True)))(case),
            asking(missing="keep")(case),
        ),
        ["head/kernel (64,8)", "there is no value to keep; give a concrete target"],
    ),
    # ---- shapes
    "another shape": (
        into(lambda: Net(width=128)),
        [
            "up/kernel (32,64)",
            "the checkpoint has (32,64), the target (32,128)",
            "exclude",
        ],
    ),
    "another rank": (
        into(kernel_of(2, 32, 64)),
        ["up/kernel (32,64): another rank", "nothing is padded, cut or reshaped"],
    ),
    "a NumPy target of another shape": (
        into(lambda: {"up": {"kernel": np.zeros((2, 2)), "bias": np.zeros(64)}}),
        ["up/kernel (32,64): another shape", "the target (2,2)"],
    ),
    "an array where a number is expected": (
        into(lambda: {**nnx.to_pure_dict(nnx.state(Net())), "up": 3}),
        ["up ()", "is in the target, not in the checkpoint"],
    ),
    "a number where an array is expected": (
        into(lambda: {**nnx.to_pure_dict(nnx.state(Net())), "count": jnp.zeros(2)}),
        ["count (): another rank", "the target (2,)"],
    ),
    # ---- dtypes
    "float32 into int8": (
        into(with_dtype("scale", jnp.int8)),
        ["scale ()", "has float32, the target int8", "convert it after"],
    ),
    "float32 into bool": (
        into(with_dtype("scale", jnp.bool)),
        ["scale ()", "has float32, the target bool", "convert it after"],
    ),
    "int32 into float32": (
        into(with_dtype("count", jnp.float32)),
        ["count ()", "has int32, the target float32", "convert it after"],
    ),
    "float32 into complex": (
        into(with_dtype("scale", jnp.complex64)),
        ["scale ()", "the target complex64"],
    ),
    "float32 into float8, without being asked": (
        into(with_dtype("scale", jnp.float8_e4m3fn)),
        ["scale ()", "the target float8_e4m3fn", 'pass dtype="target"'],
    ),
    # ---- layouts
    "a dim that does not divide": (
        laid_out("x=3", {"up/kernel": ("x", None)}),
        ["up/kernel (32,64)", "dim 0 of size 32", "'x'", "'up/kernel'"],
    ),
    "a spec that is too long": (
        laid_out("data=2,model=4", {"up/bias": ("data", "model")}),
        ["up/bias (64,)", "rule 1", "rank"],
    ),
    "no layouts at all": (
        lambda case: (
            asking(layout_map=None)(case),
            into(lambda: nnx.eval_shape(Net))(case),
        ),
        ["up/kernel (32,64)", "no sharding for it; pass layout_map="],
    ),
    "no room on the host": (
        asking(host_memory=1000),
        ["up/kernel (32,64)", "host_memory=1,000", "raise the limit, or shard"],
    ),
    # ---- files
    "a flipped bit": (
        edited("state/ocdbt.process_0/d/*", flipped),
        [
            "cannot restore {path}",
            "up/kernel (32,64): its data are not those that were",
        ],
    ),
    "the arrays are cut": (
        edited("state/ocdbt.process_0/d/*", cut),
        ["cannot read the checkpoint {path}", "leaf 'up/"],
    ),
    "the arrays are emptied": (
        edited("state/ocdbt.process_0/d/*", emptied),
        ["cannot read the checkpoint {path}", "leaf 'up/"],
    ),
    "the arrays are zeroed": (
        edited("state/ocdbt.process_0/d/*", zeroed),
        ["cannot read the checkpoint {path}", "leaf 'up/"],
    ),
    "the arrays are gone": (
        edited("state/ocdbt.process_0/d/*", Path.unlink),
        ["cannot read the checkpoint {path}", "leaf 'up/"],
    ),
    "no _METADATA": (
        edited("state/_METADATA", Path.unlink),
        ["{path}", "_METADATA"],
    ),
    "_METADATA is cut": (
        edited("state/_METADATA", cut),
        ["the checkpoint {path} is damaged", "_METADATA"],
    ),
    "no manifest": (
        edited("state/manifest.ocdbt", Path.unlink),
        ["the checkpoint {path} is damaged", "manifest.ocdbt"],
    ),
    "the manifest is cut": (
        edited("state/manifest.ocdbt", cut),
        ["the checkpoint {path} is damaged", "manifest.ocdbt"],
    ),
    "no index of the arrays": (
        edited("state/d", shutil.rmtree),
        ["the checkpoint {path} is damaged: {path}/state/d/", ": is missing"],
    ),
    "no _CHECKPOINT_METADATA": (
        edited("_CHECKPOINT_METADATA", Path.unlink),
        ["{path} is no checkpoint", "it has no file _CHECKPOINT_METADATA"],
    ),
    "_CHECKPOINT_METADATA is cut": (
        edited("_CHECKPOINT_METADATA", cut),
        ["the checkpoint {path} is damaged", "_CHECKPOINT_METADATA cannot be read"],
    ),
    # ---- places
    "no such path": (
        at(lambda path: path.parent / "sved"),
        ["there is no checkpoint at {path}", "did you mean 'saved'?"],
    ),
    "a file": (
        at(lambda path: path / "_CHECKPOINT_METADATA"),
        ["{path} is a file; a checkpoint is a directory"],
    ),
    "a directory of steps": (
        at(lambda path: shutil.copytree(path, made(path, "runs") / "7").parent),
        ["{path} is no checkpoint; it holds checkpoints: 7"],
    ),
    "the folder inside": (
        at(lambda path: path / "state"),
        ["{path} is no checkpoint; the checkpoint is the directory above it"],
    ),
    "an empty directory": (
        at(lambda path: made(path, "empty")),
        ["{path} is no checkpoint: the directory is empty"],
    ),
    "another directory": (
        at(junk),
        ["{path} is no checkpoint: it has no file _CHECKPOINT_METADATA"],
    ),
    "a save that did not finish": (
        at(lambda path: path.rename(f"{path}.orbax-checkpoint-tmp")),
        ["{path} is an unfinished checkpoint", "restore an earlier one"],
    ),
}

# Row → what is done, where ours gives the right values.
RIGHT: dict[str, Change] = {
    "nothing is done": lambda case: None,
    "lists, dicts and numbers as keys": into(
        lambda: nnx.to_pure_dict(nnx.state(Net()))
    ),
    "a subset": lambda case: (
        into(lambda: {"up": nnx.state(Net())["up"]})(case),
        asking(unexpected="ignore")(case),
    ),
    "no notes on the arrays": edited("state/array_metadatas", shutil.rmtree),
    "no mark of success": edited("commit_success.tx*", Path.unlink),
    "no mark of Orbax": edited("orbax.checkpoint", Path.unlink),
    "other axes, other devices": laid_out("x=4", {"up/kernel": (None, "x")}),
    "one device": laid_out("x=1", {"up/kernel": ("x", None)}),
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("matrix") / "saved"
    layout_map = flm.LayoutMap("data=2,model=4", strict=False)
    layout_map["up/kernel"] = ("data", "model")
    flm.checkpoint.save(path, layout_map.place(Net()), layout_map=layout_map)
    return path


@pytest.fixture
def case(intact: Path, tmp_path: Path) -> Case:
    path = shutil.copytree(intact, tmp_path / "saved")
    layout_map = flm.LayoutMap("data=2,model=4", strict=False)
    layout_map["up/kernel"] = (None, "model")
    net = Net()
    net.up.kernel.set_value(jnp.full((32, 64), 7.0))
    return Case(path, net, {"layout_map": layout_map})


def values(tree: Any) -> list[Any]:
    return jax.tree.leaves(nnx.state(tree) if isinstance(tree, nnx.Module) else tree)


@pytest.mark.parametrize("row", REFUSED)
def test_refused(row: str, case: Case) -> None:
    change, phrases = REFUSED[row]
    change(case)
    before = values(case.target)
    with pytest.raises(flm.errors.CheckpointError) as caught:
        flm.checkpoint.restore(case.path, case.target, **case.options)
    text = str(caught.value)
    for phrase in phrases:
        assert phrase.replace("{path}", str(case.path)) in text
    assert len(text) < 1500
    after = values(case.target)
    assert len(after) == len(before)
    assert all(new is old for new, old in zip(after, before, strict=True))


@pytest.mark.parametrize("row", RIGHT)
def test_right(row: str, case: Case) -> None:
    RIGHT[row](case)
    result = flm.checkpoint.restore(case.path, case.target, **case.options)
    kernel = result["up"]["kernel"] if isinstance(result, dict) else result.up.kernel
    kernel = getattr(kernel, "get_value", lambda: kernel)()
    assert np.array_equal(kernel, Net().up.kernel[...])
    mesh = case.options["layout_map"].freeze().mesh.jax_mesh
    assert kernel.sharding.mesh == mesh and not isinstance(kernel, jax.ShapeDtypeStruct)
