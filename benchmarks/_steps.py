"""Abstract training steps for comparing plans with the TPU compiler.

`STEPS` maps a name to a function that makes a `Step`. Each is small enough to be
compiled in seconds and large enough that its weights and activations are sharded for a
reason; all are for a slice `v5e:4x4`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

import flax_layoutmap as flm

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
FSDP = {"fsdp": 16}
BOTH = {"fsdp": 4, "tensor": 4}


@dataclasses.dataclass(frozen=True)
class Step:
    """A step on a mesh.

    Attributes:
        step: the function.
        args: its arguments, abstract.
        rules: pattern and layout of each rule, in order.
        mesh: sizes of the mesh axes, by name.
        donated: arguments that are given away.
        names: layouts that the step asks for by name.
    """

    step: Any
    args: tuple[Any, ...]
    rules: dict[str, Any]
    mesh: dict[str, int]
    donated: tuple[str, ...] = ("params", "state")
    names: dict[str, Any] = dataclasses.field(default_factory=dict)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `flm.pod.plan` and `flm.pod.compile` take."""
        layout_map = flm.LayoutMap.from_rules(
            self.rules.items(), batch="fsdp", strict=False
        )
        for name, layout in self.names.items():
            layout_map.names[name] = layout
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        given = {"mesh": mesh, "layout_map": layout_map, "topology": "v5e:4x4"}
        return (self.step, *self.args), given | {"donate_argnames": self.donated}


def shaped(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def trained(
    loss: Callable[..., jax.Array],
    params: Any,
    *data: Any,
    tx: optax.GradientTransformation | None = None,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step that updates the parameters for a loss, and its arguments."""
    tx = optax.adamw(1e-3) if tx is None else tx

    def step(params: Any, state: Any, *data: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *data)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, jax.eval_shape(tx.init, params), *data)


def pinned(x: jax.Array, name: str) -> jax.Array:
    return flm.distribute_tensor(x, name)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(F32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype(F32)
    x32 = x32 * jax.lax.rsqrt((x32**2).mean(-1, keepdims=True) + 1e-6)
    return (x32 * scale).astype(x.dtype)


# ------------------------------------------------------------------------- decoders

DIM, HEADS, KV_HEADS, SIZE, HIDDEN, VOCAB = 1024, 16, 8, 64, 4096, 8192
LAYERS, BATCH, LENGTH = 4, 32, 512
DECODER_RULES = {
    "embed": ("tensor", "fsdp"),
    "head": ("fsdp", "tensor"),
    "(query|key|value)$": (..., "fsdp", "tensor", None),
    "out$": (..., "tensor", None, "fsdp"),
    "(gate|up)$": (..., "fsdp", "tensor"),
    "down$": (..., "tensor", "fsdp"),
    "norm": None,
}
RESIDUAL = {"residual": ("fsdp", None, None)}


def layer_of(kv_heads: int = KV_HEADS, layers: int | None = None) -> dict[str, Any]:
    def weight(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
        return shaped(*(() if layers is None else (layers,)), *shape, dtype=dtype)

    return {
        "query": weight(DIM, HEADS, SIZE),
        "key": weight(DIM, kv_heads, SIZE),
        "value": weight(DIM, kv_heads, SIZE),
        "out": weight(HEADS, SIZE, DIM),
        "gate": weight(DIM, HIDDEN),
        "up": weight(DIM, HIDDEN),
        "down": weight(HIDDEN, DIM),
        "norm1": weight(DIM, dtype=F32),
        "norm2": weight(DIM, dtype=F32),
    }


def attended(w: Any, x: jax.Array, y: jax.Array, causal: bool = True) -> jax.Array:
    query = jnp.einsum("btd,dhk->bthk", x, w["query"])
    key = jnp.einsum("btd,dhk->bthk", y, w["key"])
    value = jnp.einsum("btd,dhk->bthk", y, w["value"])
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=causal)
    return jnp.einsum("bthk,hkd->btd", mixed, w["out"])


def gated(w: Any, x: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def decoder_layer(w: Any, x: jax.Array, inner: Any = gated) -> jax.Array:
    y = normed(x, w["norm1"])
    x = pinned(x + attended(w, y, y), "residual")
    return pinned(x + inner(w, normed(x, w["norm2"])), "residual")


def decoded(params: Any, tokens: jax.Array, layer: Any = decoder_layer) -> jax.Array:
    x = pinned(params["embed"][tokens], "residual")
    layers = params["layers"]
    if isinstance(layers, dict):
        through = jax.checkpoint(lambda x, w: (layer(w, x), None))
        x, _ = jax.lax.scan(through, x, layers)
    else:
        for w in layers:
            x = layer(w, x)
    head = params["head"] if "head" in params else params["embed"].T
    return normed(x, params["norm"]) @ head


def decoder_params(layers: Any, tied: bool = False) -> dict[str, Any]:
    params = {"embed": shaped(VOCAB, DIM), "norm": shaped(DIM, dtype=F32)}
    return params | {"layers": layers} | ({} if tied else {"head": shaped(DIM, VOCAB)})


TOKENS = shaped(BATCH, LENGTH + 1, dtype=I32)


def language_loss(params: Any, tokens: jax.Array, **options: Any) -> jax.Array:
    return cross_entropy(decoded(params, tokens[:, :-1], **options), tokens[:, 1:])


def decoder(
    layers: Any, tied: bool = False, tx: Any = None, loss: Any = language_loss
) -> Step:
    step, args = trained(loss, decoder_params(layers, tied), TOKENS, tx=tx)
    return Step(step, args, DECODER_RULES, BOTH, names=RESIDUAL)


def scanned() -> Step:
    return decoder(layer_of(layers=LAYERS))


def unrolled() -> Step:
    return decoder([layer_of() for _ in range(LAYERS)])


def grouped_queries() -> Step:
    return decoder(layer_of(kv_heads=4, layers=LAYERS))


def tied_embeddings() -> Step:
    return decoder(layer_of(layers=LAYERS), tied=True)


def adafactor() -> Step:
    return decoder(layer_of(layers=LAYERS), tx=optax.adafactor(1e-3))


def muon() -> Step:
    return decoder([layer_of()], tx=optax.contrib.muon(1e-3))


def accumulation() -> Step:
    tx = optax.MultiSteps(optax.adamw(1e-3), 4)
    params = decoder_params(layer_of(layers=LAYERS))

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        def one(carried: Any, part: jax.Array) -> Any:
            params, state = carried
            gradients = jax.grad(language_loss)(params, part)
            updates, state = tx.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(one, (params, state), tokens)[0]

    args = (params, jax.eval_shape(tx.init, params), shaped(4, 16, 513, dtype=I32))
    rules = DECODER_RULES
    return Step(_batch_second(step), args, rules, BOTH, names=RESIDUAL)


def _batch_second(step: Any) -> Any:
    """The step for microbatches whose second dim is the batch."""

    def wrapped(params: Any, state: Any, tokens: jax.Array) -> Any:
        return step(params, state, flm.distribute_tensor(tokens, (None, "fsdp", None)))

    return wrapped


def lora() -> Step:
    rank = 16
    base = decoder_params(layer_of(layers=LAYERS))
    adapters = {
        "up_a": shaped(LAYERS, DIM, rank),
        "up_b": shaped(LAYERS, rank, HIDDEN),
        "down_a": shaped(LAYERS, HIDDEN, rank),
        "down_b": shaped(LAYERS, rank, DIM),
    }
    rules = {
        "up_a": (None, "fsdp", None),
        "up_b": (None, None, "tensor"),
        "down_a": (None, "tensor", None),
        "down_b": (None, None, "fsdp"),
        **DECODER_RULES,
    }

    def inner(w: Any, x: jax.Array) -> jax.Array:
        made = jax.nn.silu(x @ w["gate"])
        made = made * (x @ w["up"] + x @ w["up_a"] @ w["up_b"])
        return made @ w["down"] + made @ w["down_a"] @ w["down_b"]

    def loss(params: Any, base: Any, tokens: jax.Array) -> jax.Array:
        whole = base | {"layers": base["layers"] | params}

        def layer(w: Any, x: jax.Array) -> jax.Array:
            return decoder_layer(w, x, inner)

        return language_loss(whole, tokens, layer=layer)

    step, args = trained(loss, adapters, base, TOKENS)
    return Step(step, args, rules, BOTH, names=RESIDUAL)


def preferences() -> Step:
    """Direct preference optimisation: two sequences by two models."""

    def score(params: Any, tokens: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(decoded(params, tokens[:, :-1]).astype(F32))
        return jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0].sum(-1)

    def loss(params: Any, reference: Any, good: jax.Array, bad: jax.Array) -> jax.Array:
        ahead = score(params, good) - score(params, bad)
        before = score(reference, good) - score(reference, bad)
        return -jax.nn.log_sigmoid(0.1 * (ahead - before)).mean()

    reference = decoder_params(layer_of(layers=LAYERS))
    step, args = trained(loss, reference, reference, TOKENS, TOKENS)
    return Step(step, args, DECODER_RULES, BOTH, names=RESIDUAL)


def _decoding(cache_layout: Any, write: Callable[..., jax.Array]) -> Step:
    cache = {
        name: shaped(LAYERS, BATCH, 2048, KV_HEADS, SIZE) for name in ("keys", "values")
    }

    def step(params: Any, cache: Any, token: jax.Array, at: jax.Array) -> Any:
        x = params["embed"][token][:, None]

        def layer(x: jax.Array, given: Any) -> Any:
            w, keys, values = given
            y = normed(x, w["norm1"])
            query = jnp.einsum("btd,dhk->bthk", y, w["query"])
            keys = write(keys, jnp.einsum("btd,dhk->bthk", y, w["key"]), at)
            values = write(values, jnp.einsum("btd,dhk->bthk", y, w["value"]), at)
            mask = (jnp.arange(keys.shape[1]) <= at)[None, None, None]
            mixed = jax.nn.dot_product_attention(query, keys, values, mask=mask)
            x = x + jnp.einsum("bthk,hkd->btd", mixed, w["out"])
            return x + gated(w, normed(x, w["norm2"])), (keys, values)

        given = (params["layers"], cache["keys"], cache["values"])
        x, (keys, values) = jax.lax.scan(layer, x, given)
        logits = normed(x, params["norm"]) @ params["head"]
        return {"keys": keys, "values": values}, logits[:, 0].argmax(-1)

    rules = {
        **{key: _only(layout, "tensor") for key, layout in DECODER_RULES.items()},
        "(keys|values)$": cache_layout,
    }
    params = decoder_params(layer_of(layers=LAYERS))
    args = (params, cache, shaped(BATCH, dtype=I32), shaped(dtype=I32))
    return Step(step, args, rules, BOTH, ("cache",))


def _only(layout: Any, axis: str) -> Any:
    if layout is None:
        return None
    return tuple(one if one in (axis, ...) else None for one in layout)


def decoding_by_heads() -> Step:
    def write(cache: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(cache, new, at, 1)

    return _decoding((None, "fsdp", None, "tensor", None), write)


def decoding_by_positions() -> Step:
    def write(cache: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
        here = (jnp.arange(cache.shape[1]) == at)[None, :, None, None]
        return jnp.where(here, new, cache)

    return _decoding((None, "fsdp", "tensor", None, None), write)


# -------------------------------------------------------------------------- experts

EXPERTS, WIDTH = 8, 2048
EXPERT_MESH = {"fsdp": 2, "expert": 4, "tensor": 2}
EXPERT_RULES = {
    "router": None,
    "experts/(gate|up)$": (None, "expert", "fsdp", "tensor"),
    "experts/down$": (None, "expert", "tensor", "fsdp"),
    **DECODER_RULES,
}
EXPERT_NAMES = {
    "residual": (("fsdp", "expert"), None, None),
    "sent": ("expert", "fsdp", None, None),
}


def _experts(mixed: Callable[..., jax.Array]) -> Step:
    layers = layer_of(layers=LAYERS)
    for name in ("gate", "up", "down"):
        del layers[name]
    layers["router"] = shaped(LAYERS, DIM, EXPERTS, dtype=F32)
    layers["experts"] = {
        "gate": shaped(LAYERS, EXPERTS, DIM, WIDTH),
        "up": shaped(LAYERS, EXPERTS, DIM, WIDTH),
        "down": shaped(LAYERS, EXPERTS, WIDTH, DIM),
    }

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        def layer(w: Any, x: jax.Array) -> jax.Array:
            return decoder_layer(w, x, mixed)

        return language_loss(params, tokens, layer=layer)

    step, args = trained(loss, decoder_params(layers), TOKENS)
    return Step(step, args, EXPERT_RULES, EXPERT_MESH, names=EXPERT_NAMES)


def _each(w: Any, x: jax.Array) -> jax.Array:
    """Every expert on its tokens: `[expert, batch, places, dim]`."""
    w = w["experts"]
    gate = jnp.einsum("ebcd,edf->ebcf", x, w["gate"])
    made = jax.nn.silu(gate) * jnp.einsum("ebcd,edf->ebcf", x, w["up"])
    return jnp.einsum("ebcf,efd->ebcd", made, w["down"])


def experts_dense() -> Step:
    """Every expert sees every token."""

    def mixed(w: Any, x: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(x.astype(F32) @ w["router"]).astype(x.dtype)
        w = w["experts"]
        gate = jnp.einsum("btd,edf->betf", x, w["gate"])
        made = jax.nn.silu(gate) * jnp.einsum("btd,edf->betf", x, w["up"])
        return jnp.einsum("betf,efd,bte->btd", made, w["down"], weights)

    return _experts(mixed)


def experts_one_hot() -> Step:
    """Each token to two experts, through one-hot tensors."""

    def mixed(w: Any, x: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(x.astype(F32) @ w["router"])
        best, chosen = jax.lax.top_k(weights, 2)
        picked = jax.nn.one_hot(chosen, EXPERTS)
        order = jnp.cumsum(picked.sum(2), 1)[:, :, None] * picked - 1
        room = x.shape[1] * 2 // EXPERTS
        places = jax.nn.one_hot(order.astype(I32), room) * picked[..., None]
        back = jnp.einsum("btk,btkec->btec", best, places).astype(x.dtype)
        to = places.sum(2).astype(x.dtype)
        sent = pinned(jnp.einsum("btec,btd->ebcd", to, x), "sent")
        return jnp.einsum("btec,ebcd->btd", back, pinned(_each(w, sent), "sent"))

    return _experts(mixed)


def experts_sorted() -> Step:
    """Each token to one expert, by a sort of each sequence."""

    def mixed(w: Any, x: jax.Array) -> jax.Array:
        chosen = (x.astype(F32) @ w["router"]).argmax(-1)
        order = jnp.argsort(chosen, -1)
        rows = jnp.take_along_axis(x, order[..., None], 1)
        sent = rows.reshape(x.shape[0], EXPERTS, -1, DIM).swapaxes(0, 1)
        made = _each(w, pinned(sent, "sent")).swapaxes(0, 1).reshape(x.shape)
        back = jnp.argsort(order, -1)
        return jnp.take_along_axis(made, back[..., None], 1)

    return _experts(mixed)


# --------------------------------------------------------- encoders, images, series

# Of Flax's own layers.
LAYER_RULES = {
    "embedding": ("tensor", "fsdp"),
    "(query|key|value)/kernel": ("fsdp", "tensor", None),
    "(query|key|value)/bias": ("tensor", None),
    "out/kernel": ("tensor", None, "fsdp"),
    "up/kernel": ("fsdp", "tensor"),
    "up/bias": ("tensor",),
    "down/kernel": ("tensor", "fsdp"),
}


def encoder_decoder() -> Step:
    """Linen's own layers."""

    class Layer(linen.Module):
        cross: bool

        @linen.compact
        def __call__(self, x: jax.Array, y: jax.Array | None = None) -> jax.Array:
            options: Any = {"dtype": BF16, "param_dtype": BF16}
            attention = linen.MultiHeadDotProductAttention
            norm = linen.RMSNorm
            z = norm(**options)(x)
            mask = None
            if self.cross:
                mask = linen.make_causal_mask(jnp.ones(x.shape[:2]))
            x = x + attention(HEADS, **options, name="own")(z, mask=mask)
            if y is not None:
                z = norm(**options)(x)
                x = x + attention(HEADS, **options, name="cross")(z, y)
            z = linen.Dense(HIDDEN, **options, name="up")(norm(**options)(x))
            return x + linen.Dense(DIM, **options, name="down")(linen.gelu(z))

    class Translator(linen.Module):
        @linen.compact
        def __call__(self, given: jax.Array, made: jax.Array) -> jax.Array:
            embed = linen.Embed(VOCAB, DIM, dtype=BF16, param_dtype=BF16)
            x, y = embed(made), embed(given)
            for _ in range(2):
                y = Layer(cross=False)(y)
            for _ in range(2):
                x = Layer(cross=True)(x, y)
            return embed.attend(x)

    model = Translator()
    given, made = shaped(32, 256, dtype=I32), shaped(32, 257, dtype=I32)
    params = jax.eval_shape(model.init, jax.random.key(0), given, given)["params"]

    def loss(params: Any, given: jax.Array, made: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, given, made[:, :-1])
        return cross_entropy(jnp.asarray(logits), made[:, 1:])

    step, args = trained(loss, params, given, made)
    return Step(step, args, LAYER_RULES, BOTH)


def vision_transformer() -> Step:
    """Fully sharded, unrolled: one axis."""
    params = {
        "patches": shaped(16, 16, 3, DIM),
        "places": shaped(196, DIM),
        "head": shaped(DIM, 1000),
        "layers": [layer_of(kv_heads=HEADS) for _ in range(2)],
    }

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = jax.lax.conv_general_dilated(
            images,
            params["patches"],
            (16, 16),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = x.reshape(x.shape[0], -1, DIM) + params["places"]
        for w in params["layers"]:
            y = normed(x, w["norm1"])
            x = x + attended(w, y, y, causal=False)
            x = x + gated(w, normed(x, w["norm2"]))
        return cross_entropy(x.mean(1) @ params["head"], labels)

    rules = {
        "patches": (None, None, None, "fsdp"),
        "places": (None, "fsdp"),
        "head|query|key|value|gate|up": ("fsdp", ...),
        "out": (None, None, "fsdp"),
        "down": (None, "fsdp"),
        "norm": None,
    }
    images, labels = shaped(64, 224, 224, 3), shaped(64, dtype=I32)
    step, args = trained(loss, params, images, labels)
    return Step(step, args, rules, FSDP)


def _convolved(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


CONV_RULES = {"conv": (None, None, "fsdp", "tensor"), "head": ("fsdp", "tensor")}


def resnet() -> Step:
    widths = [64, 128, 256, 512]
    params: dict[str, Any] = {"stem": shaped(7, 7, 3, 64), "head": shaped(512, 1024)}
    for at, width in enumerate(widths):
        before = widths[max(at - 1, 0)]
        params[f"stage{at}"] = {
            "conv1": shaped(3, 3, before, width),
            "conv2": shaped(3, 3, width, width),
            "conv3": shaped(1, 1, before, width),
            "scale": shaped(width, dtype=F32),
        }

    def whitened(x: jax.Array, scale: jax.Array) -> jax.Array:
        x32 = x.astype(F32)
        mean = x32.mean((0, 1, 2))
        spread = ((x32 - mean) ** 2).mean((0, 1, 2))
        made = (x32 - mean) * jax.lax.rsqrt(spread + 1e-5) * scale
        return made.astype(x.dtype)

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = _convolved(images, params["stem"], 2)
        for at in range(len(widths)):
            w, stride = params[f"stage{at}"], 1 if at == 0 else 2
            y = jax.nn.relu(whitened(_convolved(x, w["conv1"], stride), w["scale"]))
            x = jax.nn.relu(
                _convolved(y, w["conv2"]) + _convolved(x, w["conv3"], stride)
            )
        return cross_entropy(x.mean((1, 2)) @ params["head"], labels)

    images, labels = shaped(64, 112, 112, 3), shaped(64, dtype=I32)
    step, args = trained(loss, params, images, labels)
    return Step(step, args, CONV_RULES, BOTH)


def u_net() -> Step:
    params: dict[str, Any] = {
        "conv_in": shaped(3, 3, 4, 128),
        "conv_down": shaped(3, 3, 128, 256),
        "conv_mid": shaped(3, 3, 256, 256),
        "conv_up": shaped(3, 3, 256, 128),
        "conv_join": shaped(3, 3, 256, 128),
        "conv_out": shaped(3, 3, 128, 4),
        "time": shaped(256, 256),
    }
    rules = {
        "conv_in": (None, None, None, "tensor"),
        "conv_out": (None, None, "tensor", None),
        "conv_": (None, None, "fsdp", "tensor"),
        "time": ("fsdp", "tensor"),
    }

    def loss(params: Any, noisy: jax.Array, noise: jax.Array, time: jax.Array) -> Any:
        angles = time[:, None] * jnp.exp(-jnp.arange(128) / 16)
        known = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(BF16)
        first = jax.nn.silu(_convolved(noisy, params["conv_in"]))
        x = jax.nn.silu(_convolved(first, params["conv_down"], 2))
        x = x + (known @ params["time"])[:, None, None]
        x = x + jax.nn.silu(_convolved(x, params["conv_mid"]))
        x = jax.image.resize(x, (*first.shape[:3], 256), "nearest")
        x = jnp.concatenate([_convolved(x, params["conv_up"]), first], -1)
        x = jax.nn.silu(_convolved(x, params["conv_join"]))
        return ((_convolved(x, params["conv_out"]) - noise).astype(F32) ** 2).mean()

    images, times = shaped(64, 64, 64, 4), shaped(64, dtype=F32)
    step, args = trained(loss, params, images, images, times)
    step_rules = dict(rules)
    return Step(step, args, step_rules, BOTH)


def _recurrent(gates: int, cell: Callable[..., Any], carried: int) -> Step:
    size = 1024
    params = {
        "embed": shaped(VOCAB, size),
        "inner": shaped(size, gates * size),
        "around": shaped(size, gates * size),
        "head": shaped(size, VOCAB),
    }

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens[:, :-1]].swapaxes(0, 1)
        start = tuple(jnp.zeros((x.shape[1], size), BF16) for _ in range(carried))

        def one(state: Any, x: jax.Array) -> Any:
            made = x @ params["inner"], state[0] @ params["around"]
            state = cell(made, state)
            return state, state[0]

        made = jax.lax.scan(one, start, x)[1].swapaxes(0, 1)
        return cross_entropy(made @ params["head"], tokens[:, 1:])

    rules = {
        "embed": ("tensor", "fsdp"),
        "inner|around|head": ("fsdp", "tensor"),
    }
    step, args = trained(loss, params, shaped(64, 65, dtype=I32))
    return Step(step, args, rules, BOTH)


def lstm() -> Step:
    def cell(made: Any, state: Any) -> Any:
        entry, forget, cell, out = jnp.split(made[0] + made[1], 4, -1)
        kept = jax.nn.sigmoid(forget) * state[1]
        kept = kept + jax.nn.sigmoid(entry) * jnp.tanh(cell)
        return jax.nn.sigmoid(out) * jnp.tanh(kept), kept

    return _recurrent(4, cell, 2)


def gru() -> Step:
    def cell(made: Any, state: Any) -> Any:
        (reset, update, new), (reset2, update2, new2) = (
            jnp.split(one, 3, -1) for one in made
        )
        keep = jax.nn.sigmoid(update + update2)
        new = jnp.tanh(new + jax.nn.sigmoid(reset + reset2) * new2)
        return ((1 - keep) * new + keep * state[0],)

    return _recurrent(3, cell, 1)


def gan() -> Step:
    size = 2048
    params = {
        "generator": {"up": shaped(256, size), "down": shaped(size, 3072)},
        "discriminator": {"up": shaped(3072, size), "down": shaped(size, 256)},
    }

    def made(params: Any, noise: jax.Array) -> jax.Array:
        w = params["generator"]
        return jnp.tanh(jax.nn.relu(noise @ w["up"]) @ w["down"])

    def judged(params: Any, images: jax.Array) -> jax.Array:
        w = params["discriminator"]
        return (jax.nn.relu(images @ w["up"]) @ w["down"]).astype(F32).mean(-1)

    def loss(params: Any, noise: jax.Array, images: jax.Array) -> jax.Array:
        fixed = jax.lax.stop_gradient(params)
        fooled = judged({"discriminator": fixed["discriminator"]}, made(params, noise))
        apart = judged(params, made(fixed, noise)) - judged(params, images)
        return jax.nn.softplus(-fooled).mean() + jax.nn.softplus(apart).mean()

    rules = {"up": ("fsdp", "tensor"), "down": ("tensor", "fsdp")}
    step, args = trained(loss, params, shaped(512, 256), shaped(512, 3072))
    return Step(step, args, rules, BOTH)


def nnx_transformer() -> Step:
    """NNX's own layers, unrolled, with biases and dropout."""

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            kinds: Any = {"dtype": BF16, "param_dtype": BF16, "rngs": rngs}
            self.attention = nnx.MultiHeadAttention(HEADS, DIM, decode=False, **kinds)
            self.up = nnx.Linear(DIM, HIDDEN, **kinds)
            self.down = nnx.Linear(HIDDEN, DIM, **kinds)
            self.norm = nnx.LayerNorm(DIM, **kinds)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.dropout(self.attention(self.norm(x)))
            return x + self.down(nnx.gelu(self.up(x)))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(VOCAB, DIM, dtype=BF16, param_dtype=BF16, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.embed.attend(x)

    def make() -> Any:
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def step(params: Any, state: Any, tokens: jax.Array) -> jax.Array:
        def loss_of(model: Any) -> jax.Array:
            return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

        loss, gradients = nnx.value_and_grad(loss_of)(params)
        state.update(params, gradients)
        return loss

    return Step(step, (*nnx.eval_shape(make), TOKENS), LAYER_RULES, BOTH)


STEPS: dict[str, Callable[[], Step]] = {
    "decoder, scanned": scanned,
    "decoder, unrolled": unrolled,
    "grouped queries": grouped_queries,
    "tied embeddings": tied_embeddings,
    "adafactor": adafactor,
    "Muon": muon,
    "accumulation": accumulation,
    "LoRA": lora,
    "preferences (DPO)": preferences,
    "decoding, cache by heads": decoding_by_heads,
    "decoding, cache by positions": decoding_by_positions,
    "experts, dense": experts_dense,
    "experts, top-2 one-hot": experts_one_hot,
    "experts, sorted": experts_sorted,
    "encoder-decoder, Linen": encoder_decoder,
    "NNX transformer, dropout": nnx_transformer,
    "ViT, fully sharded": vision_transformer,
    "ResNet": resnet,
    "U-Net": u_net,
    "LSTM": lstm,
    "GRU": gru,
    "GAN": gan,
}
