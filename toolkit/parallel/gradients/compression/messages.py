"""What one exchange encodes, with its keys and what it remembers, hop by hop."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from toolkit.parallel.gradients.compression.compressor import Compressor, Payload
from toolkit.parallel.gradients.compression.feedback import Feedback, Memory

Rows = Float[Array, "parts length"]


class Messages:
    """The messages of one exchange on one device.

    Each hop encodes rows anew. With feedback each has a memory of its own, so that what all devices
    have not sent yet is the sum over hops.

    Attributes:
        compressor: of all hops.
        kept: the memories after the hops so far.
    """

    def __init__(
        self, compressor: Compressor, feedback: Feedback | None, key: Array, device: Array | int,
        memories: Sequence[Memory] = (),
    ) -> None:  # fmt: skip
        self.compressor = compressor
        self.kept: list[Memory] = []
        self._feedback, self._memories = feedback, memories
        self._shared, self._own = key, jax.random.fold_in(key, device)
        self._hop = 0

    def encode(self, rows: Rows) -> Payload:
        """The payloads of the rows, each array with a leading axis of rows."""
        length, keys = rows.shape[1], self._keys(len(rows))
        hop, self._hop = self._hop, self._hop + 1
        encode = jax.vmap(self.compressor.encode)
        if self._feedback is None:
            return encode(rows, keys)
        given, memory = self._feedback.given(
            rows, load(self._feedback, self._memories[hop], length)
        )
        payload = encode(given, keys)
        sent = jax.vmap(self.compressor.decode, (0, None, 0))(payload, length, keys)
        self.kept.append(store(self._feedback, self._feedback.kept(given, sent, memory)))
        return payload

    def decode(self, payload: Payload, length: int) -> Rows:
        """The rows of payloads, in float32."""
        keys = self._keys(len(payload[0]))
        return jax.vmap(self.compressor.decode, (0, None, 0))(payload, length, keys)

    def reduced(self, rows: Rows, mean: Callable[[Array], Array]) -> Rows:
        """The mean of one row per device, by sums of payloads of a linear compressor."""
        row, length = self.compressor, rows.shape[1]
        if row.start is None or row.reduced is None:
            return self.decode(jax.tree.map(mean, self.encode(rows)), length)
        shared, given, feedback = row.start(length, self._shared), rows, self._feedback
        memory: Memory = ()
        if feedback is not None:
            *own, last = self._memories[0]
            given, memory = feedback.given(rows, load(feedback, tuple(own), length))
            shared = jnp.where(jnp.any(last != 0), last, shared)  # zeros: nothing was sent yet
        found, payload = row.reduced(given[0], shared, mean)
        if feedback is not None:
            kept = store(feedback, feedback.kept(given, found[None], memory))
            self.kept.append((*kept, payload[-1]))
        return found[None]

    def _keys(self, rows: int) -> Array:
        if self.compressor.is_linear:  # the same places everywhere
            return jnp.broadcast_to(self._shared, (rows,))
        return jax.vmap(lambda row: jax.random.fold_in(self._own, row))(
            self._hop * 2**16 + jnp.arange(rows)
        )


def load(feedback: Feedback, stored: Memory, length: int) -> Memory:
    """A memory as rows of float32."""
    if feedback.storage is None:
        return stored
    decode = jax.vmap(feedback.storage.decode, (0, None, None))
    return (decode(stored, length, None),)


def store(feedback: Feedback, memory: Memory) -> Memory:
    """A memory as it is kept between steps."""
    if feedback.storage is None:
        return memory
    return jax.vmap(feedback.storage.encode, (0, None))(memory[0], None)
