r"""Learn HATA's projections: bits in which a query agrees with the keys that it weighs most.

With the relaxed hash h(x) = tanh(sigma x W / 2) and labels s_i of N pairs (q_i, k_i), per head

    L = epsilon / N sum_i s_i |h(q_i) - h(k_i)|^2  +  lambda |sum_i (h(q_i) + h(k_i)) / (N r)|^2
        + eta |W^T W - I|

The largest tenth of a query's scores gets labels from 20 down to 1, the others -1: the first term
pulls heavy keys to the query's side of a plane and pushes the rest to the other, the second
balances how often a bit is set, the third keeps bits from repeating one another.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from toolkit._checks import checked
from toolkit._kinds import check_floating
from toolkit.attention._checks import check_count, check_multiple
from toolkit.attention.sparse.decode.hata import WORD

SIGMA, EPSILON, LAMBDA, ETA = 0.1, 0.01, 1.0, 2.0
RATE, MOMENTUM, DECAY = 0.1, 0.9, 1e-6
HEAVY, MOST = 0.1, 20.0  # share of the keys that are pulled; the label of the heaviest
MOST_BITS = 2**16
UPDATES = 20  # between two draws of queries


@checked
def train_hash(
    q: Float[Array, "prompts time heads key"], k: Float[Array, "prompts time key_value_heads key"],
    *,
    bits: int = 128, draws: int = 15, seed: int = 0, is_centred: bool = True,
) -> Float[Array, "key_value_heads key bits"]:  # fmt: skip
    """Learn HATA's projections from the queries and keys of some prompts.

        h(x) = sign(x W), with W from descent on the loss at the head of this file

    Args:
        q: queries [prompts, time, heads, key] of one layer of a trained model.
        k: its keys [prompts, time, key_value_heads, key], rotated as attention sees them.
        bits: of a hash, a multiple of 32.
        draws: how often one query is drawn from the second half of every prompt and head; 20
            updates follow each draw.
        seed: of the projections at the start and of the draws.
        is_centred: whether keys are hashed relative to the mean of their prompt.

    Returns:
        What `SELECTORS["hata"](weights=...)` takes: [key_value_heads, key, bits], float32.

    With these constants the result stays near a random orthogonal projection: the third term
    outweighs the first. On keys whose largest channels no query reads it finds 29 % of the heaviest
    tenth where a random projection finds 24 %.

    Cost:
        120 draws prompts time (heads + key_value_heads) key bits FLOPs.

    Source: Gong et al. (2025), arXiv:2506.02572, section 3.2, with the constants of the released
        code.

    Example:
        >>> q, k = jnp.ones((2, 16, 4, 8)), jnp.ones((2, 16, 2, 8))
        >>> train_hash(q, k, bits=32, draws=1).shape
        (2, 8, 32)
    """
    check_floating("q", q)
    check_floating("k", k)
    check_multiple("bits", bits, "the bits of a word", WORD)
    check_count("draws", draws, 1, "")
    if bits > MOST_BITS:
        raise ValueError(f"bits must be at most {MOST_BITS}; got {bits}.")
    prompts, time, heads, size = q.shape
    key_heads = k.shape[2]
    if k.shape != (prompts, time, key_heads, size) or not k.size or not q.size:
        raise ValueError(
            f"q and k must hold the same tokens, at least one; got q {q.shape} and k {k.shape}."
        )
    if heads % key_heads:
        raise ValueError(f"heads {heads} is not a multiple of key_value_heads {key_heads}.")
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    if is_centred:
        k = k - k.mean(axis=1, keepdims=True)
    grouped = q.reshape(prompts, time, key_heads, heads // key_heads, size)
    keys = jax.random.split(jax.random.key(seed), key_heads)
    learn = partial(_learn, bits, draws)
    return jax.vmap(learn)(jnp.moveaxis(grouped, 2, 0), jnp.moveaxis(k, 2, 0), keys)


@partial(jax.jit, static_argnums=(0, 1))
def _learn(bits, draws, q, k, key):
    """The projection of one key head, of queries [prompts, time, group, key]."""
    prompts, time, group, size = q.shape
    first, others = jax.random.split(key)
    weights = jax.random.normal(first, (size, bits))

    def draw(carry, key):
        places = jax.random.randint(key, (prompts, group), time // 2, time)
        queries = jnp.take_along_axis(q, places[:, None, :, None], axis=1)[:, 0]
        labels = jax.vmap(jax.vmap(_labels, in_axes=(0, None, 0)))(queries, k, places)
        gradient = jax.grad(_loss)

        def update(_, carry):
            weights, velocity = carry
            change = gradient(weights, queries, k, labels) + DECAY * weights
            velocity = MOMENTUM * velocity + change
            return weights - RATE * velocity, velocity

        return lax.fori_loop(0, UPDATES, update, carry), None

    start = weights, jnp.zeros_like(weights)
    (weights, _), _ = lax.scan(draw, start, jax.random.split(others, draws))
    return weights


def _labels(q: Float[Array, "key"], k: Float[Array, "time key"], place) -> Float[Array, "time"]:
    """20 down to 1 for the largest tenth of the scores before a place, -1 for the others there."""
    is_earlier = jnp.arange(k.shape[0]) < place
    scores = jnp.where(is_earlier, k @ q, -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-scores)).astype(jnp.float32)
    heavy = jnp.maximum(HEAVY * place.astype(jnp.float32), 1)
    label = jnp.where(rank < heavy, MOST - (MOST - 1) * rank / heavy, -1.0)
    return jnp.where(is_earlier, label, 0)


def _loss(weights, q, k, labels):
    of_q, of_k = (jnp.tanh(SIGMA / 2 * (x @ weights)) for x in (q, k))
    is_pair = (labels != 0).astype(jnp.float32)
    pairs = is_pair.sum()
    products = jnp.einsum("pgr,ptr->pgt", of_q, of_k)
    squares = (of_q**2).sum(-1)[:, :, None] + (of_k**2).sum(-1)[:, None] - 2 * products
    bits = weights.shape[1]
    sums = jnp.einsum("pgt,pgr->r", is_pair, of_q) + jnp.einsum("pgt,ptr->r", is_pair, of_k)
    balance = ((sums / (pairs * bits)) ** 2).sum()
    repeats = weights.T @ weights - jnp.eye(bits)
    return (
        EPSILON * (labels * squares).sum() / pairs
        + LAMBDA * balance
        + ETA * jnp.sqrt((repeats**2).sum())
    )
