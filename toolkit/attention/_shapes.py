"""Names for what token mixers share: plural for a sequence, singular for one token.

The axes in these names, and what stands behind the shapes, are what `@checked` holds arguments
against.
"""

from typing import Annotated, Literal

from jaxtyping import Array, Float, Int

from toolkit._annotations import AtLeast, Between, Multiple, PowerOfTwo, SameDtype

TOKENS = SameDtype("q, k and v")
GROUPED_VALUES = Multiple("value_heads", "heads", "the heads of v", "the heads of q and k")
GROUPED_QUERIES = Multiple("heads", "key_value_heads", "the heads of q", "the heads of k and v")
LOG_DECAY = Between("a natural-log decay", -float("inf"), 0.0)
STRENGTH = Between("a writing strength", 0.0, 2.0)
TIME_STEP = Between("a time step", 0.0, float("inf"))
SHARE = Between("a share to erase", 0.0, 1.0)

TokenCount = Annotated[int, AtLeast(1, " token")]  # how many: of a block, in a window

Queries = Annotated[Float[Array, "batch time heads key"], TOKENS]
Keys = Annotated[Float[Array, "batch time heads key"], TOKENS]
Values = Annotated[Float[Array, "batch time value_heads value"], TOKENS, GROUPED_VALUES]
HeadValues = Annotated[Float[Array, "batch time heads value"], TOKENS]
# Of grouped queries: fewer heads than q has.
SharedKeys = Annotated[Float[Array, "batch time key_value_heads key"], TOKENS, GROUPED_QUERIES]
SharedValues = Annotated[Float[Array, "batch time key_value_heads value"], TOKENS]
# Of another sequence than the queries.
OtherKeys = Annotated[Float[Array, "batch key_time key_value_heads key"], TOKENS, GROUPED_QUERIES]
OtherValues = Annotated[Float[Array, "batch key_time key_value_heads value"], TOKENS]

# Of a cache that keeps one row per token.
HeldKeys = Annotated[Float[Array, "batch key_value_heads capacity key"], TOKENS, GROUPED_QUERIES]
HeldQueries = Annotated[Float[Array, "batch heads capacity key"], TOKENS]
HeldValues = Annotated[Float[Array, "batch key_value_heads capacity value"], TOKENS]

# Gates have one number per head, or one per channel; per value head unless their names say so.
Gates = Float[Array, "batch time value_heads"]
LogDecays = Annotated[Float[Array, "batch time value_heads"], LOG_DECAY]
Strengths = Annotated[Float[Array, "batch time value_heads"], STRENGTH]
TimeSteps = Annotated[Float[Array, "batch time value_heads"], TIME_STEP]
KeyGates = Float[Array, "batch time value_heads key"]
KeyLogDecays = Annotated[Float[Array, "batch time value_heads key"], LOG_DECAY]
ValueGates = Float[Array, "batch time value_heads value"]
HeadGates = Float[Array, "batch time heads"]
HeadLogDecays = Annotated[Float[Array, "batch time heads"], LOG_DECAY]
HeadKeyGates = Float[Array, "batch time heads key"]
HeadKeyLogDecays = Annotated[Float[Array, "batch time heads key"], LOG_DECAY]
HeadKeyShares = Annotated[Float[Array, "batch time heads key"], SHARE]
SharedStrengths = Annotated[Float[Array, "batch time key_value_heads"], STRENGTH]
SegmentIds = Int[Array, "batch time"]  # the document number of each token

Query = Annotated[Float[Array, "batch heads key"], TOKENS]
Key = Annotated[Float[Array, "batch heads key"], TOKENS]
Value = Annotated[Float[Array, "batch value_heads value"], TOKENS, GROUPED_VALUES]
HeadValue = Annotated[Float[Array, "batch heads value"], TOKENS]
SharedKey = Annotated[Float[Array, "batch key_value_heads key"], TOKENS, GROUPED_QUERIES]
SharedValue = Annotated[Float[Array, "batch key_value_heads value"], TOKENS]

Gate = Float[Array, "batch value_heads"]
LogDecay = Annotated[Float[Array, "batch value_heads"], LOG_DECAY]
Strength = Annotated[Float[Array, "batch value_heads"], STRENGTH]
TimeStep = Annotated[Float[Array, "batch value_heads"], TIME_STEP]
KeyGate = Float[Array, "batch value_heads key"]
KeyLogDecay = Annotated[Float[Array, "batch value_heads key"], LOG_DECAY]
ValueGate = Float[Array, "batch value_heads value"]
HeadGate = Float[Array, "batch heads"]
HeadLogDecay = Annotated[Float[Array, "batch heads"], LOG_DECAY]
HeadKeyGate = Float[Array, "batch heads key"]
HeadKeyLogDecay = Annotated[Float[Array, "batch heads key"], LOG_DECAY]
HeadKeyShare = Annotated[Float[Array, "batch heads key"], SHARE]
SharedStrength = Annotated[Float[Array, "batch key_value_heads"], STRENGTH]

State = Float[Array, "batch value_heads key value"]
HeadState = Float[Array, "batch heads key value"]
Outputs = tuple[Values, State]
Output = tuple[Value, State]

# How a recurrent mixer runs, and in chunks of how many tokens.
Form = Literal["xla", "scan", "pallas"]
StepForm = Literal["xla", "pallas"]
Chunk = Annotated[int, PowerOfTwo(16)]

LONG = 2048


def known(size: int) -> int:
    """A size; `LONG` where a program is exported for any (`jax.export.symbolic_shape`).

    For choices between forms and sizes of tiles: each of them is right for every size.
    """
    return size if isinstance(size, int) else LONG
