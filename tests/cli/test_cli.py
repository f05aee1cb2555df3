"""The command line: every command, its example, exit codes and output streams."""

import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import flax_layoutmap as flm
from flax_layoutmap import _cli
from flax_layoutmap._cli import _parser

MODEL = """
import flax_layoutmap as flm
import jax
import jax.numpy as jnp
from flax import linen, nnx


class Block(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)


def make(width: int = 8, layers: int = 1):
    block = Block(width, rngs=nnx.Rngs(0))
    return block if layers == 1 else nnx.List(
        [Block(width, rngs=nnx.Rngs(0)) for _ in range(layers)]
    )


def linen_variables():
    return linen.Dense(16).init(jax.random.key(0), jnp.ones((1, 8)))


def broken():
    raise RuntimeError("no such config")


def nothing():
    return ()


def ends_the_program():
    raise SystemExit(0)


table = [("up/kernel", (None, "mp")), (".*", None)]
plan = {"up": "colwise"}
keras = {"up/kernel": (None, "data")}


def loss(params, x, *, scale=1.0):
    return scale * (x @ params["up"]).sum()


def three():
    return {"up": jnp.ones((8, 8))}, jnp.ones((4, 8)), 3


def wrong(params, x, number):
    return params["nope"]


pairs = [("up/kernel", (None, "model")), ("down/kernel", ("model", None))]
layout_map = flm.LayoutMap.from_rules(pairs, "data=2,model=4", strict=False)
rule_set = layout_map.freeze()
number = 3


def make_rules():
    return layout_map


def step(model, x):
    return model.down(model.up(x)).sum()


def arguments(batch: int = 64):
    return make(), jnp.ones((batch, 8))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: `my_model.py`, `rules.toml`, and the checkpoint `runs/7`."""
    home = tmp_path_factory.mktemp("home")
    (home / "my_model.py").write_text(MODEL)
    layout_map = flm.LayoutMap("data=2,model=4", strict=False)
    layout_map["up/kernel"] = (None, "model")
    layout_map["down/kernel"] = ("model", None)
    layout_map.to_file(home / "rules.toml")
    (home / "extends.toml").write_text('schema = 1\nextends = "no.toml"\n')

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.up = nnx.Linear(8, 32, rngs=nnx.Rngs(0))
            self.down = nnx.Linear(32, 8, rngs=nnx.Rngs(1))

    model = flm.create(Block, layout_map)
    flm.checkpoint.save(home / "runs" / "7", {"model": model}, layout_map=layout_map)
    return home


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Runs a command in the folder: exit code, stdout, stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("COLUMNS", "200")

    def run(command: str) -> tuple[int, str, str]:
        try:
            code = _cli.main(shlex.split(command))
        except SystemExit as ended:  # argparse
            code = int(ended.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    yield run
    sys.modules.pop("my_model", None)


SOURCES = "--model my_model:make --rules rules.toml --mesh data=2,model=4"


def leaves_in(out: str) -> dict[str, Any]:
    """Path → leaf, of a report as JSON."""
    return {leaf["path"]: leaf for leaf in json.loads(out)["leaves"]}


def test_report(run: Any) -> None:
    code, out, err = run(f"report {SOURCES}")
    assert (code, err) == (0, "")
    assert "up/kernel" in out and "(8,8)" in out and "\x1b" not in out
    for flags in ("--json", "--format json"):
        out = run(f"report {SOURCES} {flags}")[1]
        assert leaves_in(out)["up/kernel"]["shard_shape"] == [8, 8]
    assert run(f"report {SOURCES} --format markdown")[1].startswith("| path |")


def test_arguments_of_the_factory(run: Any) -> None:
    code, out, _ = run(f"report {SOURCES} --arg width=16 --arg layers=3 --json")
    assert code == 0 and leaves_in(out)["2/up/kernel"]["shape"] == [16, 64]
    assert "{0..2}/up/kernel" in run(f"report {SOURCES} --arg layers=3")[1]
    assert "2/up/kernel" in run(f"report {SOURCES} --arg layers=3 --no-fold")[1]


def test_a_class_gets_rngs(run: Any) -> None:
    code, out, err = run(
        "report --model my_model:Block --arg width=8 --rules my_model:layout_map"
    )
    assert (code, err) == (0, "") and "down/kernel" in out


@pytest.mark.parametrize("rules", ["pairs", "layout_map", "rule_set", "make_rules"])
def test_rules_of_a_module(rules: str, run: Any) -> None:
    mesh = "data=2,model=8"
    code, out, _ = run(
        f"report --model my_model:make --rules my_model:{rules} --mesh {mesh} --json"
    )
    assert code == 0 and leaves_in(out)["up/kernel"]["shard_shape"] == [8, 4]


def test_an_optimizer(run: Any) -> None:
    code, out, _ = run(
        f"report {SOURCES} --optimizer optax:adamw --optimizer-arg "
        "learning_rate=0.001 --json"
    )
    moment = leaves_in(out)["optimizer/opt_state/0/mu/up/kernel"]
    assert code == 0 and moment["role"] == "optimizer"
    assert moment["shard_shape"] == [8, 8]


def test_linen(run: Any) -> None:
    code, out, err = run(
        "report --model my_model:linen_variables --rules my_model:layout_map "
        "--optimizer optax:adam --optimizer-arg learning_rate=0.1 --json"
    )
    assert (code, err) == (0, "")
    leaves = leaves_in(out)
    assert leaves["model/params/kernel"]["role"] == "parameter"
    assert leaves["optimizer/0/mu/kernel"]["role"] == "optimizer"


def test_a_checkpoint_needs_no_code(run: Any) -> None:
    code, out, _ = run("report --checkpoint runs --mesh data=4,model=8 --json")
    assert code == 0 and leaves_in(out)["model/up/kernel"]["shard_shape"] == [8, 4]
    own = run("report --checkpoint runs/7 --rules runs/7 --json")[1]
    assert next(iter(leaves_in(own))).startswith("model/")


def test_lint(run: Any) -> None:
    code, out, _ = run("lint --rules rules.toml --mesh data=2,model=4")
    assert (code, out) == (0, "no findings\n")
    bad = f"lint {SOURCES.replace('model=4', 'model=3')}"
    code, out, _ = run("lint --model my_model:make --rules my_model:layout_map --json")
    assert code == 0 and all(
        i["severity"] != "error" for i in json.loads(out)["issues"]
    )
    code, out, err = run(f"{bad} --max-replicated 0.0001")
    assert (code, err) == (1, "") and out.endswith("\n2 errors, 2 warnings\n")
    assert "LM114 error: up/kernel (8,32): rule 1 'up/kernel' → (None, 'model')" in out
    assert "LM114 error: down/kernel (32,8)" in out and "LM115" not in out
    code, out, _ = run(f"{bad} --json")
    found = json.loads(out)
    assert code == 1 and found["replicated_share"] is None
    assert [issue["code"] for issue in found["issues"]][:2] == ["LM114", "LM114"]
    assert run(f"{bad} --ignore LM114")[0] == 0
    assert run(f"{bad} --ignore up/ --ignore down/")[0] == 0
    assert run(f"lint {SOURCES} --max-replicated 0.0001")[0] == 1
    code, out, err = run(f"lint {SOURCES} --max-replicated 0.0001 --json")
    first, *_ = json.loads(out)["issues"]
    assert (code, first["code"], err) == (1, "LM115", "")


def test_explain(run: Any) -> None:
    code, out, _ = run(f"explain up/kernel {SOURCES}")
    assert code == 0 and "rule 1 'up/kernel'" in out
    code, out, err = run(f"explain up/kernle {SOURCES}")
    assert (code, out) == (2, "") and "up/kernel" in err and "Traceback" not in err
    assert "rule 1" in json.loads(run(f"explain up/kernel {SOURCES} --json")[1])["text"]


def test_diff(run: Any) -> None:
    code, out, _ = run(f"diff {SOURCES}")
    assert code == 0
    code, out, _ = run(f"diff {SOURCES} --mesh-after data=4,model=2")
    assert code == 1 and "up/kernel" in out
    code, out, _ = run(f"diff {SOURCES} --arg-after width=16 --json")
    assert code == 1 and json.loads(out)
    code, out, _ = run(f"diff {SOURCES} --checkpoint-after runs/7 --format markdown")
    assert code == 1 and "model/up/kernel" in out


def test_draw(run: Any, folder: Path) -> None:
    code, out, err = run(f"draw {SOURCES}")
    assert (code, err) == (0, "") and "up" in out
    assert run(f"draw {SOURCES} --leaf up/kernel")[0] == 0
    code, out, _ = run(f"draw {SOURCES} -o page.html")
    assert code == 0 and "wrote page.html" in out
    assert "<html" in (folder / "page.html").read_text()


def test_plan(run: Any) -> None:
    own = "plan my_model:step --args my_model:arguments --rules rules.toml"
    code, out, err = run(f"{own} --mesh data=2,model=4")
    assert (code, err) == (0, "") and "all-reduce" in out
    code, out, _ = run(f"{own} --mesh data=2,model=4 --arg batch=128 --json")
    kinds = {entry["kind"] for entry in json.loads(out)["collectives"]}
    assert code == 0 and "all-reduce" in kinds
    code, out, _ = run(f"{own} --mesh data=-1,model=4 --topology v5e:4x4")
    assert code == 0 and "v5e" in out
    code, _, err = run(f"{own} --mesh data=3,model=5 --topology v5e:4x4")
    assert code == 2 and "16" in err


def test_suggest(run: Any, folder: Path) -> None:
    own = "suggest my_model:step --args my_model:arguments"
    code, out, err = run(f"{own} --mesh data=4,model=2 -o found.toml")
    assert (code, err) == (0, "wrote found.toml\n")
    assert "suggestion for step on mesh" in out and "a step is estimated" in out
    assert flm.LayoutMap.from_file(folder / "found.toml").device_mesh is not None
    quick = f"{own} --mesh data=4,model=2 --check none --limit-seconds 0"
    again = f"{quick} --rules found.toml -o again.toml --format markdown"
    code, out, err = run(again)
    assert code == 0 and "not checked" in out
    assert err == "not written: again.toml; the current rules are better\n"
    assert "found by the search; the current rules are better" in out
    assert not (folder / "again.toml").exists()
    assert "- interrupted: " in out and " today |\n" in out
    code, out, _ = run(f"{quick} --hbm 1e-6 --json")
    data = json.loads(out)
    assert code == 1 and not data["fits"] and data["choices"]["suggested"]["rules"]
    code, _, err = run(own)
    assert code == 2 and err.startswith("flax-layoutmap suggest: a mesh is missing: ")
    code, out, err = run(f"{own} --mesh data=8 -o rules.yaml")  # before the search
    assert code == 2 and not out and "a file of rules ends in .toml or .json" in err


def test_inspect(run: Any) -> None:
    code, out, _ = run("inspect runs")
    assert code == 0 and "model/up/kernel" in out and "step 7 (1 of 1)" in out
    data = json.loads(run("inspect runs/7 --json")[1])
    by_path = {leaf["path"]: leaf for leaf in data["leaves"]}
    assert by_path["model/up/kernel"]["spec"] == [None, "model"]
    assert data["mesh"] == {"data": 2, "model": 4} and data["schema"] == 1


def with_another_checksum(place: Path, leaf: str) -> None:
    file = place / "_CHECKPOINT_METADATA"
    data = json.loads(file.read_text())
    record = data["custom_metadata"]["flax_layoutmap"]
    del record["digest"]  # which older versions did not write
    record["checksums"][leaf] = "0" * len(record["checksums"][leaf])
    file.write_text(json.dumps(data))


def test_verify(run: Any, folder: Path) -> None:
    code, out, _ = run("verify runs/7")
    assert code == 0 and "4 leaves are as saved" in out
    assert json.loads(run("verify runs/7 --json")[1])["leaves"] == 4
    shutil.copytree(folder / "runs" / "7", folder / "other")
    with_another_checksum(folder / "other", "model/up/kernel")
    code, out, err = run("verify other")
    assert (code, out) == (1, "") and "model/up/kernel" in err
    problems = json.loads(run("verify other --json")[1])["problems"]
    assert len(problems) == 1 and "model/up/kernel" in problems[0]


def test_verify_the_directory_of_a_run(run: Any, folder: Path) -> None:
    """The latest step, as the other commands, or the one that is named."""
    directory = folder / "training"
    with flm.checkpoint.Checkpointer(directory) as checkpointer:
        for step in (10, 25):
            checkpointer.save(step, {"w": np.full(8, step)})
    code, out, err = run("verify training")
    assert (code, err) == (0, "") and f"{directory}/25: 1 leaf is as saved" in out
    assert json.loads(run("verify training --json")[1])["path"] == f"{directory}/25"
    assert f"{directory}/10: 1 leaf" in run("verify training --step 10")[1]
    assert flm.checkpoint.verify(directory).path == f"{directory}/25"
    code, out, err = run("verify training --step 26")
    assert (code, out) == (2, "") and "has no step 26; it has 10, 25" in err
    with_another_checksum(directory / "25", "w")
    code, out, err = run("verify training")
    assert (code, out) == (1, "") and f"{directory}/25 is damaged" in err
    assert run("verify training --step 10")[0] == 0


def test_convert(run: Any, folder: Path) -> None:
    code, out, _ = run("convert rules.toml again.json --mesh data=1,model=2")
    assert code == 0 and "2 rules" in out
    read = flm.LayoutMap.from_file(folder / "again.json")
    assert read.device_mesh is not None and read.device_mesh.shape == (1, 2)
    assert list(read) == ["up/kernel", "down/kernel"]
    code, _, err = run("convert rules.toml again.json")
    assert code == 2 and "--overwrite" in err
    assert run("convert runs/7 again.json --overwrite")[0] == 0


def test_convert_from_other_libraries(run: Any, folder: Path) -> None:
    code = run(
        "convert my_model:table tp.toml --from partition-rules --mesh data=2,model=4 "
        "--axis mp=model"
    )[0]
    assert code == 0
    read = flm.LayoutMap.from_file(folder / "tp.toml")
    assert read["up/kernel"] == flm.TensorLayout((None, "model", ...), read.device_mesh)
    plan = "convert my_model:plan plan.toml --from tp-plan --mesh model=4"
    assert run(f"{plan} --axis tensor=model")[0] == 0
    read = flm.LayoutMap.from_file(folder / "plan.toml")
    assert read["up/kernel"] == flm.TensorLayout((None, "model", ...), read.device_mesh)
    assert run("convert my_model:table k.toml --from keras --mesh mp=2")[0] == 2
    assert run("convert my_model:keras k.toml --from keras --mesh data=2")[0] == 0
    code, out, _ = run("convert runs/7 saved.toml --from shardings")
    assert code == 0
    read, resolved = flm.LayoutMap.from_file(folder / "saved.toml"), 0
    for leaf in flm.checkpoint.resolve(folder / "runs/7"):
        resolved += 1
        other = flm.checkpoint.resolve(folder / "runs/7", layout_map=read)[leaf.path]
        assert other.layout == leaf.layout
    assert resolved


def test_preset(run: Any, folder: Path) -> None:
    code, out, _ = run("preset llama --mesh fsdp=2,model=4 --axis tensor=model")
    (folder / "preset.toml").write_text(out)
    mesh = flm.DeviceMesh.abstract("fsdp=2,model=4")
    wanted = flm.presets.llama(mesh, axes={"tensor": "model"})
    assert code == 0 and flm.LayoutMap.from_file(folder / "preset.toml") == wanted


def test_detect(run: Any) -> None:
    golden = Path(__file__).parents[1] / "golden"
    code, out, _ = run(f"detect --checkpoint {golden / 'hf_llama'}")
    assert code == 0 and out.startswith("llama: ")
    code, out, _ = run("detect --model my_model:make")
    assert code == 1 and "not llama: no path matches" in out


def test_detect_in_the_directory_of_a_run(run: Any, folder: Path) -> None:
    """The latest step, or the one that is named; of several trees, the one named."""
    heads = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
    llama = {name: {"kernel": np.zeros((8, 8), np.float32)} for name in heads}
    other = {"w": np.zeros((8, 8), np.float32)}
    flm.checkpoint.save(folder / "steps" / "10", llama)
    flm.checkpoint.save(folder / "steps" / "25", other)
    assert run("detect --checkpoint steps")[0] == 1
    assert run("detect --checkpoint steps --step latest")[0] == 1
    code, out, _ = run("detect --checkpoint steps --step 10")
    assert code == 0 and out.startswith("llama: ")
    code, _, err = run("detect --checkpoint steps --step 26")
    assert code == 2 and "has no step 26; it has 10, 25" in err
    with ocp.CheckpointManager(folder / "several") as manager:
        trees = {"params": llama, "more": other}
        saved = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        manager.save(1, args=ocp.args.Composite(**saved))
    code, out, _ = run("detect --checkpoint several --item params")
    assert code == 0 and out.startswith("llama: ")
    assert run("detect --checkpoint several --item more")[0] == 1
    code, _, err = run("detect --checkpoint several")
    assert code == 2 and "item='more' or item='params'" in err


def in_a_process(
    *command: str, folder: Path, stdout: int = subprocess.PIPE
) -> "subprocess.CompletedProcess[str]":
    """Runs Python on a command line, with the package as it is in this checkout."""
    own = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**own, "JAX_PLATFORMS": "cpu"},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_restore_to_another_mesh(folder: Path) -> None:
    """In a process of its own, as it makes devices of its own."""
    code = """
import os, sys
from flax_layoutmap._cli import main
command = "restore runs/7 --to resharded --mesh data=4,model=4".split()
assert main([*command, "--dry-run"]) == 0
assert not os.path.exists("resharded")
sys.exit(main(command))
"""
    done = in_a_process("-c", code, folder=folder)
    assert done.returncode == 0, done.stderr
    dry, _, wrote = done.stdout.partition("wrote resharded: 4 leaves")
    assert "4 leaves to read" in dry and wrote
    before, after = (
        flm.checkpoint.restore(folder / name, mesh=flm.DeviceMesh("data=2,model=4"))
        for name in ("runs/7", "resharded")
    )
    assert jax.tree.structure(before) == jax.tree.structure(after)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    info = flm.checkpoint.inspect(folder / "resharded")
    chunks = {leaf.path: leaf.chunk for leaf in info.leaves}
    assert chunks["model/up/kernel"] == (8, 8)
    assert info.mesh is not None and info.mesh.axis_sizes == {"data": 4, "model": 4}


@pytest.mark.slow
def test_a_module_that_makes_a_mesh(folder: Path) -> None:
    """Its devices are not here: those of the CPU stand in for them."""
    code = "import jax\nassert jax.device_count() == 1\n"
    code += "from flax_layoutmap._cli import main\n"
    code += "main(['report', '--model', 'my_model:make', '--rules', 'my_model:pairs', "
    code += "'--mesh', 'data=2,model=8'])"
    done = in_a_process("-c", code, folder=folder)
    assert done.returncode == 0 and "mesh data=2,model=8" in done.stdout, done.stderr


def test_json_of_every_command(run: Any, folder: Path) -> None:
    """All of it is one object with the number of its schema."""
    commands = [
        *(f"report {SOURCES}", f"lint {SOURCES}", f"explain up/kernel {SOURCES}"),
        *(f"diff {SOURCES} --arg-after width=16", f"draw {SOURCES}"),
        *("inspect runs", "verify runs", "convert rules.toml every.json"),
        "restore runs/7 --to nowhere --mesh data=4,model=2 --dry-run",
        "plan my_model:step --args my_model:arguments --rules rules.toml",
        "suggest my_model:step --args my_model:arguments --mesh data=2",
        "detect --checkpoint runs/7",
    ]
    rest = {"compile", "preset"}
    assert {c.split()[0] for c in commands} == EXAMPLES.keys() - rest
    for command in commands:
        code, out, err = run(f"{command} --json")
        assert code == (1 if command.split()[0] in FINDING else 0), err
        assert json.loads(out)["schema"] == 1, command
    assert not (folder / "nowhere").exists()


EXAMPLES = {name: f"{name} {parts[1]}" for name, parts in _parser.COMMANDS.items()}


# Commands whose example finds something.
FINDING = ("diff", "detect")


@pytest.mark.parametrize(
    "name", [name for name in EXAMPLES if name not in ("restore", "compile")]
)
def test_the_example_of_the_help(name: str, run: Any) -> None:
    code, _, err = run(EXAMPLES[name])
    assert (code, err) == (1 if name in FINDING else 0, "")


def test_the_page_has_every_example() -> None:
    page = Path(__file__).parents[2].joinpath("docs/command_line.md").read_text()
    sections = re.findall(
        r"^## (\w+)\n.*?```sh\nflax-layoutmap (.*?)\n```", page, re.S | re.M
    )
    assert dict(sections) == EXAMPLES


@pytest.mark.libtpu
def test_compile(run: Any) -> None:
    """Without libtpu it says how to get it; with it, the example runs."""
    code, out, err = run(EXAMPLES["compile"])
    if importlib.util.find_spec("libtpu") is None:
        assert (code, out) == (2, "") and "flax-layoutmap[tpu-aot]" in err
    else:
        assert code == 0 and "v5e" in out, err


def test_help_shows_the_example(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name, example in EXAMPLES.items():
        code, out, _ = run(f"{name} --help")
        assert code == 0 and f"flax-layoutmap {example}" in re.sub(r" \\\n +", " ", out)
        assert all(len(line) <= 80 for line in out.splitlines())


WRONG = {
    "report --model my_model:make --mesh data=2": "--model needs rules",
    "report --model my_model:make --rules my_model:pairs": "the rules have no mesh",
    "report --model nothing:make --rules rules.toml": "cannot import 'nothing'",
    "report --model my_model:mke --rules rules.toml": "did you mean 'make'",
    "report --model my_model:nope --rules rules.toml": "there is no 'nope' in it\n",
    "report --model my_model --rules rules.toml": "write MODULE:NAME",
    "report --model my_model:broken --rules rules.toml": "RuntimeError: no such config",
    # Only the arguments that the user wrote: no rngs.
    "report --model my_model:Block --arg widht=8 --rules my_model:layout_map": (
        "--model: Block(widht=8) raised TypeError"
    ),
    "report --model my_model:make --rules my_model:number": "is a int; it must be",
    "report --model my_model:make --rules nowhere.toml": "nowhere.toml",
    "report --model my_model:make --rules rules.toml --arg width": "NAME=VALUE",
    "report --model my_model:make --rules rules.toml --arg depth=2": "depth",
    "report --model my_model:make --rules rules.toml --mesh data": "data",
    "report --checkpoint nowhere": "nowhere",
    "report --model my_model:ends_the_program --rules rules.toml": "SystemExit: 0",
    "report --model my_model:make --rules r.yaml": "or a file (.toml, .json)",
    "lint --mesh data=2": "lint needs rules",
    "report --model my_model:make --rules rules.toml --step 3": "is for --checkpoint",
    "lint --model my_model:make --rules rules.toml --max-replicated 2": "0 to 1; got 2",
    "lint --rules extends.toml": "extends.toml:2: extends 'no.toml', but there is no",
    "lint --rules rules.toml --ignore LM131": "there is no code LM131",
    "lint --rules rules.toml --max-replicated 0.1": "needs --model or --checkpoint",
    "plan my_model:make --args my_model:linen_variables --rules rules.toml "
    "--mesh data=2,model=4 --arg width=2": "linen_variables",
    "plan my_model:ends_the_program --args my_model:nothing --rules rules.toml "
    "--mesh data=2,model=4": "SystemExit: 0",
    "plan my_model:broken --args my_model:make --rules rules.toml "
    "--mesh data=2,model=4": "broken() cannot be called with (Block): too many",
    "plan my_model:loss --args my_model:three --rules rules.toml "
    "--mesh data=2,model=4": "loss(params, x, scale=1.0) cannot be called with "
    "(dict, float32[4,8], int32[]): too many positional arguments; pass one argument",
    "plan my_model:loss --args my_model:nothing --rules rules.toml "
    "--mesh data=2,model=4": "cannot be called with (): missing a required argument",
    "plan my_model:wrong --args my_model:three --rules rules.toml "
    "--mesh data=2,model=4": "KeyError: 'nope' (--traceback shows where)",
    "report --checkpoint runs/7 --rules runs/7 --variant a": "--variant is for rules",
    "report --checkpoint runs/7 --arg width=2": "--arg is for --model",
    "report --checkpoint runs/7 --optimizer optax:sgd": "--optimizer is for --model",
    "report --model my_model:make --rules rules.toml --mesh data=2,model=4 "
    "--optimizer-arg learning_rate=1": "--optimizer-arg needs --optimizer",
    "verify nowhere": "nowhere",
    "restore runs/7 --to runs": "runs exists; write to another path",
    "convert my_model:layout_map out.yaml": "out.yaml",
    "convert my_model:plan new --axis tensor=x": "--axis is for rules of another",
    "convert my_model:plan new --from tp-plan --axis x": "write NAME=OWN, such as",
    "convert my_model:plan new --from tp-plan --axis x=y": "the axes tensor and expert",
    "convert my_model:plan new --from keras --variant a": "--variant is for rules in a",
    "convert runs/7 new --from shardings --axis a=b": "--axis is not for shardings",
    "preset lama --mesh fsdp=2": "there is no preset 'lama'; did you mean 'llama'",
    "preset llama --mesh model=2": "has the axis 'model', which presets do not know",
    "detect --checkpoint nowhere": "nowhere",
    "detect --checkpoint runs/7 --arg width=2": "--arg is for --model",
    "detect --model my_model:make --step 3": "--step is for --checkpoint",
    "detect --model my_model:make --item a": "--item is for --checkpoint",
    "restore runs/7 --to new --mesh data=64,model=32": "2048 devices, more than",
    "restore runs/7 --to rules.toml/new --mesh data=4,model=2": "be written to",
}


@pytest.mark.parametrize("command", WRONG)
def test_errors_are_short(command: str, run: Any, folder: Path) -> None:
    code, out, err = run(command)
    assert (code, out) == (2, "")
    assert WRONG[command] in err and "Traceback" not in err
    assert err.startswith(f"flax-layoutmap {command.split()[0]}: ")
    assert not (folder / "new").exists()


def test_an_error_ends_with_its_section(run: Any) -> None:
    _, _, err = run("preset lama --mesh fsdp=2")
    assert err.endswith("\nsee: docs/errors.md#ruleerror\n")


def test_a_closed_output(folder: Path) -> None:
    """In a process of its own, so that nothing is printed when Python ends, either."""
    read, write = os.pipe()
    os.close(read)
    draw = ("-m", "flax_layoutmap", "draw", *SOURCES.split())
    ended = in_a_process(*draw, folder=folder, stdout=write)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_an_output_closed_before_it_is_flushed(run: Any, monkeypatch: Any) -> None:
    """What is left to be written, when the output is closed, is no error."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as output:
        monkeypatch.setattr(sys, "stdout", output)
        code, _, err = run(f"report {SOURCES}")
    assert (code, err) == (141, "")


def test_an_output_that_knows_ascii_alone(run: Any, monkeypatch: Any) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    code, _, err = run(f"explain up/kernel {SOURCES}")
    assert (code, err) == (0, "")
    assert rb"\u2192" in written.getvalue()


def test_a_traceback_where_it_is_asked_for(run: Any) -> None:
    with pytest.raises(Exception, match="no such config"):
        run("report --model my_model:broken --rules rules.toml --traceback")


def test_usage(run: Any) -> None:
    assert run("reprot")[0] == 2
    assert run("report --rules rules.toml")[0] == 2, "neither model nor checkpoint"
    code, out, _ = run("--help")
    assert code == 0
    for name in EXAMPLES:
        assert f"    {name}" in out


def test_help_loads_neither_jax_nor_flax() -> None:
    """And a control: that check sees what is loaded."""
    code = """
import sys
from flax_layoutmap._cli import main

def loaded():
    return any(m in sys.modules for m in ("jax", "flax", "numpy", "rich"))

for arguments in (["--help"], ["report", "--help"]):
    try: main(arguments)
    except SystemExit: pass
    print("loaded:", loaded())
import numpy
print("then:", loaded())
"""
    done = in_a_process("-c", code, folder=Path.cwd())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: flax-layoutmap") == 2
    found = re.findall("^(?:loaded|then): .*$", done.stdout, re.M)
    assert found == ["loaded: False", "loaded: False", "then: True"]
