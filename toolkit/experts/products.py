"""Forms of the experts' products: tokens and the experts of each -> an output per pair.

A form takes tokens x [tokens, width], experts [tokens, chosen] and the weights of all experts, and
returns [tokens, chosen, width] in float32. An index past the last expert belongs to another device;
its output is meaningless but finite. The forms differ in their extra computation and copies:

    dense     all experts of all tokens, masked
    gather    a copy of its expert's weights for every pair; right for the few tokens of a step
    padded    pairs by expert, in blocks of 128; a copy of the weights for every block
    ragged    `jax.lax.ragged_dot`; on a CPU it would compute every expert for every pair
    pallas    the grouped product of megablox, which is part of jax; on TPUs only
    blocks    (`blocks.py`) pairs by expert, in a loop over blocks of 16, no copies; for CPUs
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit._compat import varying_axes
from toolkit.attention.execution.derivatives import differentiable
from toolkit.attention.execution.platforms import run_on
from toolkit.attention.execution.precision import accumulator, product_precision

Activation = Callable[..., Array]
TILE = 128
PADDED_BLOCK = 128


class Weights(NamedTuple):
    """The weights of all experts or, inside a function of one expert, of one; the gate is None
    where experts have none."""

    gate: Float[Array, "*experts width hidden"] | None
    up: Float[Array, "*experts width hidden"]
    down: Float[Array, "*experts hidden width"]
    gate_bias: Float[Array, "*experts hidden"] | None = None
    up_bias: Float[Array, "*experts hidden"] | None = None
    down_bias: Float[Array, "*experts width"] | None = None


def product(x: Array, matrix: Array) -> Array:
    """x @ matrix, added up in float32 (float64 for float64)."""
    wide = accumulator(x.dtype)
    return jnp.matmul(x, matrix, precision=product_precision(x.dtype), preferred_element_type=wide)


def expert(activation: Activation, x: Array, weights: Weights, times: Callable = product) -> Array:
    """Apply an expert to rows [rows, width]: float32 [rows, width]."""

    def affine(x: Array, matrix: Array, bias: Array | None) -> Array:
        made = times(x, matrix)
        return made if bias is None else made + bias.astype(made.dtype)

    made = [affine(x, weights.up, weights.up_bias)]
    if weights.gate is not None:
        made = [affine(x, weights.gate, weights.gate_bias), *made]
    return affine(activation(*made).astype(x.dtype), weights.down, weights.down_bias)


def dense(activation: Activation, x: Array, experts: Array, weights: Weights) -> Array:
    """All experts of all tokens."""
    count = weights.up.shape[0]
    # Tokens are 0 for experts that they did not choose, so that NaN does not spread between them.
    is_chosen = (experts[None] == jnp.arange(count)[:, None, None]).any(-1)
    rows = jnp.where(is_chosen[..., None], x[None], 0)
    out = jax.vmap(functools.partial(expert, activation))(rows, weights)
    return out[experts, jnp.arange(x.shape[0])[:, None]]


def gather(activation: Activation, x: Array, experts: Array, weights: Weights) -> Array:
    """A copy of its expert's weights for every pair."""
    of_pair = functools.partial(expert, activation)
    own = jax.tree.map(lambda array: array[experts], weights)
    out = jax.vmap(jax.vmap(of_pair, (None, 0)))(x[:, None], own)
    return out[..., 0, :]


class Layout(NamedTuple):
    """Pairs of a token and an expert, by expert, each expert's in whole blocks.

    Attributes:
        slots: [tokens, chosen], the slot of each pair.
        pairs: [blocks, size], the pair in each slot; the number of pairs if it is empty.
        owners: [blocks], the expert of each block.
        live: [], how many blocks hold pairs.
    """

    slots: Int[Array, "tokens chosen"]
    pairs: Int[Array, "blocks size"]
    owners: Int[Array, "blocks"]
    live: Int[Array, ""]


def layout(experts: Int[Array, "tokens chosen"], count: int, size: int) -> Layout:
    """Sort pairs by expert, those of one expert in the order of tokens, into blocks.

    A pair with expert `count` has no expert: it lies past the last block, and its output is 0.
    """
    flat, pairs = experts.ravel(), experts.size
    blocks = pairs // size + min(count, pairs)
    loads = jnp.zeros(count, jnp.int32).at[flat].add(1)
    own_blocks = -(-loads // size)
    ends = jnp.cumsum(own_blocks)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    sorted_experts = flat[order]
    rank = jnp.arange(pairs, dtype=jnp.int32) - (jnp.cumsum(loads) - loads)[sorted_experts]
    slots = (ends - own_blocks)[sorted_experts] * size + rank
    slots = jnp.where(sorted_experts < count, slots, blocks * size)
    return Layout(
        jnp.zeros(pairs, jnp.int32).at[order].set(slots).reshape(experts.shape),
        jnp.full(blocks * size, pairs, jnp.int32).at[slots].set(order).reshape(blocks, size),
        jnp.searchsorted(ends, jnp.arange(blocks), side="right").clip(0, count - 1),
        ends[-1],
    )


def rows_of(x: Array, pairs: Array, chosen: int) -> Array:
    """The tokens of some pairs; 0 for empty slots."""
    return x.at[pairs // chosen].get(mode="fill", fill_value=0)


def in_blocks(activation: Activation, x: Array, places: Layout, weights: Weights) -> Array:
    """A copy of the weights for every block, with operations that JAX differentiates."""
    own = jax.tree.map(lambda array: array[places.owners], weights)
    rows = rows_of(x, places.pairs, places.slots.shape[1])
    out = jax.vmap(functools.partial(expert, activation))(rows, own)
    return by_pair(out, places)


def by_pair(out: Array, places: Layout) -> Array:
    """The outputs of all pairs, from those of all blocks."""
    return out.reshape(-1, out.shape[-1]).at[places.slots].get(mode="fill", fill_value=0)


def padded(activation: Activation, x: Array, experts: Array, weights: Weights) -> Array:
    """Blocks of 128, and a copy of the weights for each."""
    places = layout(experts, weights.up.shape[0], PADDED_BLOCK)
    return in_blocks(activation, x, places, weights)


def ragged(activation: Activation, x: Array, experts: Array, weights: Weights) -> Array:
    """`jax.lax.ragged_dot`, on accelerators."""

    def times(sizes: Array, rows: Array, matrices: Array) -> Array:
        return jax.lax.ragged_dot(
            rows,
            matrices,
            sizes,
            precision=product_precision(rows.dtype),
            preferred_element_type=accumulator(rows.dtype),
        )

    form = functools.partial(grouped, times, 1, activation)
    branches: dict[str, Any] = {"tpu": form, "cuda": form, "rocm": form}
    why = (
        'implementation="ragged" runs on TPUs and GPUs: a CPU would compute every expert for every '
        'pair; "blocks" is the form for CPUs'
    )
    return run_on(branches, x, experts, weights, otherwise=why)


def pallas(activation: Activation, x: Array, experts: Array, weights: Weights) -> Array:
    """The grouped product of megablox; forward mode and second derivatives by `padded`."""
    if x.dtype == jnp.float64:
        raise TypeError(
            'implementation="pallas" takes float32 and bfloat16; got float64, which "dense" takes'
        )
    if varying_axes(x):
        raise NotImplementedError(
            'implementation="pallas" runs inside jax.shard_map with check_vma=False: the kernel of '
            'jax does not tell how its result varies; "padded" does'
        )
    why = 'implementation="pallas" runs on TPUs; "blocks" is the form for CPUs, "padded" for GPUs'
    return run_on(
        {"tpu": functools.partial(megablox, activation)}, x, experts, weights, otherwise=why
    )


def megablox(
    activation: Activation, x: Array, experts: Array, weights: Weights, *, interpret: bool = False
) -> Array:
    """The same on any platform, interpreted without a TPU."""
    return _megablox(activation, interpret)((x, weights), (experts,))[0]


@functools.cache
def _megablox(activation: Activation, interpret: bool) -> Callable:
    def forward(inputs: Any, context: Any) -> tuple[Array]:
        from jax.experimental.pallas.ops.tpu.megablox import gmm

        def times(sizes: Array, rows: Array, matrices: Array) -> Array:
            # The backward pass takes the same tiles for the transpose, and no size below 128 tiles
            # another: whole tiles, whose rest is masked, serve both.
            return gmm(rows, matrices, sizes, jnp.float32, (TILE,) * 3, interpret=interpret)

        (x, weights), (experts,) = inputs, context
        return (grouped(times, TILE, activation, x, experts, weights),)

    def backward(outputs: Any, inputs: Any, context: Any, d_outputs: Any, is_wanted: Any) -> Any:
        return jax.vjp(lambda inputs: forward(inputs, context), inputs)[1](d_outputs)[0]

    def equation(inputs: Any, context: Any) -> tuple[Array]:
        (x, weights), (experts,) = inputs, context
        return (padded(activation, x, experts, weights),)

    return differentiable(forward, backward, equation)


def grouped(
    times: Callable[[Array, Array, Array], Array], multiple: int, activation: Activation, x: Array,
    experts: Array, weights: Weights,
) -> Array:  # fmt: skip
    """Pairs by expert, and times(sizes, rows, matrices) for the products of all experts."""
    count = weights.up.shape[0]
    flat, chosen = experts.ravel(), experts.shape[1]
    pairs = flat.size
    order = jnp.argsort(flat, stable=True)
    # Pairs of other devices, and rows up to a multiple, come last. They belong to no expert, so
    # `times` skips them and leaves any numbers there, also in gradients: masks keep these out.
    order = jnp.concatenate([order, jnp.full(-pairs % multiple, pairs, order.dtype)])
    owners = flat.at[order].get(mode="fill", fill_value=count)
    sizes = jnp.zeros(count, jnp.int32).at[owners].add(1, mode="drop")
    sizes = sizes.at[-1].add(sizes.sum() == 0)  # no grid is empty
    is_own = (owners < count)[:, None]
    biases = {
        name: None if bias is None else bias.at[owners].get(mode="fill", fill_value=0)
        for name, bias in weights._asdict().items()
        if name.endswith("bias")
    }
    made = expert(
        activation,
        jnp.where(is_own, rows_of(x, order, chosen), 0),
        weights._replace(**biases),
        functools.partial(times, sizes),
    )
    made = jnp.where(is_own, made, 0)
    out = jnp.zeros((pairs, made.shape[1]), made.dtype).at[order].set(made, mode="drop")
    return out.reshape(*experts.shape, -1)
