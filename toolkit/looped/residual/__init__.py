"""What may stand in place of a block's residual additions.

hyper_connections.py     several residual streams, mixed around every sub-layer (mHC)
attention_residuals.py   every sub-layer attends to the outputs of groups of earlier layers
messages.py              gates by which a loop reads what the loop before it left (Inkling-2)
groups.py                a learned share of the input of a group of layers
checks.py                which switches of a configuration go together

A connection is called with the state of the residual stream and returns what the sub-layer reads,
and a function from the sub-layer's output to the next state:

    read, write = connection(state);   state = write(sublayer(read))

`Connections` holds those of a block. A stack of blocks opens its state from one stream and closes
it to one, so what a loop hands to the next is one stream, however the layers within are connected.
"""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from toolkit.looped.residual.attention_residuals import AttentionResidual, Connection, Sourced
from toolkit.looped.residual.hyper_connections import HyperConnection, StreamHead, opened_streams
from toolkit.looped.residual.messages import MessageGates, Pass


class Connections(nnx.Module):
    """The connections of a block.

    Attributes:
        mixer, feed_forward: those of its two sub-layers; the second is None where there is none.
        end: what makes one stream of the state, in the last block of a stack; None elsewhere.
        gates: those that read the loop before, in looped blocks with messages; None elsewhere.
    """

    def __init__(
        self, config: Any, *, rngs: nnx.Rngs, place: int, is_last: bool, is_fed: bool, stack: str,
        queries: int = 1,
    ):  # fmt: skip
        none = nnx.data(None)
        self.mixer: Any
        self.feed_forward: Any = none
        self.end: Any = none
        self.gates: Any = none
        self.streams = config.streams
        if config.streams is not None:
            self.mixer = HyperConnection(config, rngs=rngs)
            if is_fed:
                self.feed_forward = HyperConnection(config, rngs=rngs)
            if is_last:
                self.end = StreamHead(config, rngs=rngs)
            return
        has_messages = config.message_rank is not None
        continues = has_messages and stack != "prelude"
        is_boundary = place % config.attention_residual == 0
        reads = place > 0 or continues
        how = {"is_raw": config.raw_sources}
        self.mixer = Connection(
            config.width, is_boundary=is_boundary, reads=reads, queries=queries, **how
        )
        if is_fed:
            self.feed_forward = Connection(config.width, **how)
        if is_last and (not has_messages or stack == "coda"):
            self.end = AttentionResidual(config.width, **how)
        if has_messages and stack == "blocks":
            self.gates = MessageGates(config, rngs=rngs)

    def opened(self, h: Any) -> Any:
        """The state at the start of a stack, whose first block this is."""
        if self.streams is not None:
            return opened_streams(h, self.streams)
        return h if isinstance(h, Sourced) else Sourced(h)

    def closed(self, state: Any) -> Float[Array, "... width"] | Sourced:
        """The stream at the end of a stack, whose last block this is."""
        return state if self.end is None else self.end(state)


__all__ = ["Connections", "Pass", "Sourced"]
