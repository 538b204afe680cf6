"""Stage 1: every new mixer learns to imitate the attention it replaces.

All mixers read the teacher's residual stream, so that their inputs do not depend on how well the
others have learnt, and all learn in one pass.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit._checks import checked
from toolkit.conversion.student import new_layers, with_mixers
from toolkit.looped.loops.rows import check_tokens
from toolkit.looped.mixing.layer import MixingLayer
from toolkit.looped.model import LoopedLM, run_blocks


@checked
def alignment_losses(
    student: LoopedLM, teacher: LoopedLM, tokens: Int[Array, "batch time"]
) -> Float[Array, "loops new_layers"]:
    """The distance of each new mixer from the teacher's attention, on the teacher's residual
    stream.

        loss[tau, l] = mean over positions and channels of (Student_l(x) - Attention_l(x))^2
        x            = RMSNorm_l(h), h the teacher's stream before layer l in loop tau

    Only the student's new mixers run, so no other parameter gets a gradient.

    Args:
        student: made by `student_from`.
        teacher: its teacher.
        tokens: whole numbers below the vocabulary.

    Returns:
        float32 mean squares, one for every loop and every layer whose mixer is new.

    Cost: the teacher's forward pass and the student's new mixers.

    Source: LT2, "Linear-Time Looped Transformers", distillation section, stage 1.

    Example:
        >>> from flax import nnx
        >>> from toolkit.looped import LoopedConfig, LoopedLM
        >>> teacher = LoopedLM(LoopedConfig.tiny("full full", width=16, heads=2), rngs=nnx.Rngs(0))
        >>> student = student_from(teacher, "gdn full", rngs=nnx.Rngs(1))
        >>> alignment_losses(student, teacher, jnp.zeros((1, 5), int)).shape
        (1, 1)
    """
    check_tokens(tokens, teacher.config.vocabulary)
    new = new_layers(student, teacher)
    pairs = (Beside(teacher.blocks[layer].mixer, student.blocks[layer].mixer) for layer in new)
    both = with_mixers(teacher, dict(zip(new, pairs, strict=True)))
    injected, _ = run_blocks(both.prelude, both.embedding(tokens))
    # `Beside` returns its loss in place of a cache.
    places = (None,) * len(both.blocks)

    def body(tau, h, row):
        return both.loop(h, *row, tau=tau, injected=injected, caches=places)

    _, losses = both.run_loops(body, both.start(injected), remat=teacher.config.remat)
    return jnp.array([[loop[layer] for layer in new] for loop in losses])


class Beside(MixingLayer):
    """Two mixers on one input: the output is the first one's; the second is compared with it.

    Attributes:
        heard: its output goes into the residual stream.
        compared: the mean square of its difference is returned in place of a cache.
    """

    def __init__(self, heard: Any, compared: Any):
        self.heard = heard
        self.compared = compared

    def __call__(
        self, x: Float[Array, "batch time width"], *, window: int | None = None, **options: Any
    ) -> tuple[Float[Array, "batch time width"], Float[Array, ""]]:
        wanted, _ = self.heard(x, window=window, **options)
        made, _ = self.compared(x, **options)
        error = made.astype(jnp.float32) - wanted.astype(jnp.float32)
        return wanted, jnp.mean(jnp.square(error))
