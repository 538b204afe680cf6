"""What looping can add: state transitions, permutations, receptive fields.

A delta-rule correction multiplies a head's state by M = (I - beta k k^T) Diag(e^g); several
corrections per token multiply it by their product. Two designs differ in this:

* `gated_delta_product` forms the product: n corrections per token in one state, a change of rank n.
* Looped layers that start every loop from an empty state, as `LoopedLM`'s do, never form it. The
  state of a loop makes one correction per token, and loops speak through the residual stream only.
  For them the rank is only an upper bound on what T corrections could do.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from toolkit._checks import checked
from toolkit.looped.config import LoopedConfig
from toolkit.looped.mixing import LAYERS


@checked
def effective_transition(
    keys: Float[Array, "steps key"],
    beta: Float[Array, "steps"],
    log_decay: Float[Array, "steps key"] | None = None,
) -> Float[Array, "key key"]:
    """The matrix by which a token's successive corrections multiply the state.

        A = M_T ... M_2 M_1,    M_i = (I - beta_i k_i k_i^T) Diag(e^(g_i))

    A differs from the product of the decays alone by a matrix of rank at most T, and for unit keys
    det A = prod_i (1 - beta_i) e^(sum g_i): below beta = 1 no number of steps makes a reflection.

    Args:
        keys: [steps, key] the keys k_i, of unit length.
        beta: [steps] writing strengths; 1 erases, 2 reflects.
        log_decay: [steps, key] natural log-decays g_i <= 0; None for no decay.

    Returns:
        The matrix A [key, key]; the state becomes A S plus what is written.

    Cost: 4 steps key^2 FLOPs.

    Source: Siems et al., "DeltaProduct", 2025, section 3; LT2, section on linear mixers. The
        decay comes before the correction, as in Kimi Linear's code and LT2's table of mixers.

    Example:
        >>> keys, beta = permutation_steps([1, 0])
        >>> effective_transition(jnp.asarray(keys), jnp.asarray(beta)).round(3)
        Array([[0., 1.],
               [1., 0.]], dtype=float32)
    """
    if keys.ndim != 2 or beta.shape != keys.shape[:1]:
        raise ValueError(
            f"keys {keys.shape} and beta {beta.shape} do not fit; they must be [steps, key] and "
            "[steps]."
        )
    if log_decay is not None and log_decay.shape != keys.shape:
        raise ValueError(f"log_decay has shape {log_decay.shape}, keys {keys.shape}: unequal.")
    transition = jnp.eye(keys.shape[1], dtype=keys.dtype)
    for step, (key, strength) in enumerate(zip(keys, beta, strict=True)):
        if log_decay is not None:
            transition = jnp.exp(log_decay[step])[:, None] * transition
        transition = transition - strength * jnp.outer(key, key @ transition)
    return transition


@checked
def permutation_steps(
    permutation: Sequence[int],
) -> tuple[Float[np.ndarray, "steps size"], Float[np.ndarray, "steps"]]:
    """Keys and strengths whose corrections permute the rows of a state.

        I - 2 e e^T,  e = (e_i - e_j) / sqrt(2),  exchanges rows i and j

    A permutation of n rows with c cycles is n - c exchanges and no fewer, because each changes
    the identity by rank one. The steps left over, up to n - 1, have strength 0.

    Args:
        permutation: row i moves to row permutation[i].

    Returns:
        Keys [n - 1, n] of unit length and strengths [n - 1], each 2 or 0, float64; the arguments
        of `effective_transition`, or of a token of `gated_delta_product` with values 0.

    Source: Grazzi et al., "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues",
        2024; Siems et al., "DeltaProduct", 2025.

    Example:
        >>> keys, beta = permutation_steps([2, 0, 1])
        >>> keys.shape, beta.tolist()
        ((2, 3), [2.0, 2.0])
    """
    size = len(permutation)
    if size < 2 or sorted(permutation) != list(range(size)):
        raise ValueError(
            f"permutation is {list(permutation)}; it must hold 0 to n - 1 once each, n at least 2."
        )
    keys, beta = np.eye(size)[: size - 1], np.zeros(size - 1)
    wanted, order, step = np.argsort(permutation), list(range(size)), 0
    for row in range(size):
        other = order.index(wanted[row])
        if other != row:
            keys[step] = (np.eye(size)[row] - np.eye(size)[other]) / np.sqrt(2)
            beta[step] = 2.0
            order[row], order[other] = order[other], order[row]
            step += 1
    return keys, beta


@checked
def tokens_reached(config: LoopedConfig) -> int | None:
    """The receptive field of a position in a looped model, in tokens, including itself.

        1 + sum over loops and layers of (window - 1), prelude and coda included

    A window of w tokens includes the token itself, so T loops of one layer reach T (w - 1) + 1
    tokens, not T w.

    Args:
        config: the model.

    Returns:
        The number, or None if any layer sees the whole past.

    Source: LT2, section on sparse mixers, with the token itself counted.

    Example:
        >>> tokens_reached(LoopedConfig.tiny("window window", loops=4))  # 64 tokens each
        505
    """
    windows = [window for loop in config.loop_windows for window in loop]
    for word in (*config.prelude_layers, *config.coda_layers):
        windows.append(LAYERS[word].window_of(config))
    return None if None in windows else 1 + sum(window - 1 for window in windows if window)


@checked
def influence_bound(distance: int, window: int, layers: int, residual_share: float) -> float:
    """Upper bound on the weight of a token in another, `distance` later, after windowed averaging.

        h <- a h + (1 - a) average over the window,   `layers` times
        weight <= C(layers, m) (1 - a)^m,   m = ceil(distance / (window - 1))

    At least m layers must look back. LT2 estimates (1 - a)^m and concludes a horizon of about 1.5
    windows (weight 0.01 at a = 0.95) for any number of loops; that counts only one of the C(layers,
    m) paths and holds only while layers (1 - a) << 1.

    Args:
        distance: tokens from the source to the position looked at, 0 or more.
        window: tokens each layer sees, the current one included, at least 2.
        layers: windowed layers passed: physical layers times loops.
        residual_share: a, the share of a layer's input in its output, in [0, 1].

    Returns:
        The bound; 0 beyond the reach layers * (window - 1).

    Source: LT2, appendix on the effective reach of windows, for the estimate.

    Example:
        >>> influence_bound(distance=6, window=4, layers=2, residual_share=0.5)
        0.25
    """
    if distance < 0 or window < 2 or layers < 1 or not 0 <= residual_share <= 1:
        raise ValueError(
            f"distance {distance}, window {window}, layers {layers}, residual_share "
            f"{residual_share}: they must be >= 0, >= 2, >= 1 and in [0, 1]."
        )
    looks = -(-distance // (window - 1))
    return min(1.0, math.comb(layers, looks) * (1 - residual_share) ** looks)
