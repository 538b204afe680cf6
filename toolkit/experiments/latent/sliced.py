"""A language model with sliced latent attention, by the reference of TPLA.

The reference is differentiable, so the weights of the slices can be distilled towards the original
model.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from toolkit.attention.latent import (
    LatentSlices,
    calibration_latents,
    energy_shares,
    fold,
    hadamard_basis,
    principal_basis,
    random_basis,
    slice_latents,
    tpla_reference,
)
from toolkit.attention.latent.tpla import Norm
from toolkit.looped import LoopedLM
from toolkit.training import adamw, sample_batch

Slices = tuple[LatentSlices, ...]
TRAINED = ("query_up", "latent_down", "rope_key", "key_up", "value_up", "output")
BASES = ("none", "Hadamard", "PCA", "random")


@jax.jit
def streams(model: LoopedLM, tokens: Int[Array, "batch time"]) -> list[Array]:
    """The normalised input of every attention layer for a text [batch, time, width]."""
    h, read = model.embedding(tokens), []
    for block in model.blocks:
        read.append(block.mixer_norm(h))
        h, _ = block(h)
    return read


def cut(model: LoopedLM, read: list[Array], slices: int, basis: str, key: Array) -> Slices:
    """Every layer's latents in a basis, and in slices with their shares of the energy of `read`."""
    layers = []
    for number, (block, x) in enumerate(zip(model.blocks, read, strict=True)):
        sizes, weights = block.mixer.sizes, block.mixer.weights()
        matrix = None
        if basis == "Hadamard":
            matrix = hadamard_basis(sizes.latent_size, jax.random.fold_in(key, number))
        elif basis == "random":
            matrix = random_basis(sizes.latent_size, jax.random.fold_in(key, number))
        elif basis == "PCA":
            matrix = principal_basis(calibration_latents(x, weights, sizes))
        folded = fold(weights, matrix)
        shares = energy_shares(calibration_latents(x, folded, sizes), slices)
        layers.append(slice_latents(folded, slices, shares=shares))
    return tuple(layers)


def logits(
    model: LoopedLM,
    layers: Slices,
    tokens: Int[Array, "batch time"],
    *,
    norm: Norm,
    prompt: int = 0,
) -> Float[Array, "batch time vocabulary"]:
    """Logits of `model` with sliced attention, except for the first `prompt` tokens.

    Not one program: those of a layer serve every layer and every prompt.
    """
    h = _embedded(model, tokens)
    for block, sliced in zip(model.blocks, layers, strict=True):
        x = _read(block, h)
        h = _finished(
            block, h, tpla_reference(x, sliced, block.mixer.sizes, norm=norm, prompt=prompt)
        )
    return _predicted(model, h)


_embedded = jax.jit(lambda model, tokens: model.embedding(tokens))
_read = jax.jit(lambda block, h: block.mixer_norm(h))
_finished = jax.jit(lambda block, h, mixed: block.finish(h, mixed))
_predicted = jax.jit(lambda model, h: model.head(h))


def align(
    model: LoopedLM,
    layers: Slices,
    text: np.ndarray,
    *,
    norm: Norm,
    steps: int,
    rate: float,
    seed: int,
    batch: int,
    time: int,
) -> tuple[Slices, list[float]]:
    """Align the slices with the original model for some steps; returns them and the losses.

        loss = mean_t KL(model(tokens)_t || sliced(tokens)_t)

    Only the weights of attention change.
    """
    trained = [{name: getattr(sliced, name) for name in TRAINED} for sliced in layers]
    optimizer = adamw(optax.cosine_decay_schedule(rate, steps), weight_decay=0.0)

    @jax.jit
    def update(state, model, layers, text, step):
        trained, moments = state
        tokens, _ = sample_batch(text, step, seed, batch, time)
        wanted = jax.nn.log_softmax(model(tokens))

        def loss(trained):
            found = logits(model, _with(layers, trained), tokens, norm=norm)
            return divergence(wanted, jax.nn.log_softmax(found)).mean()

        value, gradient = jax.value_and_grad(loss)(trained)
        changes, moments = optimizer.update(gradient, moments, trained)
        return (optax.apply_updates(trained, changes), moments), value

    state, losses = (trained, optimizer.init(trained)), []
    for step in range(steps):
        state, value = update(state, model, layers, jnp.asarray(text), jnp.int32(step))
        losses.append(value)
    return _with(layers, state[0]), [float(value) for value in losses]


def _with(layers: Slices, trained: list[dict[str, Array]]) -> Slices:
    return tuple(
        dataclasses.replace(sliced, **own) for sliced, own in zip(layers, trained, strict=True)
    )


def divergence(log_p: Array, log_q: Array) -> Float[Array, "batch time"]:
    """KL(p || q) of next tokens, nats."""
    return (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)


def judged(
    model: LoopedLM,
    predict: Callable[[Array], Array],
    inputs: Int[Array, "count batch time"],
    targets: Int[Array, "count batch time"],
) -> tuple[Array, Array, Array]:
    """Of the logits that `predict` gives for windows, per token: loss, whether the likeliest next
    token is the model's, and the divergence from it, nats.
    """
    found = [
        _judged(model, predict(tokens), tokens, following)
        for tokens, following in zip(inputs, targets, strict=True)
    ]
    loss, same, apart = (jnp.stack(column) for column in zip(*found, strict=True))
    return loss, same, apart


@jax.jit
def _judged(
    model: LoopedLM, found: Array, tokens: Array, following: Array
) -> tuple[Array, Array, Array]:
    exact = model(tokens)
    loss = optax.softmax_cross_entropy_with_integer_labels(found, following)
    log_p, log_q = jax.nn.log_softmax(exact), jax.nn.log_softmax(found)
    same = found.argmax(axis=-1) == exact.argmax(axis=-1)
    return loss, same, divergence(log_p, log_q)
