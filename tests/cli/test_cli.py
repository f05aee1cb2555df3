"""The command line: every command, its example, exit codes and output streams."""

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
import pytest
from helpers import ROOT

import flax_layoutmap as flm
from flax_layoutmap._cli import main

MODEL = """
from sys import exit
import flax_layoutmap as flm
import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Block(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)


def make(width: int = 8, layers: int = 1):
    block = Block(width, rngs=nnx.Rngs(0))
    return block if layers == 1 else nnx.List(
        [Block(width, rngs=nnx.Rngs(0)) for _ in range(layers)]
    )


def state():
    model = make()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer}


def broken():
    raise RuntimeError("no such config")


pairs = [("up/kernel", (None, "model")), ("down/kernel", ("model", None))]
layout_map = flm.LayoutMap.from_rules(pairs, "data=2,model=4", strict=False)
number = 3


def make_rules():
    return layout_map


def step(model, x):
    return model.down(model.up(x)).sum()


def arguments(batch: int = 64):
    return make(), jnp.ones((batch, 8))
"""
PAGE = ROOT.joinpath("docs/command_line.md").read_text("utf-8")
# Command → its example on the page.
EXAMPLES = dict(
    re.findall(r"^## (\w+)\n.*?```sh\nflax-layoutmap (.*?)\n```", PAGE, re.S | re.M)
)
SOURCES = "--model my_model:make --rules rules.toml --mesh data=2,model=4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: `my_model.py`, `rules.toml`, and the checkpoint `runs/7`."""
    home = tmp_path_factory.mktemp("home")
    (home / "my_model.py").write_text(MODEL)
    layout_map = flm.LayoutMap("data=2,model=4", strict=False)
    layout_map["up/kernel"] = (None, "model")
    layout_map["down/kernel"] = ("model", None)
    layout_map.to_file(home / "rules.toml")
    flm.LayoutMap().to_file(home / "rules.json")
    shapes = {"up": (8, 32), "down": (32, 8)}
    tree = {"model": {name: {"kernel": np.ones(shapes[name])} for name in shapes}}
    arrays = jax.device_put(tree, layout_map.resolve(tree).shardings)
    flm.checkpoint.save(home / "runs" / "7", arrays, layout_map=layout_map)
    return home


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Runs a command in the folder: exit code, stdout, stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("COLUMNS", "200")

    def run(command: str) -> tuple[int, str, str]:
        try:
            code = main(shlex.split(command))
        except SystemExit as ended:  # argparse
            code = int(ended.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    yield run
    sys.modules.pop("my_model", None)


def leaves_in(out: str) -> dict[str, Any]:
    """Path → leaf, of a report as JSON."""
    return {leaf["path"]: leaf for leaf in json.loads(out)["leaves"]}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_command_runs(name: str, run: Any) -> None:
    code, out, err = run(EXAMPLES[name])
    assert (code, err) == (1 if name == "diff" else 0, "") and out
    code, out, _ = run(f"{name} --help")
    assert code == 0 and f"flax-layoutmap {EXAMPLES[name]}\n" in out
    assert f"    {name} " in run("--help")[1]
    if "--json" in out and name != "suggest":  # which takes long
        code, out, err = run(f"{EXAMPLES[name]} --json")
        assert err == "" and json.loads(out)["schema"] > 0


def test_report(run: Any) -> None:
    code, out, _ = run(f"report {SOURCES} --arg width=16 --arg layers=3 --json")
    assert code == 0 and leaves_in(out)["2/up/kernel"]["shape"] == [16, 64]
    out = run(f"report {SOURCES} --arg layers=3")[1]
    assert "{0..2}/up/kernel" in out and "\x1b" not in out
    code, out, _ = run(
        "report --model my_model:Block --arg width=8 --rules my_model:layout_map"
    )
    assert code == 0 and "down/kernel" in out, "a class that needs rngs"
    code, out, _ = run("report --checkpoint runs --mesh data=4,model=8 --json")
    assert code == 0 and leaves_in(out)["model/up/kernel"]["shard_shape"] == [8, 4]


@pytest.mark.parametrize("rules", ["layout_map", "make_rules"])
def test_rules_of_a_module(rules: str, run: Any) -> None:
    mesh = "data=2,model=8"
    code, out, _ = run(
        f"report --model my_model:make --rules my_model:{rules} --mesh {mesh} --json"
    )
    assert code == 0 and leaves_in(out)["up/kernel"]["shard_shape"] == [8, 4]


def test_the_state_of_an_optimizer(run: Any) -> None:
    code, out, _ = run(f"report {SOURCES.replace('make', 'state')} --json")
    leaves = leaves_in(out)
    assert code == 0 and leaves["optimizer/step"]["role"] == "optimizer"
    assert leaves["optimizer/opt_state/0/mu/up/kernel"]["shard_shape"] == [8, 8]


def test_lint(run: Any) -> None:
    bad = f"lint {SOURCES.replace('model=4', 'model=3')}"
    code, out, err = run(f"{bad} --max-replicated 0.0001")
    assert (code, err) == (1, "") and "LM115" not in out
    assert "LM114 error: up/kernel (8,32): rule 1 'up/kernel' → (None, 'model')" in out
    issues = json.loads(run(f"{bad} --json")[1])["issues"]
    assert [issue["code"] for issue in issues][:2] == ["LM114", "LM114"]
    assert run(f"{bad} --ignore up/ --ignore down/")[0] == 0
    assert run(f"lint {SOURCES} --max-replicated 0.0001")[0] == 1


def test_lint_fails_with_the_rules_of_another_model(run: Any, folder: Path) -> None:
    """A rule matches nothing, and more than half of the bytes are replicated."""
    rules = 'schema = 1\n[rules]\n"{}" = ["-", "model"]\n"zzz" = ["model"]\n'
    model = "--model my_model:make --mesh data=2,model=4"
    (folder / "most.toml").write_text(rules.format("kernel"))
    (folder / "some.toml").write_text(rules.format("bias").replace('"-", ', ""))
    assert run(f"lint {model} --rules most.toml")[0] == 0, "little is replicated"
    code, out, _ = run(f"lint {model} --rules some.toml")
    assert code == 1 and "rule 2 'zzz'" in out
    assert run(f"lint {model} --rules some.toml --ignore LM101")[0] == 0


def test_explain(run: Any) -> None:
    code, out, _ = run(f"explain up/kernel {SOURCES}")
    assert code == 0 and out.startswith("up/kernel (8,32)")
    assert "rule 1 'up/kernel'" in out
    layers = f"{SOURCES} --arg layers=3"
    code, out, _ = run(f"explain up/kernel {layers}")
    assert code == 0 and out.startswith("{0..2}/up/kernel ×3 (8,32)")
    assert out.count("because: ") == 1, "the end of paths, which are alike"
    out = run(f"explain 'up|down/bias' {layers}")[1]
    heads = [line.split(" (")[0] for line in out.splitlines() if line[0] != " "]
    assert heads == [f"{{0..2}}/{p} ×3" for p in ("down/bias", "up/bias", "up/kernel")]
    code, out, err = run(f"explain up/kernle {SOURCES}")
    assert (code, out) == (2, "") and "up/kernel" in err
    assert "is not a path, the end of a path or a pattern that matches: " in err
    assert "is not a path or a pattern: " in run(f"explain '(' {SOURCES}")[2]


def test_diff(run: Any) -> None:
    assert run(f"diff {SOURCES}")[0] == 0
    code, out, _ = run(f"diff {SOURCES} --model-after my_model:state --json")
    paths = [change["path"] for change in json.loads(out)["changes"]]
    assert code == 1 and "model/up/kernel" in paths
    code, out, _ = run(f"diff {SOURCES} --arg width=8 --checkpoint-after runs/7")
    assert code == 1 and "model/up/kernel" in out
    code, out, _ = run(f"diff {SOURCES} --rules-after rules.json")
    assert code == 1 and "up/kernel" in out


def test_plan(run: Any) -> None:
    command = "plan my_model:step --args my_model:arguments --rules rules.toml"
    out = run(f"{command} --mesh data=2,model=4 --arg batch=128 --json")[1]
    assert "all-reduce" in {entry["kind"] for entry in json.loads(out)["collectives"]}


def test_suggest(run: Any, folder: Path) -> None:
    command = "suggest my_model:step --args my_model:arguments"
    code, out, err = run(f"{command} --mesh data=4,model=2 -o found.toml")
    assert (code, err) == (0, "wrote found.toml\n") and out
    assert flm.LayoutMap.from_file(folder / "found.toml").device_mesh is not None
    code, out, _ = run(f"{command} --mesh data=4,model=2 --hbm 1e-7 --json")
    assert code == 1 and json.loads(out)["schema"] > 0
    code, out, err = run(f"{command} --mesh data=8 -o rules.yaml")  # before the search
    assert code == 2 and not out and "a rule file ends in .toml or .json" in err


def test_inspect_and_verify(run: Any, folder: Path) -> None:
    out = run("inspect runs/7")[1]
    assert "model/up/kernel" in out and "data=2,model=4" in out
    shutil.copytree(folder / "runs" / "7", folder / "damaged")
    file = folder / "damaged" / "_CHECKPOINT_METADATA"
    data = json.loads(file.read_text())
    record = data["custom_metadata"]["flax_layoutmap"]
    del record["digest"]  # which older versions did not write
    record["checksums"]["model/up/kernel"] = "0" * 16
    file.write_text(json.dumps(data))
    code, out, err = run("verify damaged")
    assert (code, out) == (1, "") and "model/up/kernel" in err
    golden = ROOT / "tests" / "golden" / "hf_llama"
    assert run(f"verify {golden}")[0] == 2, "it has no checksums"


def test_preset(run: Any, folder: Path) -> None:
    code, out, _ = run("preset llama --mesh fsdp=2,model=4 --axis tensor=model")
    (folder / "preset.toml").write_text(out)
    mesh = flm.DeviceMesh.abstract("fsdp=2,model=4")
    wanted = flm.presets.llama(mesh, axes={"tensor": "model"})
    assert code == 0 and flm.LayoutMap.from_file(folder / "preset.toml") == wanted


def test_the_preset_of_a_model_ends_with_the_next_command(run: Any) -> None:
    golden = ROOT / "tests" / "golden" / "hf_llama"
    code, out, _ = run(f"preset --checkpoint {golden}")
    assert code == 0 and out.startswith("llama: ")
    program, *words, last = shlex.split(out.splitlines()[-1])
    assert (program, words.pop(), last) == ("flax-layoutmap", ">", "rules.toml")
    code, out, _ = run(shlex.join(words))
    assert code == 0 and 'mesh = "fsdp=8"' in out
    code, out, err = run("preset --model my_model:make --arg width=256")
    assert (code, out) == (2, "") and "No preset matches this model." in err


MAKE = "report --model my_model:make --rules"
WRONG = {
    "report --rules rules.toml": "give one of --model MODULE:FACTORY and --checkpoint",
    f"{MAKE} rules.json": "the rules have no mesh",
    f"{MAKE} my_model:pairs": "flm.LayoutMap.from_rules makes one from pairs",
    f"{MAKE} rules.yaml": "or a file (.toml, .json)",
    "report --model my_model:mke --rules rules.toml": "did you mean 'make'",
    "report --model my_model.py:make --rules rules.toml": "such as my_model:make",
    "report --model ./models/big.py --rules rules.toml": "such as models.big:NAME",
    "report --model my_model:broken --rules rules.toml": "RuntimeError: no such config",
    "report --model my_model:exit --rules rules.toml": "SystemExit: ",
    "report --model my_model:number --rules rules.toml": "is of type int; it must be a",
    "report --model my_pod:mesh --rules rules.toml": "report: the mesh data=64 needs",
    f"{MAKE} rules.toml --arg width": "NAME=VALUE",
    "report --checkpoint runs/7 --arg width=8": "--arg is for --model",
    "report --checkpoint runs/7 --layout_map a.toml": "--layout_map is written --rules",
    'lint --mesh \'{"data": 2, "model": 4}\'': "write it as data=2,model=4",
    f"{MAKE} unquoted.toml": "write patterns in single quotes",
    f"{MAKE} escaped.toml": "write patterns in single quotes",
    f"{MAKE} none.toml": '"-" for a dim that is not sharded',
    "preset lama --mesh fsdp=2": "there is no preset 'lama'; did you mean 'llama'",
    "preset llama --mesh fsdp=2 --checkpoint runs/7": "give a family, or --model",
    "preset llama": "a preset needs a mesh: --mesh",
}


@pytest.mark.parametrize("command", WRONG)
def test_errors_are_short_and_say_the_fix(command: str, run: Any, folder: Path) -> None:
    rules = 'schema = 1\n[rules]\n{} = ["-", "model"]\n'
    (folder / "unquoted.toml").write_text(rules.format("layers/.*/up"))
    (folder / "escaped.toml").write_text(rules.format(r'"layers/\d+/up"'))
    (folder / "my_pod.py").write_text(
        'import flax_layoutmap as flm\nmesh = flm.DeviceMesh("data=64")\n'
    )
    (folder / "none.toml").write_text(rules.replace('"-"', "None").format("'up'"))
    code, out, err = run(command)
    assert (code, out) == (2, "")
    assert ("my_pod" in command) == ("fix: JAX_NUM_CPU_DEVICES=64 flax" in err)
    assert WRONG[command] in err and "Traceback" not in err
    assert err.startswith("flax-layoutmap") and len(err.splitlines()) < 5


def test_a_traceback_where_it_is_asked_for(run: Any) -> None:
    with pytest.raises(Exception, match="no such config"):
        run("report --model my_model:broken --rules rules.toml --traceback")


def test_an_output_closed_before_it_is_flushed(run: Any, monkeypatch: Any) -> None:
    """As by `| head`; nothing is printed about it."""
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


def test_help_loads_neither_jax_nor_flax() -> None:
    """And a control: that check sees what is loaded."""
    code = """
import sys
from flax_layoutmap._cli import main

for arguments in (["--help"], ["report", "--help"]):
    try: main(arguments)
    except SystemExit: pass
print({"jax", "flax", "numpy", "rich"} & sys.modules.keys())
import numpy
print({"numpy"} & sys.modules.keys())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.count("usage: flax-layoutmap") == 2, done.stderr
    assert done.stdout.splitlines()[-2:] == ["set()", "{'numpy'}"]
