"""The number of loops: drawn at random in every training step, and chosen freely afterwards.

If all loops are alike (no `residual_gate`, no `loop_embedding`, the same windows), no parameter
depends on their number. Training draws it, and `backward_loops` truncates the gradient:

    loops = draw_loops(key)                             a traced number: compiled once
    logits = model(tokens, loops=loops, key=key)

Afterwards `with_loops(model, 64)` may run more loops than were ever trained.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit._checks import checked
from toolkit.looped.config import LoopedConfig


class Configured(Protocol):
    """A model that reads its configuration when it is called."""

    config: LoopedConfig


Model = TypeVar("Model", bound=Configured)

START_STD = (2 / 5) ** 0.5
"""Standard deviation of the random start, before truncation at three of them."""


@checked
def draw_loops(key: Array, mean: float = 32.0, *, sigma: float = 0.5) -> Int[Array, ""]:
    """Draw a number of loops for one training step: usually few, now and then many.

        rate = exp(normal(log(mean) - sigma^2 / 2, sigma));     loops = poisson(rate) + 1

    The mean number of loops is `mean` + 1.

    Args:
        key: random key.
        mean: mean of the rate.
        sigma: spread of its logarithm.

    Returns:
        int32, at least 1.

    Source: Geiping et al., "Scaling up Test-Time Compute with Latent Reasoning" (Huginn), 2025,
        section 3.3.

    Example:
        >>> draw_loops(jax.random.key(0), mean=4.0).dtype
        dtype('int32')
    """
    if not mean > 0 or sigma < 0:
        raise ValueError(f"mean is {mean}, sigma {sigma}; they must be positive and not negative.")
    for_rate, for_count = jax.random.split(key)
    rate = mean * jnp.exp(sigma * jax.random.normal(for_rate) - sigma**2 / 2)
    return jax.random.poisson(for_count, rate, dtype=jnp.int32) + 1


def start_noise(key: Array | None, like: Float[Array, "... width"]) -> Float[Array, "... width"]:
    """A random start: normal numbers of variance 2/5, truncated at three deviations; zeros without
    a key."""
    if key is None:
        return jnp.zeros_like(like)
    noise = jax.random.truncated_normal(key, -3.0, 3.0, like.shape)
    return (START_STD * noise).astype(like.dtype)


@checked
def with_loops(model: Model, loops: int) -> Model:
    """Give a model another number of loops, for instance more than in training.

    Args:
        model: not changed.
        loops: how often its layers run.

    Returns:
        A model that shares the arrays; programs that take it are compiled anew.

    Source: Geiping et al. (Huginn), 2025: quality grows with the loops of the test.

    Example:
        >>> from flax import nnx
        >>> config = LoopedConfig.tiny(loops=2, width=16, heads=2, residual_gate=False)
        >>> with_loops(LoopedLM(config, rngs=nnx.Rngs(0)), 8).config.loops
        8
    """
    check_alike(model.config, loops)
    return reconfigured(model, loops=loops)


def reconfigured(model: Model, **fields: Any) -> Model:
    """The same arrays under a configuration that differs in fields without parameters."""
    other = nnx.clone(model)
    other.config = dataclasses.replace(model.config, **fields)
    return other


def check_alike(config: LoopedConfig, loops: Any) -> None:
    """Refuse another number of loops if loops have parameters of their own."""
    if config.per_loop_switches and not (isinstance(loops, int) and loops == config.loops):
        raise ValueError(
            f"loops is {loops}, and {' and '.join(config.per_loop_switches)} of this model fix "
            f"{config.loops}: only loops that are all alike may run more or less often."
        )


def check_call(
    config: LoopedConfig, loops: Any, key: Array | None, *, return_loops: bool, return_routing: bool
) -> None:
    """Refuse a number of loops, a key or results that a model of this configuration cannot have."""
    if loops is not None:
        check_alike(config, loops)
        if not isinstance(loops, int) and (config.backward_loops is None or return_loops):
            raise ValueError(
                "loops is an array, so the states of all loops cannot be kept: configure "
                "backward_loops and drop return_loops, or pass an int."
            )
    if key is not None and not config.random_start:
        raise ValueError("key was given, and the model has no random_start to draw.")
    if return_routing and config.backward_loops is not None:
        raise ValueError(
            f"backward_loops is {config.backward_loops}, and routing is returned of loops "
            "that all have a gradient; configure backward_loops=None."
        )


def run_alike(
    loop: Callable[[Any, Array], Array], shared: Any, h: Any, count: int | Int[Array, ""], *,
    backward: int, remat: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """h <- loop(shared, h), `count` times, with the gradient of the last `backward` times alone."""
    # Truncated back-propagation as in Huginn: earlier loops keep nothing for the backward pass. A
    # traced count compiles once for all counts, but leaves no hidden states to return.
    forward = functools.partial(loop, jax.lax.stop_gradient(shared))
    learn = functools.partial(loop, shared)
    if remat:
        learn = jax.checkpoint(learn, prevent_cse=False)
    if isinstance(count, int):
        early = max(0, count - backward)
        h, first = _repeat(forward, jax.lax.stop_gradient(h) if early else h, early)
        h, last = _repeat(learn, h, count - early)
        return h, jax.tree.map(lambda *parts: jnp.concatenate(parts), first, last)
    early = jnp.maximum(count - backward, 0)
    after = jax.lax.fori_loop(0, early, lambda _, h: forward(h), jax.lax.stop_gradient(h))
    # Without earlier loops the start receives a gradient too.
    h = jax.tree.map(lambda run, start: jnp.where(early > 0, run, start), after, h)

    def learn_or_wait(h, runs):
        return jax.lax.cond(runs, learn, lambda h: h, h), None

    h, _ = jax.lax.scan(learn_or_wait, h, jnp.arange(backward) < count - early)
    return h, None


def _repeat(function, h, times):
    def once(h, _):
        h = function(h)
        return h, h

    return jax.lax.scan(once, h, length=times)
