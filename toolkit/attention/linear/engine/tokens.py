"""What mixers hand to the engine, and the engine to the kernels."""

from typing import NamedTuple

from jaxtyping import Array, Float


class Tokens(NamedTuple):
    """What runs through time: the arrays (q, k, v, *others) of a rule's action, and the decay.

    The tokens of a sequence; those of one step have no axis `time`. Queries and keys may have fewer
    heads than values: each serves as many heads in a row (`own_keys`).
    """

    arrays: tuple[Float[Array, "batch time heads *size"], ...]
    g: Float[Array, "batch time heads channels"]  # log-decay; channels is 1 or key
    scale: Float[Array, ""]  # of the outputs
