"""Makes the pictures of the documentation, in docs/pictures or in another folder.

The model is a Llama of 8 billion parameters with the state of Adam, as shapes alone, on
a mesh of 256 devices that nobody needs to have.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import flax_layoutmap as flm

FOLDER = Path(__file__).parent / "pictures"


def llama() -> dict[str, Any]:
    """The shapes of the model."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    kernels = {
        "self_attn/q_proj": array(4096, 4096),
        "self_attn/k_proj": array(4096, 1024),
        "self_attn/v_proj": array(4096, 1024),
        "self_attn/o_proj": array(4096, 4096),
        "mlp/gate_proj": array(4096, 14336),
        "mlp/up_proj": array(4096, 14336),
        "mlp/down_proj": array(14336, 4096),
    }
    layer: dict[str, Any] = {"self_attn": {}, "mlp": {}}
    for path, kernel in kernels.items():
        module, name = path.split("/")
        layer[module][name] = {"kernel": kernel}
    for name in ("input_layernorm", "post_attention_layernorm"):
        layer[name] = {"scale": array(4096)}
    return {
        "embed_tokens": {"embedding": array(128256, 4096)},
        "layers": {str(at): layer for at in range(32)},
        "norm": {"scale": array(4096)},
        "lm_head": {"kernel": array(4096, 128256)},
    }


def training() -> flm.Resolution:
    """The layouts of the model and of its optimizer's state."""
    rules = flm.LayoutMap(flm.DeviceMesh.abstract("data=16,model=16"))
    rules["embed_tokens/embedding"] = ("model", "data")
    rules["(q|k|v|gate|up)_proj/kernel"] = ("data", "model")
    rules["(o|down)_proj/kernel"] = ("model", "data")
    rules["lm_head/kernel"] = ("data", "model")
    rules["(norm|layernorm)/scale"] = None
    params = llama()
    state = jax.eval_shape(optax.adam(1e-4).init, params)
    return rules.resolve({"params": params, "opt_state": state})


def main(folder: Path = FOLDER) -> None:
    """Makes all pictures."""
    mesh = flm.DeviceMesh.abstract("data=2,model=4")
    array = flm.draw.array(flm.TensorLayout(("model", None), mesh), (256, 64))
    array.save(folder / "array.svg")
    pod = flm.DeviceMesh.abstract("pod=2,data=4,model=4")
    layout = flm.TensorLayout(("data", "model"), pod)
    on_a_pod = flm.draw.array(layout, (4096, 14336))
    on_a_pod.save(folder / "array_on_three_axes.svg")
    flm.draw.model(training()).save(folder / "model.svg")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
