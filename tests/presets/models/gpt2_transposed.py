"""GPT-2 in the Flax models of transformers 4, and EasyDeL: kernels are (out, in)."""

from presets.models.gpt2 import modules, of

TRANSPOSED = modules("transformer/", transposed=True)

SPELLINGS = {
    "linen": of(TRANSPOSED),
    "easydel": of(TRANSPOSED | {"lm_head/kernel": "d V"}),
}
