"""Write tests/golden/hf_*: small `transformers` checkpoints and their outputs.

Needs torch, transformers and safetensors, none of which the tests need:

    python tests/golden/make_hf.py

Each folder has a checkpoint with random weights as `save_pretrained` writes it (one of
Llama in several files with an index), and `run.json`: the tokens, and the logits of
PyTorch's forward pass in float32.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def models() -> dict[str, Any]:
    """Name → a model with random weights."""
    t = transformers
    llama = t.LlamaConfig(**SIZES, tie_word_embeddings=False)
    gemma = t.GemmaConfig(**SIZES, head_dim=8)
    gemma2 = t.Gemma2Config(
        **SIZES,
        head_dim=8,
        query_pre_attn_scalar=16,
        sliding_window=4,
        attn_implementation="eager",
    )
    gpt2 = t.GPT2Config(
        vocab_size=64,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    return {
        "llama": t.LlamaForCausalLM(llama),
        "llama_sharded": t.LlamaForCausalLM(llama),
        "gemma": t.GemmaForCausalLM(gemma),
        "gemma2": t.Gemma2ForCausalLM(gemma2),
        "gpt2": t.GPT2LMHeadModel(gpt2),
    }


def main() -> None:
    torch.manual_seed(0)
    for name, model in models().items():
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                # Also those that begin as zeros or ones, and large enough to matter.
                scale = 0.2 if parameter.ndim > 1 else 0.3
                offset = 1.0 if "ln_" in path and path.endswith("weight") else 0.0
                offset = 1.0 if "norm" in path and "gemma" not in name else offset
                parameter.copy_(offset + scale * torch.randn_like(parameter))
        folder = HERE / f"hf_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        size = "40KB" if name == "llama_sharded" else "1GB"
        model.save_pretrained(folder, max_shard_size=size)
        (folder / "generation_config.json").unlink(missing_ok=True)
        tokens = torch.randint(64, (2, 12))
        with torch.no_grad():
            logits = model.eval().float()(tokens).logits
        run = {
            "versions": {
                "torch": torch.__version__.split("+")[0],
                "transformers": transformers.__version__,
            },
            "tokens": tokens.tolist(),
            "logits": [[[float(f"{x:.8g}") for x in r] for r in b] for b in logits],
        }
        (folder / "run.json").write_text(json.dumps(run) + "\n")
        total = sum(file.stat().st_size for file in folder.iterdir())
        print(folder.name, total, sorted(file.name for file in folder.iterdir()))


if __name__ == "__main__":
    main()
