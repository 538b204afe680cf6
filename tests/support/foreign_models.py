"""Ten models as strangers write them, from their papers' descriptions, in four styles.

Each row: parameters, a loss, a batch, and what tensor parallelism is due: the number of all-reduces
of one array [batch, time, width] that Megatron's rules need, forward and backward.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from toolkit.attention import register_dataclass

WIDTH, HEADS, HIDDEN, WORDS, LAYERS = 32, 4, 64, 64, 2
KEY = WIDTH // HEADS
BATCH, TIME = 16, 16
FLOAT = jnp.float64


class Foreign(NamedTuple):
    params: Any
    loss: Any
    batch: Any
    sums: float
    """All-reduces of [BATCH, TIME, WIDTH] that tensor parallelism is due."""


def tokens():
    words = jax.random.randint(jax.random.key(1), (BATCH, TIME + 1), 0, WORDS)
    return {"inputs": words[:, :-1], "targets": words[:, 1:]}


def images():
    keys = jax.random.split(jax.random.key(2), 2)
    pixels = jax.random.normal(keys[0], (BATCH, 16, 16, 3), FLOAT)
    return {"image": pixels, "label": jax.random.randint(keys[1], (BATCH,), 0, 16)}


def cross_entropy(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def weights(seed, **shapes):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: jax.random.normal(key, shape, FLOAT) / np.sqrt(shape[0])
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def of_linen(module, batch, key, loss_of, sums):
    params = module.init(jax.random.key(0), batch[key])["params"]
    return Foreign(
        params, lambda p, b: loss_of(module.apply({"params": p}, b[key]), b), batch, sums
    )


def attend(q, k, v):
    """Causal, by a softmax in float64: jax.nn.dot_product_attention has it in float32."""
    groups = q.reshape(*q.shape[:2], k.shape[2], -1, KEY)
    scores = jnp.einsum("bqhgk,bthk->bhgqt", groups, k) / np.sqrt(KEY)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhgqt,bthk->bqhgk", jax.nn.softmax(scores), v).reshape(q.shape)


def next_words(logits, batch):
    return cross_entropy(logits, batch["targets"])


# flax.linen: layers stacked by nn.scan, heads as a dimension of the kernels, tied embedding


class Block(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        mask = linen.make_causal_mask(jnp.ones(x.shape[:2]))
        h = linen.LayerNorm(param_dtype=FLOAT)(x)
        x = x + linen.MultiHeadDotProductAttention(HEADS, param_dtype=FLOAT, name="attention")(
            h, mask=mask
        )
        h = linen.Dense(HIDDEN, param_dtype=FLOAT)(linen.LayerNorm(param_dtype=FLOAT)(x))
        return x + linen.Dense(WIDTH, param_dtype=FLOAT)(linen.gelu(h)), None


class Scanned(linen.Module):
    remat: bool = False

    @linen.compact
    def __call__(self, words):
        embed = linen.Embed(WORDS, WIDTH, param_dtype=FLOAT)
        layers = linen.scan(
            linen.remat(Block) if self.remat else Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = layers(name="layers")(embed(words), None)
        return embed.attend(linen.LayerNorm(param_dtype=FLOAT)(x))


def linen_scan():
    return of_linen(Scanned(), tokens(), "inputs", next_words, 4 * LAYERS + 2)


def linen_scan_remat():
    """Recomputed layers also repeat the sum in the middle of each."""
    return of_linen(Scanned(remat=True), tokens(), "inputs", next_words, 5 * LAYERS + 2)


# flax.nnx: grouped queries with fewer heads of keys than devices, gated hidden layer


class Grouped(nnx.Module):
    def __init__(self, rngs):
        linear = partial(nnx.Linear, use_bias=False, param_dtype=FLOAT, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, param_dtype=FLOAT, rngs=rngs) for _ in range(2)])
        self.q, self.o = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.k, self.v = linear(WIDTH, 2 * KEY), linear(WIDTH, 2 * KEY)
        self.gate, self.up = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN)
        self.down = linear(HIDDEN, WIDTH)

    def __call__(self, x):
        h = self.norms[0](x)
        q, k, v = (f(h).reshape(*x.shape[:2], -1, KEY) for f in (self.q, self.k, self.v))
        h = attend(q, k, v)
        x = x + self.o(h.reshape(x.shape))
        h = self.norms[1](x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


class GroupedLM(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, param_dtype=FLOAT, rngs=rngs)
        self.blocks = nnx.List([Grouped(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, WORDS, use_bias=False, param_dtype=FLOAT, rngs=rngs)

    def __call__(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def nnx_grouped():
    graph, params = nnx.split(GroupedLM(nnx.Rngs(0)))
    return Foreign(
        params,
        lambda p, b: next_words(nnx.merge(graph, p)(b["inputs"]), b),
        tokens(),
        # A head of keys and values on two devices: each part is gathered, its gradient summed.
        4 * LAYERS + 2 + 0.5 * LAYERS,
    )


# Vision transformer: patches by a convolution, positions, a class token; [queries | keys |
# values] of one product reshaped to [3, heads, key], as timm has it


class ViT(linen.Module):
    @linen.compact
    def __call__(self, image):
        x = linen.Conv(WIDTH, (4, 4), (4, 4), param_dtype=FLOAT)(image)
        x = x.reshape(x.shape[0], -1, WIDTH)
        token = self.param("token", linen.initializers.zeros, (1, 1, WIDTH), FLOAT)
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, WIDTH)), x], 1)
        x = x + self.param("positions", linen.initializers.normal(), (1, x.shape[1], WIDTH), FLOAT)
        for _ in range(LAYERS):
            h = linen.Dense(3 * WIDTH, param_dtype=FLOAT)(linen.LayerNorm(param_dtype=FLOAT)(x))
            q, k, v = h.reshape(*h.shape[:2], 3, HEADS, KEY).transpose(2, 0, 3, 1, 4)
            h = (jax.nn.softmax(q @ k.mT / np.sqrt(KEY)) @ v).swapaxes(1, 2).reshape(x.shape)
            x = x + linen.Dense(WIDTH, param_dtype=FLOAT)(h)
            h = linen.Dense(HIDDEN, param_dtype=FLOAT)(linen.LayerNorm(param_dtype=FLOAT)(x))
            x = x + linen.Dense(WIDTH, param_dtype=FLOAT)(linen.gelu(h))
        return linen.Dense(16, param_dtype=FLOAT)(linen.LayerNorm(param_dtype=FLOAT)(x)[:, 0])


def vit():
    sums = 4 * LAYERS * 17 / TIME  # of the class token too
    return of_linen(ViT(), images(), "image", lambda y, b: cross_entropy(y, b["label"]), sums)


# T5: encoder and decoder, relative positions as a learned bias, tied embedding


def t5_attention(p, x, memory, bias, causal):
    q, k, v = (
        jnp.einsum("btd,dhk->bthk", y, p[n]) for n, y in (("q", x), ("k", memory), ("v", memory))
    )
    scores = jnp.einsum("bqhk,bthk->bhqt", q, k) + bias
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhqt,bthk,hkd->bqd", jax.nn.softmax(scores), v, p["o"])


def rms(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def t5_loss(p, batch):
    source, target = p["embed"][batch["inputs"]], p["embed"][batch["targets"]]
    distance = jnp.clip(jnp.arange(TIME)[None] - jnp.arange(TIME)[:, None], -4, 4) + 4
    bias = p["relative"][distance].transpose(2, 0, 1)[None]
    for layer in p["encoder"]:
        h = rms(source)
        source = source + t5_attention(layer["self"], h, h, bias, False)
        source = source + jax.nn.relu(rms(source) @ layer["wi"]) @ layer["wo"]
    memory, x = rms(source), target
    for layer in p["decoder"]:
        h = rms(x)
        x = x + t5_attention(layer["self"], h, h, bias, True)
        x = x + t5_attention(layer["cross"], rms(x), memory, 0.0, False)
        x = x + jax.nn.relu(rms(x) @ layer["wi"]) @ layer["wo"]
    return cross_entropy(rms(x) @ p["embed"].T, batch["inputs"])


def t5():
    def attention(seed):
        shape = (WIDTH, HEADS, KEY)
        return weights(seed, q=shape, k=shape, v=shape, o=(HEADS, KEY, WIDTH))

    def layer(seed, *names):
        parts = {name: attention(seed + i) for i, name in enumerate(names)}
        return {**parts, **weights(seed + 9, wi=(WIDTH, HIDDEN), wo=(HIDDEN, WIDTH))}

    params = {
        **weights(0, embed=(WORDS, WIDTH), relative=(9, HEADS)),
        "encoder": [layer(10, "self")],
        "decoder": [layer(20, "self", "cross")],
    }
    # Encoder 4, decoder 6 and the memory's gradient, two lookups, the head's gradient.
    return Foreign(params, t5_loss, tokens(), 4 + 6 + 1 + 2 + 1)


# nanochat: rotary positions, norms of queries and keys, squared relu, capped logits


def rotate(x):
    angles = jnp.arange(x.shape[1])[:, None] * 100.0 ** (-jnp.arange(KEY // 2) / (KEY // 2))
    a, b = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    return jnp.concatenate([a * cos + b * sin, b * cos - a * sin], -1)


def nanochat_loss(p, batch):
    x = rms(p["wte"][batch["inputs"]])
    for layer in p["h"]:
        h = rms(x)
        q, k, v = ((h @ layer[n]).reshape(*h.shape[:2], HEADS, KEY) for n in ("q", "k", "v"))
        q, k = rms(rotate(q)), rms(rotate(k))
        y = attend(q, k, v)
        x = x + y.reshape(x.shape) @ layer["proj"]
        x = x + jnp.square(jax.nn.relu(rms(x) @ layer["fc"])) @ layer["out"]
    logits = rms(x) @ p["lm_head"]
    return cross_entropy(15 * jnp.tanh(logits / 15), batch["targets"])


def nanochat():
    square = dict.fromkeys(("q", "k", "v", "proj"), (WIDTH, WIDTH))
    layers = [weights(i, **square, fc=(WIDTH, HIDDEN), out=(HIDDEN, WIDTH)) for i in range(LAYERS)]
    params = {**weights(9, wte=(WORDS, WIDTH), lm_head=(WIDTH, WORDS)), "h": layers}
    return Foreign(params, nanochat_loss, tokens(), 4 * LAYERS + 1)  # the lookup is whole


# Equinox: modules are pytrees that map one example; weights [out, in]; vmap over the batch


@register_dataclass
@dataclasses.dataclass
class Linear:
    weight: Any
    bias: Any

    @classmethod
    def make(cls, seed, inside, outside):
        weight = weights(seed, w=(inside, outside))["w"].T
        return cls(weight, jnp.full(outside, 0.1, FLOAT))

    def __call__(self, x):
        return self.weight @ x + self.bias


@register_dataclass
@dataclasses.dataclass
class PytreeBlock:
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    inner: Linear
    outer: Linear

    def __call__(self, x):
        h = rms(x)
        q, k, v = (
            jax.vmap(f)(h).reshape(-1, HEADS, KEY) for f in (self.query, self.key, self.value)
        )
        scores = jnp.einsum("qhk,thk->hqt", q, k) / np.sqrt(KEY)
        y = jnp.einsum("hqt,thk->qhk", jax.nn.softmax(scores), v)
        x = x + jax.vmap(self.output)(y.reshape(x.shape))
        return x + jax.vmap(self.outer)(jax.nn.gelu(jax.vmap(self.inner)(rms(x))))


def equinox():
    square = [Linear.make(i, WIDTH, WIDTH) for i in range(4)]
    block = PytreeBlock(*square, Linear.make(4, WIDTH, HIDDEN), Linear.make(5, HIDDEN, WIDTH))
    params = {"block": block, "head": Linear.make(6, WIDTH, 16)}

    def one(p, image):
        patches = image.reshape(4, 4, 4, 4, 3).transpose(0, 2, 1, 3, 4).reshape(16, -1)
        x = p["block"](jnp.pad(patches, ((0, 0), (0, 0)))[:, :WIDTH])
        return p["head"](x.mean(0))

    def loss(p, batch):
        return cross_entropy(jax.vmap(one, (None, 0))(p, batch["image"]), batch["label"])

    # The block's input is data: no gradient is summed before it.
    return Foreign(params, loss, images(), 3)


# A mixture of experts in flax.linen: softmax router, two of four experts, dense dispatch


class Mixture(linen.Module):
    @linen.compact
    def __call__(self, words):
        x = linen.Embed(WORDS, WIDTH, param_dtype=FLOAT)(words)
        for i in range(LAYERS):
            scores = linen.Dense(4, use_bias=False, param_dtype=FLOAT, name=f"router{i}")(x)
            best, chosen = jax.lax.top_k(scores, 2)
            gates = jnp.einsum(
                "btk,btke->bte", jax.nn.softmax(best), jax.nn.one_hot(chosen, 4, dtype=FLOAT)
            )
            init = linen.initializers.lecun_normal(batch_axis=0)
            up = self.param(f"up{i}", init, (4, WIDTH, HIDDEN), FLOAT)
            down = self.param(f"down{i}", init, (4, HIDDEN, WIDTH), FLOAT)
            inner = linen.silu(jnp.einsum("btd,edf->btef", rms(x), up))
            x = x + jnp.einsum("btef,efd,bte->btd", inner, down, gates)
        return linen.Dense(WORDS, use_bias=False, param_dtype=FLOAT)(x)


def mixture():
    return of_linen(Mixture(), tokens(), "inputs", next_words, 2 * LAYERS + 1.2)  # the gates too


# GPT-2: queries, keys and values in one product with biases, learned positions


def gpt2_loss(p, batch):
    x = p["wte"][batch["inputs"]] + p["wpe"]
    for layer in p["h"]:
        fused = rms(x) @ layer["c_attn"] + layer["b_attn"]
        q, k, v = (y.reshape(*y.shape[:2], HEADS, KEY) for y in jnp.split(fused, 3, -1))
        y = attend(q, k, v).reshape(x.shape)
        x = x + y @ layer["c_proj"] + layer["b_proj"]
        x = x + jax.nn.gelu(rms(x) @ layer["c_fc"] + layer["b_fc"]) @ layer["c_out"]
    return cross_entropy(rms(x) @ p["wte"].T, batch["targets"])


def gpt2():
    def layer(seed):
        shapes = {"c_attn": (WIDTH, 3 * WIDTH), "b_attn": (3 * WIDTH,), "c_proj": (WIDTH, WIDTH)}
        shapes |= {"b_proj": (WIDTH,), "c_fc": (WIDTH, HIDDEN), "b_fc": (HIDDEN,)}
        return weights(seed, **shapes, c_out=(HIDDEN, WIDTH))

    params = {
        **weights(9, wte=(WORDS, WIDTH), wpe=(TIME, WIDTH)),
        "h": [layer(i) for i in range(LAYERS)],
    }
    return Foreign(params, gpt2_loss, tokens(), 4 * LAYERS + 2)


# A recurrent language model: a gated unit over time by lax.scan


def rnn_loss(p, batch):
    x = p["embed"][batch["inputs"]]

    def step(h, x):
        gates = jax.nn.sigmoid(x @ p["wx"] + h @ p["wh"] + p["b"])
        new = jnp.tanh(x @ p["nx"] + (gates * h) @ p["nh"])
        h = gates * h + (1 - gates) * new
        return h, h

    start = jnp.zeros((x.shape[0], WIDTH), x.dtype)
    _, hs = jax.lax.scan(step, start, x.swapaxes(0, 1))
    return cross_entropy(hs.swapaxes(0, 1) @ p["head"], batch["targets"])


def rnn():
    square = dict.fromkeys(("wx", "wh", "nx", "nh"), (WIDTH, WIDTH))
    params = weights(0, embed=(WORDS, WIDTH), head=(WIDTH, WORDS), b=(WIDTH,), **square)
    # Units that feed each other stay whole, and only the words are cut.
    return Foreign(params, rnn_loss, tokens(), 1)


_ALL = (linen_scan, linen_scan_remat, nnx_grouped, vit, t5)
_ALL += (nanochat, equinox, mixture, gpt2, rnn)
MODELS = {model.__name__: model for model in _ALL}
