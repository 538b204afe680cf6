"""What every row of the table of compressors states."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import Array

Payload = tuple[Array, ...]


@dataclass(frozen=True)
class Compressor:
    """One way to write a vector of n numbers in fewer bytes.

    Attributes:
        name: with its parameters, such as "int4=64".
        encode: (x [n], key) -> payload.
        decode: (payload, n, key) -> x' [n]; only a compressor with a shared key reads the key.
        payload_bytes: n -> bytes of a payload, padding included.
        contraction: n -> the largest share of |x|^2 that is certain to be sent, or None.
        variance: n -> bound of E|x' - x|^2 / |x|^2 of an unbiased compressor, or None.
        source: the paper.
        is_linear: whether payloads may be summed as they are; the key is then the same everywhere.
        is_sparse: whether some numbers are sent as they are, and the others not at all.
        start: of a linear one with two messages, (n, key) -> what all replicas share at first.
        reduced: of the same, (x, shared, mean) -> (mean of x', payload); its last array is shared
            in the next step.
        of_columns: of a compressor of matrices, columns -> the row for matrices with so many.

    Example:
        >>> row = COMPRESSORS["int8"](64)
        >>> row.payload_bytes(4096)
        4352
        >>> row.decode(row.encode(jnp.arange(3.0), jax.random.key(0)), 3, None).shape
        (3,)
    """

    name: str
    encode: Callable[[Array, Any], Payload]
    decode: Callable[[Payload, int, Any], Array]
    payload_bytes: Callable[[int], int]
    contraction: Callable[[int], float] | None
    variance: Callable[[int], float] | None
    source: str
    is_linear: bool = False
    is_sparse: bool = False
    start: Callable[[int, Any], Array] | None = None
    reduced: Callable[[Array, Array, Callable], tuple[Array, Payload]] | None = None
    of_columns: Callable[[int], "Compressor"] | None = None

    def __str__(self) -> str:
        return self.name
