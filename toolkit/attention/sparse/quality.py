"""How good a selection is: the mass it recovered, the error of its output, what it had to read.

With I the selected tokens and T the rest, p_I the mass of I in the whole softmax, o_I and o_T what
attention to each gives:

    o_I - o = (1 - p_I) (o_I - o_T)        |o_I - o| <= 2 (1 - p_I) max |v|
    KL(p restricted to I || p) = -log p_I  and their total variation is 1 - p_I
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from toolkit._checks import checked


@checked
def recovered_mass(
    selected_lse: Float[Array, "..."], full_lse: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Share of the whole softmax that the selected tokens hold.

        p_I = exp(L_I - L)

    Args:
        selected_lse: logarithm of the sum of exponentials over the selection [...], as `attend`
            and `decode_step` return it.
        full_lse: likewise over all tokens, of the same shape.

    Returns:
        Shares between 0 and 1 [...].

    Example:
        >>> recovered_mass(jnp.log(jnp.array([1.0])), jnp.log(jnp.array([4.0]))).tolist()
        [0.25]
    """
    if selected_lse.shape != full_lse.shape:
        raise ValueError(
            f"full_lse must have the shape of selected_lse {selected_lse.shape}; "
            f"got {full_lse.shape}."
        )
    return jnp.exp(selected_lse - full_lse)


@checked
def output_error(out: Float[Array, "..."], exact: Float[Array, "..."]) -> Float[Array, ""]:
    """Error of outputs relative to the exact ones, both in root mean square.

        sqrt( sum |o_I - o|^2 / sum |o|^2 )

    Args:
        out: outputs of sparse attention [...].
        exact: outputs of attention to everything, of the same shape.

    Returns:
        One number; 0 for equal outputs.

    Example:
        >>> output_error(jnp.array([3.0]), jnp.array([2.0])).tolist()
        0.5
    """
    if out.shape != exact.shape:
        raise ValueError(f"exact must have the shape of out {out.shape}; got {exact.shape}.")
    return jnp.sqrt(jnp.square(out - exact).sum() / jnp.square(exact).sum())
