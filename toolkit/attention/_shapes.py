"""Names for the shapes that token mixers share: plural for a sequence, singular for one token.

The axes in these names are also what `check_shapes` holds the arrays against.
"""

from jaxtyping import Array, Float, Int

Queries = Float[Array, "batch time heads key"]
Keys = Float[Array, "batch time heads key"]
Values = Float[Array, "batch time value_heads value"]
Gates = Float[Array, "batch time value_heads"]  # one number per head
ChannelGates = Float[Array, "batch time value_heads key"]  # one number per key channel
SegmentIds = Int[Array, "batch time"]  # the number of the document that each token belongs to

Query = Float[Array, "batch heads key"]
Key = Float[Array, "batch heads key"]
Value = Float[Array, "batch value_heads value"]
Gate = Float[Array, "batch value_heads"]
ChannelGate = Float[Array, "batch value_heads key"]

State = Float[Array, "batch value_heads key value"]
Outputs = tuple[Values, State]
Output = tuple[Value, State]
