"""The choice of attention layers for a hybrid: those that its predictions need most."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from toolkit._checks import checked
from toolkit.conversion.distillation import mean_where_asked, top_k_divergence
from toolkit.conversion.student import new_layers, with_mixers
from toolkit.looped.mixing.layer import MixingLayer
from toolkit.looped.model import LoopedLM


@checked
def restoration_benefits(
    student: LoopedLM, teacher: LoopedLM, inputs: Int[Array, "batch time"],
    targets: Int[Array, "batch time"], *,
    top_k: int, temperature: float = 1.0,
) -> Float[np.ndarray, "layers"]:  # fmt: skip
    """The reduction of the student's divergence when one layer is restored to attention.

        benefit[l] = KL(teacher || student) - KL(teacher || student with layer l restored)

    on the predictions after the last loop. The benefit of a layer that was never replaced is 0.

    Args:
        student: after stage 1.
        teacher: its teacher.
        inputs: whole numbers below the vocabulary.
        targets: positions with a negative target do not count.
        top_k: tokens compared, as in `top_k_divergence`.
        temperature: as in `top_k_divergence`.

    Returns:
        Nats per position and layer; negative if restoring the layer alone does harm.

    Cost: a forward pass of the student for every layer and two more, by one program whatever
        their number.

    Source: LT2, "Linear-Time Looped Transformers", distillation section, KL-guided selection.

    Example:
        >>> from flax import nnx
        >>> from toolkit.looped import LoopedConfig, LoopedLM
        >>> teacher = LoopedLM(LoopedConfig.tiny("full full", width=16, heads=2), rngs=nnx.Rngs(0))
        >>> student = student_from(teacher, "gdn full", rngs=nnx.Rngs(1))
        >>> restoration_benefits(student, teacher, *jnp.zeros((2, 1, 5), int), top_k=4).shape
        (2,)
    """
    layers = len(teacher.config.layers)
    # Row 0 restores nothing, row l + 1 layer l.
    choices = jnp.concatenate([jnp.zeros((1, layers), bool), jnp.eye(layers, dtype=bool)])
    divergences = _divergences(
        student, teacher, choices, inputs, targets, top_k=top_k, temperature=temperature
    )
    return np.asarray(divergences[0] - divergences[1:])


def kl_guided(benefits: Float[np.ndarray, "layers"], restored: int) -> tuple[int, ...]:
    """Numbers of the layers with the largest benefits, earlier ones first among equals."""
    order = np.argsort(-np.asarray(benefits), kind="stable")
    return tuple(sorted(int(layer) for layer in order[:restored]))


def uniform(layers: int, restored: int) -> tuple[int, ...]:
    """The baseline: evenly spread layers, each at the end of its share of the stack."""
    return tuple((share + 1) * layers // restored - 1 for share in range(restored))


class Either(MixingLayer):
    """One of two mixers, chosen when the program runs.

    Attributes:
        attention, replacement: the two.
        is_restored: boolean scalar, whether it is the first.
    """

    def __init__(self, attention: Any, replacement: Any, is_restored: Bool[Array, ""]):
        self.attention = attention
        self.replacement = replacement
        self.is_restored = is_restored

    def __call__(
        self, x: Float[Array, "batch time width"], *, window: int | None = None, **options: Any
    ) -> tuple[Float[Array, "batch time width"], None]:
        def attended(x):
            return self.attention(x, window=window, **options)[0]

        def mixed(x):
            return self.replacement(x, **options)[0]

        return jax.lax.cond(self.is_restored, attended, mixed, x), None


@functools.partial(jax.jit, static_argnames=("top_k", "temperature"))
def _divergences(student, teacher, choices, inputs, targets, *, top_k, temperature):
    wanted = teacher(inputs)

    def divergence(choice):
        either = {
            layer: Either(teacher.blocks[layer].mixer, student.blocks[layer].mixer, choice[layer])
            for layer in new_layers(student, teacher)
        }
        # The teacher's configuration, for its windows by loop, which apply to kept layers too.
        made = with_mixers(student, either, teacher.config)(inputs)
        each = top_k_divergence(wanted, made, top_k=top_k, temperature=temperature)
        return mean_where_asked(each, targets)

    return jax.lax.map(divergence, choices)
