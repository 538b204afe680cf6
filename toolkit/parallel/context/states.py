"""Linear-time mixers over sharded time: devices exchange states.

A mixer's final state is affine in its initial state. Over the tokens of device d

    S_out = A_d S_in + B_d          A_d [key, key]; diagonal if tokens only decay and add

so every device computes A_d and B_d of its tokens, all are gathered, and device d starts from

    S_d = A_(d-1) S_(d-1) + B_(d-1),          S_0 = 0

B_d is the mixer's final state from zero, and A_d that from the identity with values of zero; one
pass over [values, zeros] computes both.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from toolkit._checks import check_choice, checked
from toolkit.attention import MIXERS, Mixer
from toolkit.attention.execution.precision import accumulator
from toolkit.parallel.axes import check_auto_axes
from toolkit.parallel.context.checks import check_cut, documents


@checked
def context_mixer(
    name: str, inputs: Sequence[Array], mesh: Mesh, *,
    axis: str = "context", batch_axis: str | tuple[str, ...] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> Float[Array, "batch time heads value"]:  # fmt: skip
    """A linear-time mixer on whole arrays whose time dimension is sharded along a mesh axis.

        S_d = A_(d-1) S_(d-1) + B_(d-1)          the state that device d starts from

    Args:
        name: a recurrent row of `toolkit.attention.MIXERS`, such as "gdn".
        inputs: its arguments in the order of the row, each [batch, time, heads, ...].
        mesh: the devices.
        axis: the mesh axis that shards time, in the order of the text.
        batch_axis: the mesh axis (or axes) that shard the batch, or None.
        segment_ids: document number of every token; consecutive equal numbers are one document.

    Returns:
        [batch, time, heads, value] in the dtype of v, sharded like the inputs.

    Cost: One all-gather forward and one reduce-scatter backward, of key (key + value) float32
        numbers per device and head, key (value + 1) if tokens only decay and add, independent of
        the length. FLOPs: the mixer, and a pass for the states with key more value channels (1
        more).

    Source: Sun et al., "LASP-2: Rethinking Sequence Parallelism for Linear Attention and Its
        Hybrid", 2025, arXiv:2502.07563, section 3.

    Example:
        >>> x = jnp.ones((1, 2 * len(jax.devices()), 3, 8))
        >>> context_mixer("linear", (x, x, x), make_mesh({"context": len(jax.devices())})).shape[2:]
        (3, 8)
    """
    recurrent = [known for known, row in MIXERS.items() if row.transition]
    check_choice("name", name, recurrent)
    row = MIXERS[name]
    if len(inputs) != len(row.inputs):
        raise ValueError(
            f"inputs: got {len(inputs)} arrays, want {len(row.inputs)}: {', '.join(row.names)}"
        )
    check_auto_axes(mesh)
    shape = inputs[0].shape
    for given, array in zip(row.inputs, inputs, strict=True):
        if array.ndim != len(given.axes) or array.shape[:2] != shape[:2]:
            raise ValueError(
                f"inputs: {given.name} has shape {array.shape}, want [{', '.join(given.axes)}] "
                f"and batch and time of {row.names[0]}, {shape[:2]}"
            )
    check_cut(shape, mesh, axis, batch_axis)

    def on_each_device(inputs: tuple[Array, ...], segments: Array | None) -> Array:
        state = entering_state(row, inputs, axis, segments)
        return row.function(*inputs, initial_state=state, segment_ids=segments)[0]

    spec = PartitionSpec(batch_axis, axis)
    return jax.shard_map(on_each_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(
        tuple(inputs), documents(segment_ids, shape[:2])
    )


def entering_state(
    row: Mixer, inputs: tuple[Array, ...], axis: str, segments: Int[Array, "batch time"] | None
) -> Float[Array, "batch heads key value"]:
    """The state before this device's first token; inside `jax.shard_map`.

    Zeros if a document begins there. NaN propagates only within its own document.
    """
    whole = lax.all_gather(_summary(row, inputs, segments), axis)
    devices, batch = whole.shape[:2]
    value = whole.shape[-1] - (1 if row.transition == "diagonal" else whole.shape[-2])
    # Per device: whether all its tokens are one document, and whether the next device continues it.
    is_one = is_joined = jnp.ones((devices, batch, 1), bool)
    if segments is not None:
        ends = lax.all_gather(segments[:, :: max(1, segments.shape[1] - 1)], axis)
        is_one = ends[..., :1] == ends[..., -1:]
        is_joined = ends[..., -1:] == jnp.roll(ends[..., :1], -1, axis=0)

    def pass_on(carry: tuple, device: tuple) -> tuple[tuple, None]:
        (state, is_faulty), (index, summary, is_one, is_joined) = carry, device
        # 0 * NaN is NaN, so non-finite values are removed before they reach other documents.
        is_finite = jnp.isfinite(summary).all((-2, -1))
        summary = jnp.where(is_finite[..., None, None], summary, 0)
        added, kept = summary[..., :value], summary[..., value:]
        if row.transition == "diagonal":
            after = kept * state + added
        else:
            after = jnp.einsum("bhij,bhjv->bhiv", kept, state, precision="highest") + added
        after = jnp.where(is_joined[..., None, None], after, 0)
        fault = is_joined & (~is_finite | (is_faulty & is_one))
        is_before = index < lax.axis_index(axis)
        return (jnp.where(is_before, after, state), jnp.where(is_before, fault, is_faulty)), None

    start = jnp.zeros_like(whole[0, ..., :value]), jnp.zeros(whole.shape[1:3], bool)
    steps = jnp.arange(devices), whole, is_one, is_joined
    (state, is_faulty), _ = lax.scan(pass_on, start, steps)
    return jnp.where(is_faulty[..., None, None], jnp.nan, state)


def _summary(
    row: Mixer, inputs: tuple[Array, ...], segments: Array | None
) -> Float[Array, "batch heads key columns"]:
    """B of this device's tokens joined with A; a diagonal A is one column."""
    by_name = dict(zip(row.names, inputs, strict=True))
    v, key = by_name["v"], by_name["q"].shape[-1]
    (batch, _, heads, *_), value, dtype = v.shape, v.shape[-1], accumulator(v.dtype)
    unit = jnp.ones((key, 1), dtype) if row.transition == "diagonal" else jnp.eye(key, dtype=dtype)
    start = jnp.concatenate([jnp.zeros((key, value), dtype), unit], axis=-1)
    # The compiler would check each of these constants for finiteness, which takes seconds.
    start = lax.optimization_barrier(jnp.broadcast_to(start, (batch, heads, *start.shape)))
    wide = (
        jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, unit.shape[1])])
        if given.axes[-1] == "value"
        else array
        for given, array in zip(row.inputs, inputs, strict=True)
    )
    return row.function(*wide, initial_state=start, segment_ids=segments)[1]
