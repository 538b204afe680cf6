"""Stages 2 and 3: the student's predictions approach the teacher's, after every loop.

The teacher's distribution teaches more than the next token; its few likeliest tokens hold nearly
all of the mass.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit._checks import checked
from toolkit.looped.model import LoopedLM


@checked
def top_k_divergence(
    teacher_logits: Float[Array, "... vocabulary"], student_logits: Float[Array, "... vocabulary"],
    *,
    top_k: int, temperature: float = 1.0,
) -> Float[Array, "..."]:  # fmt: skip
    """Forward KL divergence on the teacher's likeliest tokens.

        KL(p || q) = sum_{i in top-k of the teacher} p_i (log p_i - log q_i)
        p, q       = softmax of the teacher's, the student's logits / temperature over these k

    Args:
        teacher_logits: determine the k tokens.
        student_logits: of the same positions.
        top_k: tokens compared, at most the vocabulary.
        temperature: above 1 flattens both distributions.

    Returns:
        Nats per position, at least 0 up to rounding.

    Source: LT2, "Linear-Time Looped Transformers", distillation section, stage 2.

    Example:
        >>> logits = jnp.array([2.0, 1.0, 0.0])
        >>> float(top_k_divergence(logits, logits, top_k=2))
        0.0
    """
    vocabulary = teacher_logits.shape[-1]
    if not 1 <= top_k <= vocabulary:
        raise ValueError(f"top_k is {top_k}; it must lie in 1..{vocabulary}, the vocabulary.")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be positive.")
    wanted, tokens = jax.lax.top_k(teacher_logits, top_k)
    made = jnp.take_along_axis(student_logits, tokens, axis=-1)
    log_p = jax.nn.log_softmax(wanted / temperature)
    log_q = jax.nn.log_softmax(made / temperature)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


@checked
def loop_weights(
    progress: Float[Array, ""] | float, loops: int, supervision: tuple[float, float]
) -> Float[Array, "loops"]:
    """The weight of each loop's divergence at some point of the training.

        w = s / T + (1 - s) e_T                        (sums to 1; e_T is the last loop alone)
        s = progress / rise    before `rise`,   1 between,   0 from `end` on

    Supervision of every loop is warmed up, becomes uniform, and is then replaced by the last loop
    alone. (0, 1) is uniform throughout, (0, 0) uses the last loop throughout.

    Args:
        progress: 0 at the first step, towards 1 at the last; may be traced.
        loops: T.
        supervision: `rise` and `end`, shares of the training.

    Returns:
        Weights of the loops, in order.

    Source: LT2, distillation section: "warm-up of per-loop supervision, uniform, final loop only";
        its lengths and the shape of the warm-up are not published.

    Example:
        >>> loop_weights(0.5, 4, (0.1, 0.7))
        Array([0.25, 0.25, 0.25, 0.25], dtype=float32)
    """
    rise, end = supervision
    if not 0 <= rise <= end <= 1:
        raise ValueError(f"supervision is {supervision}; wanted 0 <= rise <= end <= 1.")
    share = jnp.where(progress < rise, progress / max(rise, jnp.finfo(jnp.float32).tiny), 1.0)
    share = jnp.where(progress < end, share, 0.0)
    return share / loops + (1 - share) * jax.nn.one_hot(loops - 1, loops)


def divergence_by_loop(
    student: LoopedLM, teacher: LoopedLM, inputs: Int[Array, "batch time"],
    targets: Int[Array, "batch time"], *,
    top_k: int, temperature: float = 1.0,
) -> Float[Array, "loops"]:  # fmt: skip
    """Mean `top_k_divergence` of the predictions after each loop."""
    _, wanted = teacher(inputs, return_loops=True)
    _, made = student(inputs, return_loops=True)

    @jax.checkpoint
    def divergence(hidden):
        of_teacher, of_student = hidden
        each = top_k_divergence(
            teacher.head(of_teacher), student.head(of_student), top_k=top_k, temperature=temperature
        )
        return mean_where_asked(each, targets)

    return jax.lax.map(divergence, (wanted, made))


def mean_where_asked(
    values: Float[Array, "batch time"], targets: Int[Array, "batch time"]
) -> Float[Array, ""]:
    """Mean over the positions that have a target."""
    asked = targets >= 0
    return jnp.sum(jnp.where(asked, values, 0)) / jnp.maximum(jnp.sum(asked), 1)
