"""Batches that every host reads for its own devices, from data too large for one host.

Which records make up a batch is a function of (seed, step, row), and no host asks what the others
read: the order of the data depends neither on the number of hosts nor on the mesh, and a resumed
run needs to know its step, which every checkpoint holds, and nothing else.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from toolkit._checks import check_fields, checked
from toolkit.training.data.sources import CorpusError

MOST_ROWS = 1 << 20
_TURNS = 4
_FEW = 256  # a Feistel network with few bits would favour some orders


@dataclass(frozen=True)
class HostBatches:
    """Batches read on the host, step by step, by `fit`; made by `token_batches`, `record_batches`.

    A train step over them is built with `sample=HostBatches.sample`.

    Attributes:
        read: (step, row) -> one record, a pytree of arrays of the same shapes every time.
        batch: rows per batch.
        sharding: sharding of the rows; None for the default device.

    Example:
        >>> import numpy as np
        >>> batches = HostBatches(lambda step, row: np.int32(10 * step + row), batch=2)
        >>> block = batches.block(7, steps=1)
        >>> HostBatches.sample(block, 7).tolist()
        [70, 71]
    """

    read: Callable[[int, int], Any]
    batch: int
    sharding: NamedSharding | None = None

    def __post_init__(self):
        check_fields(self)
        if not 1 <= self.batch <= MOST_ROWS:
            raise ValueError(f"batch must lie in 1..{MOST_ROWS}, got {self.batch}")

    def block(self, step: int, steps: int, most_steps: int | None = None) -> dict[str, Any]:
        """The data of `steps` updates from `step` on, padded to `most_steps` for one program.

        Every process reads the rows on its own devices, once each.
        """
        most = steps if most_steps is None else most_steps
        rows = sorted({row for part in self._parts() for row in part})
        records = {row: [self._leaves(step + ahead, row) for ahead in range(steps)] for row in rows}
        first, structure = records[rows[0]][0]

        def on_devices(position: int, like: np.ndarray) -> Array:
            shape = (most, self.batch, *like.shape)

            def part(index: Any) -> np.ndarray:
                here = range(self.batch)[index[1]]
                block = np.zeros((most, len(here), *like.shape), like.dtype)
                for column, row in enumerate(here):
                    for ahead, (leaves, _) in enumerate(records[row]):
                        block[ahead, column] = self._same(leaves[position], like, step + ahead, row)
                return block

            if self.sharding is None:
                return jnp.asarray(part((slice(None), slice(None))))
            spec = PartitionSpec(None, *self.sharding.spec)
            sharding = NamedSharding(self.sharding.mesh, spec)
            return jax.make_array_from_callback(shape, sharding, part)

        leaves = [on_devices(position, like) for position, like in enumerate(first)]
        return {"first": np.int32(step), "batches": jax.tree.unflatten(structure, leaves)}

    @staticmethod
    def sample(block: dict[str, Any], step: Int[Array, ""] | int) -> Any:
        """The batch of one step out of a block; traceable."""
        return jax.tree.map(lambda leaf: leaf[step - block["first"]], block["batches"])

    def _parts(self) -> list[range]:
        if self.sharding is None:
            return [range(self.batch)]
        indices = self.sharding.addressable_devices_indices_map((self.batch,)).values()
        return [range(self.batch)[index[0]] for index in indices if index is not None]

    def _leaves(self, step: int, row: int) -> tuple[list[np.ndarray], Any]:
        leaves, structure = jax.tree.flatten(self.read(step, row))
        return [np.asarray(leaf) for leaf in leaves], structure

    @staticmethod
    def _same(leaf: np.ndarray, like: np.ndarray, step: int, row: int) -> np.ndarray:
        if leaf.shape != like.shape or leaf.dtype != like.dtype:
            raise CorpusError(
                f"row {row} of step {step} is {leaf.dtype}{list(leaf.shape)}, the first of its "
                f"block {like.dtype}{list(like.shape)}; records must be alike (pack or pad them)"
            )
        return leaf


@checked
def token_batches(
    tokens: np.ndarray, *,
    seed: int, batch: int, time: int, sharding: NamedSharding | None = None,
    vocabulary: int | None = None,
) -> HostBatches:  # fmt: skip
    """Windows of a token array, possibly on disk (`np.load(path, mmap_mode="r")`).

        start = hash(seed, step, row) mod (size - time)
        inputs = tokens[start : start + time],  targets = tokens[start + 1 : start + time + 1]

    Args:
        tokens: whole numbers [size], of any integer type.
        seed: which sequence of batches.
        batch: windows per batch.
        time: tokens per window.
        sharding: sharding of the rows of a batch.
        vocabulary: tokens must be less; None for no limit.

    Returns:
        `HostBatches` of (inputs, targets), both int32 [batch, time].

    Raises:
        CorpusError: when the text is shorter than one window and its next token and, while reading,
            when a token is outside of the vocabulary.

    Cost: Each host reads batch * (time + 1) / hosts tokens per step.

    Example:
        >>> import numpy as np
        >>> data = token_batches(np.arange(100, dtype=np.uint16), seed=0, batch=2, time=5)
        >>> inputs, targets = HostBatches.sample(data.block(0, steps=1), 0)
        >>> inputs.shape, bool((targets == inputs + 1).all())
        ((2, 5), True)
    """
    if time < 1:
        raise ValueError(f"time must be at least 1, got {time}")
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"tokens: got {tokens.dtype}{list(tokens.shape)}, wanted whole numbers [size]"
        )
    if len(tokens) <= time:
        raise CorpusError(
            f"time: got {time}, and {len(tokens)} tokens hold no such window and the next"
        )

    def read(step: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        start = drawn(f"{seed}/{step}/{row}") % (len(tokens) - time)
        return window(tokens, start, time, vocabulary)

    return HostBatches(read, batch, sharding)


def window(
    tokens: np.ndarray, start: int, time: int, vocabulary: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and targets from `start` on; an error where a token is outside of the
    vocabulary."""
    found = np.asarray(tokens[start : start + time + 1]).astype(np.int64)
    limit = 1 << 31 if vocabulary is None else vocabulary
    if found.min() < 0 or found.max() >= limit:
        worst = found.max() if found.max() >= limit else found.min()
        raise CorpusError(f"token {worst} near {start} is not in [0, {limit}), the vocabulary")
    return found[:-1].astype(np.int32), found[1:].astype(np.int32)


@checked
def record_batches(
    source: Any, *,
    seed: int, batch: int, sharding: NamedSharding | None = None, is_shuffled: bool = True,
) -> HostBatches:  # fmt: skip
    """Records of any random-access source: a list, an array, a `grain` source or MapDataset.

        number = step * batch + row;   record = source[permutation_{seed, epoch}(number mod size)]

    Every epoch, number // size, has its own permutation, uniform over all orders for up to 256
    records; for more, nothing is kept in memory. `grain` transformations (parsing, tokenising,
    packing) run on the host that needs the record. Streams without random access
    (`grain.IterDataset`) are refused, because hosts cannot divide them without communication.

    Args:
        source: has `len(source)` and `source[index]`, a pytree of arrays of the same shapes every
            time, such as int32 [time + 1].
        seed: of the permutations.
        batch: records per batch.
        sharding: sharding of the rows of a batch.
        is_shuffled: False for the source's own order, for instance of a shuffled MapDataset.

    Returns:
        `HostBatches` of the records' pytree, every array [batch, ...].

    Raises:
        CorpusError: when the source is empty and, while reading, when a record is unlike the
            others.

    Cost: Each host reads batch / hosts records per step.

    Example:
        >>> import numpy as np
        >>> data = record_batches([np.arange(3), np.arange(3) + 10], seed=0, batch=2)
        >>> sorted(HostBatches.sample(data.block(0, steps=1), 0)[:, 0].tolist())
        [0, 10]
    """
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise ValueError(
            f"source: got {type(source).__name__}, wanted one with len(source) and source[index], "
            "such as a list, a grain data source or a grain.MapDataset"
        )
    if (size := len(source)) < 1:
        raise CorpusError("source: got an empty one")

    def read(step: int, row: int) -> Any:
        epoch, index = divmod(step * batch + row, size)
        return source[permuted(index, size, f"{seed}/{epoch}") if is_shuffled else index]

    return HostBatches(read, batch, sharding)


def permuted(index: int, size: int, key: str) -> int:
    """The image of an index under a keyed permutation of 0..size-1.

    For few records every order is equally likely. For many, a Feistel network of four rounds
    permutes the smallest 4^k >= size, and is repeated while the image exceeds the size.
    """
    if size <= _FEW:
        return _drawn_order(size, key)[index]
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        left, right = index >> half, index & ((1 << half) - 1)
        for turn in range(_TURNS):
            mixed = drawn(f"{key}/{turn}/{right}") & ((1 << half) - 1)
            left, right = right, left ^ mixed
        index = left << half | right
        if index < size:
            return index


@functools.lru_cache(maxsize=64)
def _drawn_order(size: int, key: str) -> list[int]:
    """A whole permutation (Fisher and Yates): each place is swapped with an equal or earlier
    one."""
    order = list(range(size))
    for place in range(1, size):
        other = drawn(f"{key}/{place}") % (place + 1)
        order[place], order[other] = order[other], order[place]
    return order


def drawn(key: str) -> int:
    """A number of 64 bits, as if drawn, that depends on the key alone."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
