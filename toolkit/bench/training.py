"""A training step of a four-layer byte model: ours, plain JAX, and PyTorch's Llama.

All three are the same model from the same weights: forward, backward, clipping by the global norm
and AdamW, one update per call. Plain JAX is what one would write in an afternoon: a dict of
arrays, `jax.nn` and optax. PyTorch's is transformers' Llama with fused attention and fused AdamW.

Ours comes twice: as one calls it without any set-up, and with every batch shared among the cores
after `use_cores()`, as `toolkit train` does. A batch of one sequence cannot be shared.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from toolkit.bench.harness import Case, PlannedCase
from toolkit.bench.peers import AFTER, has_torch
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.looped.checkpoints import load_checkpoint
from toolkit.looped.layers import rotary_embedding
from toolkit.parallel import Layout, data_parallel, make_mesh, use_cores
from toolkit.training import TrainState, adamw, make_train_step

LAYERS, WIDTH, HEADS = 4, 128, 4
RATE, CLIP = 1e-3, 1.0
TOLERANCE = 1e-4  # of the losses of the first and the second update
OURS, PLAIN, TORCH = "toolkit", "plain JAX", "torch Llama"


def cases(cores: int) -> Iterator[PlannedCase]:
    """4096 tokens per update, in sequences of 256, 1024 and 4096."""
    for batch, time in ((16, 256), (4, 1024), (1, 4096)):
        name = f"training step, {LAYERS} layers of {WIDTH}, B={batch} T={time} float32"
        yield PlannedCase(name, partial(_case, batch, time, cores))


def _case(batch: int, time: int, cores: int, name: str) -> Case:
    config = LoopedConfig.tiny(
        " ".join(["full"] * LAYERS), width=WIDTH, heads=HEADS, residual_gate=False
    )
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (batch, time + 1))
    contenders = {}
    if has_torch():
        contenders[TORCH], model = _torch_llama(config, tokens, cores)
    else:
        model = LoopedLM(config, rngs=nnx.Rngs(0))
    params, ours = nnx.state(model), {}
    for label, count in {OURS: 1, OURS + AFTER: cores}.items():
        if label == OURS or (count > 1 and batch % count == 0):
            use_cores(count)
            layout = data_parallel(params, make_mesh({"data": count})) if count > 1 else None
            ours[label] = jax_step(our_loss(model), params, tokens, layout)
    use_cores(1)
    plain = jax_step(_plain_loss, plain_parameters(model), tokens)
    contenders = {**ours, PLAIN: plain, **contenders}
    return Case(
        name=name,
        contenders=contenders,
        check=partial(_same_losses, contenders, list(ours)[-1]),
        ours=list(ours)[-1],
        targets={PLAIN: 1.2, TORCH: 1.0},
    )


def _same_losses(contenders: Mapping[str, Callable], ours: str, first: Mapping[str, Any]) -> None:
    """The loss before an update and the loss after it, which sees gradients and optimiser."""
    for losses in (first, {name: call() for name, call in contenders.items()}):
        wanted = float(losses[ours])
        for name, loss in losses.items():
            if not abs(float(loss) - wanted) <= TOLERANCE * wanted:
                raise ValueError(f"{name!r} has loss {float(loss):.6f}, {ours!r} {wanted:.6f}")


def jax_step(
    loss: Callable, params: Any, tokens: np.ndarray, layout: Layout | None = None
) -> Callable[[], jax.Array]:
    """An update by AdamW per call, which returns the loss before it; compiled here and now."""
    optimizer = adamw(RATE, clip_norm=CLIP)
    state, data = TrainState.create(params, optimizer), jnp.asarray(tokens, jnp.int32)
    if layout is not None:
        state, data = layout.apply(state), layout.apply_batch(data)
    update = make_train_step(loss, optimizer).lower(state, data).compile()
    donated, number = [state], jnp.int32(1)

    def call() -> jax.Array:
        donated[0], metrics = update(donated[0], data, number)
        return metrics["loss"][0]

    return call


def our_loss(model: LoopedLM) -> Callable[[Any, jax.Array], jax.Array]:
    """(parameters, tokens) -> loss of our model."""
    graph = nnx.graphdef(model)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return cross_entropy(nnx.merge(graph, params)(tokens[:, :-1]), tokens[:, 1:])

    return loss


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over all tokens."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def plain_parameters(model: Any) -> dict[str, Any]:
    """The parameters of a model of "full" layers as a dict of arrays."""

    def of(block: Any) -> dict[str, jax.Array]:
        mixer, fed = block.mixer, block.feed_forward
        matrices = {"q": mixer.query, "k": mixer.key, "v": mixer.value, "o": mixer.output}
        matrices |= {"gate": fed.gate, "up": fed.up, "down": fed.down}
        norms = {"norm": block.mixer_norm, "norm_2": block.feed_forward_norm}
        return {name: part.kernel[...] for name, part in matrices.items()} | {
            name: part.scale[...] for name, part in norms.items()
        }

    table = model.embedding.embedding[...]
    layers = [of(block) for block in model.blocks]
    found = {"table": table, "norm": model.norm.scale[...], "layers": layers}
    return found if model.rho is None else found | {"rho": model.rho[...]}


def _plain_loss(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    h = params["table"][tokens[:, :-1]]
    positions = jnp.arange(h.shape[1])
    for layer in params["layers"]:
        x = rms_norm(h, layer["norm"])
        q, k, v = ((x @ layer[name]).reshape(*h.shape[:2], HEADS, WIDTH // HEADS) for name in "qkv")
        q, k = (rotary_embedding(x, positions, theta=10000.0) for x in (q, k))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        h += mixed.reshape(h.shape) @ layer["o"]
        x = rms_norm(h, layer["norm_2"])
        h += (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]
    return cross_entropy(rms_norm(h, params["norm"]) @ params["table"].T, tokens[:, 1:])


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """In float32, back in the dtype of x."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * scale[None, None]).astype(x.dtype)


def _torch_llama(
    config: LoopedConfig, tokens: np.ndarray, threads: int
) -> tuple[Callable[[], float], LoopedLM]:
    """Its step, and our model with its first weights."""
    import torch
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": config.vocabulary,
        "hidden_size": WIDTH,
        "intermediate_size": config.feed_forward_size,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": tokens.shape[1],
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": True,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    llama = LlamaForCausalLM(LlamaConfig(**settings)).train()
    weights = {name: x.detach().numpy() for name, x in llama.state_dict().items()}
    sizes = {"heads": HEADS, "width": WIDTH, "vocabulary": config.vocabulary}
    model = load_checkpoint(
        weights,
        style="llama",
        pattern=config.pattern,
        feed_forward=config.feed_forward_size,
        norm_epsilon=config.norm_epsilon,
        residual_gate=False,
        tied_embedding=True,  # the head is among the tensors, as a second name of the table
        **sizes,
    )
    matrices = [p for p in llama.parameters() if p.ndim >= 2]
    vectors = [p for p in llama.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=RATE,
        betas=(0.9, 0.95),
        fused=True,
    )
    inputs, targets = torch.tensor(tokens[:, :-1]), torch.tensor(tokens[:, 1:]).reshape(-1)

    def call() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = llama(inputs).logits.reshape(-1, config.vocabulary)
        loss = torch.nn.functional.cross_entropy(logits, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(llama.parameters(), CLIP)
        optimizer.step()
        return loss.item()

    return call, model
