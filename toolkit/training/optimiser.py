"""Optimisers by name, and AdamW with the usual settings for language models."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from toolkit._checks import checked


@dataclass(frozen=True)
class OptimizerKind:
    """A row of `OPTIMIZERS`: the direction of an update, without learning rate or weight decay.

    Attributes:
        direction: (b1, b2, eps) -> optax transformation, to be scaled by minus the learning rate.
        b1: default decay of the first moment.
        b2: default decay of the second moment.
        source: where the method was proposed.
        last: makes what is applied after weight decay, or None.
        is_averaging: whether schedule-free averages of the weights stand in for a first moment.
        reads_matrices: whether a number's update depends on the shape of its array.
        has_eps: whether the direction has an eps.

    Example:
        >>> OPTIMIZERS["lion"].b2
        0.99
    """

    direction: Callable[[float, float, float], optax.GradientTransformation]
    b1: float
    b2: float
    source: str
    last: Callable[[], optax.GradientTransformation] | None = None
    is_averaging: bool = False
    reads_matrices: bool = False
    has_eps: bool = True


@checked
def adamw(
    learning_rate: float | optax.Schedule, *,
    weight_decay: float = 0.1, b1: float = 0.9, b2: float = 0.95, eps: float = 1e-8,
    clip_norm: float | None = 1.0,
) -> optax.GradientTransformation:  # fmt: skip
    """AdamW with clipping by the global norm and no weight decay on vectors.

        g <- g * min(1, clip_norm / |g|);  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
        w <- w - rate * (m_hat / (sqrt(v_hat) + eps) + weight_decay * w)     (w decays if a matrix)

    Norm scales, biases and per-head constants such as `A_log` or `dt_bias` are vectors; decay would
    change the model. The learning rate is in the state, where the train step reads it for the
    metrics.

    Args:
        learning_rate: a number or a schedule.
        weight_decay: decoupled decay, scaled by the learning rate.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        clip_norm: largest global gradient norm; None for no clipping.

    Returns:
        An optax gradient transformation.

    Source: Loshchilov and Hutter, Decoupled weight decay regularization (arXiv:1711.05101).

    Example:
        >>> import optax
        >>> optimizer = adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 50, 1000))
        >>> state = TrainState.create({"w": jnp.ones((4, 4))}, optimizer)
    """
    if clip_norm is not None and clip_norm <= 0:
        raise ValueError(f"clip_norm must be positive or None, got {clip_norm}")
    for name, memory in (("b1", b1), ("b2", b2)):
        if not 0 <= memory < 1:
            raise ValueError(f"{name} must lie in [0, 1), got {memory}")
    if eps <= 0:
        raise ValueError(f"eps must be positive, got {eps}")
    if weight_decay < 0:
        raise ValueError(f"weight_decay must not be negative, got {weight_decay}")
    kind, mask = OPTIMIZERS["adamw"], partial(decay_mask, spared=("vectors",))
    how = {"weight_decay": weight_decay, "mask": mask, "clip_norm": clip_norm}
    return assembled(kind, learning_rate, b1=b1, b2=b2, eps=eps, **how)


def assembled(
    kind: OptimizerKind, learning_rate: float | optax.Schedule, *,
    b1: float, b2: float, eps: float, weight_decay: float, mask: Callable[[Any], Any],
    clip_norm: float | None,
) -> optax.GradientTransformation:  # fmt: skip
    """Clipping, the method's direction, weight decay and the learning rate, one after the other."""
    clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
    parts = (
        kind.direction(0.0 if kind.is_averaging else b1, b2, eps),
        optax.add_decayed_weights(weight_decay, mask=mask),
        *(() if kind.last is None else (kind.last(),)),
        optax.inject_hyperparams(optax.scale_by_learning_rate)(learning_rate=learning_rate),
    )
    if kind.is_averaging:
        parts = (optax.contrib.schedule_free(optax.chain(*parts), learning_rate, b1=b1),)
    return optax.chain(clip, *parts)


def decay_mask(params: Any, *, spared: tuple[str, ...]) -> Any:
    """Which arrays decay: not "vectors", nor those with one of the other words in their path.

    ValueError if a word fits no parameter.
    """
    paths = [path for path, _ in _named(params)]
    for word in spared:
        if word != "vectors" and not any(word in path for path in paths):
            raise ValueError(
                f"no_decay: got {word!r}, which is in no parameter's path; wanted 'vectors' or a "
                f"part of a path such as {paths[0] if paths else ''!r}"
            )
    words = [word for word in spared if word != "vectors"]

    def decays(path: str, leaf: Any) -> bool:
        is_spared = leaf.ndim < 2 and "vectors" in spared
        return not is_spared and not any(word in path for word in words)

    leaves = [decays(path, leaf) for path, leaf in _named(params)]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def _named(params: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def _adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=b1, b2=b2, eps=eps)


def _muon(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    # An update as large as AdamW's (0.2, Moonlight), so that both take the same learning rate.
    muon = optax.contrib.muon(
        1.0, adam_b1=b1, adam_b2=b2, eps=eps, adam_learning_rate=1.0,
        muon_weight_dimension_numbers=hidden_matrices, consistent_rms=0.2,
    )  # fmt: skip
    return optax.chain(muon, optax.scale(-1.0))


def hidden_matrices(params: Any) -> Any:
    """The weights of linear maps between hidden layers; the leading axes are a stack of them."""

    def dimensions(path: str, leaf: Any) -> MuonDimensionNumbers | None:
        is_table = any(
            word in path for word in ("embed", "wte", "wpe", "head", "convolution", "rho")
        )
        is_map = leaf.ndim >= 2 and min(leaf.shape[-2:]) > 1 and not is_table
        return MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1) if is_map else None

    leaves = [dimensions(path, leaf) for path, leaf in _named(params)]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": OptimizerKind(_adam, 0.9, 0.95, "arXiv:1711.05101"),
    "ademamix": OptimizerKind(
        lambda b1, b2, eps: optax.contrib.scale_by_ademamix(b1=b1, b2=b2, alpha=5.0, eps=eps),
        0.9, 0.999, "arXiv:2409.03137",
    ),
    "lion": OptimizerKind(
        lambda b1, b2, eps: optax.scale_by_lion(b1=b1, b2=b2), 0.9, 0.99, "arXiv:2302.06675",
        has_eps=False,
    ),
    "muon": OptimizerKind(
        _muon, 0.9, 0.95, "kellerjordan.github.io/posts/muon, arXiv:2502.16982",
        reads_matrices=True,
    ),
    "lamb": OptimizerKind(
        _adam, 0.9, 0.999, "arXiv:1904.00962", optax.scale_by_trust_ratio, reads_matrices=True
    ),
    "adafactor": OptimizerKind(
        lambda b1, b2, eps: optax.chain(
            optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)
        ),
        0.0, 0.0, "arXiv:1804.04235", reads_matrices=True, has_eps=False,
    ),
    "sgd": OptimizerKind(
        lambda b1, b2, eps: optax.trace(decay=b1, nesterov=True), 0.9, 0.0, "Nesterov, 1983",
        has_eps=False,
    ),
    "schedule_free": OptimizerKind(_adam, 0.9, 0.95, "arXiv:2405.15682", is_averaging=True),
}  # fmt: skip
"""Optimisers by name; a row that a module adds is a name like the others. "muon" turns the matrices
between hidden layers, and AdamW everything else; adafactor has no first moment."""
