"""Names for the shapes that token mixers share: plural for a sequence, singular for one token.

The axes in these names are also what `check_shapes` holds the arrays against.
"""

from jaxtyping import Array, Float, Int

Queries = Float[Array, "batch time heads key"]
Keys = Float[Array, "batch time heads key"]
Values = Float[Array, "batch time value_heads value"]
Gates = Float[Array, "batch time value_heads"]  # one number per head
ChannelGates = Float[Array, "batch time value_heads key"]  # one number per key channel
SharedKeys = Float[Array, "batch time key_value_heads key"]  # grouped queries: fewer than q has
SharedValues = Float[Array, "batch time key_value_heads value"]
OtherKeys = Float[Array, "batch key_time key_value_heads key"]  # as many as they like
OtherValues = Float[Array, "batch key_time key_value_heads value"]
HeadValues = Float[Array, "batch time heads value"]
HeadGates = Float[Array, "batch time heads"]
SegmentIds = Int[Array, "batch time"]  # the document number of each token

Query = Float[Array, "batch heads key"]
Key = Float[Array, "batch heads key"]
Value = Float[Array, "batch value_heads value"]
Gate = Float[Array, "batch value_heads"]
ChannelGate = Float[Array, "batch value_heads key"]
SharedKey = Float[Array, "batch key_value_heads key"]
SharedValue = Float[Array, "batch key_value_heads value"]
HeadValue = Float[Array, "batch heads value"]
HeadGate = Float[Array, "batch heads"]

State = Float[Array, "batch value_heads key value"]
Outputs = tuple[Values, State]
Output = tuple[Value, State]
