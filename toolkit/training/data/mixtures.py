"""Several sources of records as one, in stated proportions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from toolkit._checks import checked
from toolkit.training.data.host_batches import drawn, permuted, window
from toolkit.training.data.sources import CorpusError

ENDLESS = 1 << 62


class TokenWindows:
    """The windows of a token array, none of which overlap: a source for `record_batches`.

        inputs_i = tokens[i time : (i + 1) time],  targets_i = tokens[i time + 1 : (i + 1) time + 1]

    So every token but the first is predicted once per epoch, where `token_batches` draws windows
    with replacement.

    Args:
        tokens: whole numbers [size], of any integer type, possibly on disk.
        time: tokens per window.
        vocabulary: tokens must be less; None for no limit.

    Example:
        >>> import numpy as np
        >>> windows = TokenWindows(np.arange(7), time=3)
        >>> len(windows), [part.tolist() for part in windows[1]]
        (2, [[3, 4, 5], [4, 5, 6]])
    """

    @checked
    def __init__(self, tokens: np.ndarray, time: int, vocabulary: int | None = None):
        if time < 1 or len(tokens) <= time:
            raise CorpusError(
                f"time: got {time}, wanted 1 or more, and {len(tokens)} tokens to hold such a "
                "window and the next token"
            )
        self.tokens, self.time, self.vocabulary = tokens, time, vocabulary

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.time

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"index: got {index}, wanted one below {len(self)}")
        return window(self.tokens, index * self.time, self.time, self.vocabulary)


class MixedSources:
    """An endless source made by `mix_sources`.

    Example:
        >>> mixed = mix_sources([["a", "b"], ["x"]], [3.0, 1.0], block=4)
        >>> sorted(mixed[i] for i in range(4)), sorted(mixed.source_of(i) for i in range(4))
        (['a', 'a', 'b', 'x'], [0, 0, 0, 1])
    """

    def __init__(self, sources: Sequence[Any], weights: np.ndarray, seed: int, block: int):
        self.sources, self.seed, self.block = sources, seed, block
        # One row: rounded alike in every block. Several: rounded up or down by chance, so that a
        # source whose share of a block is less than a record is read in some blocks.
        offsets = [drawn(f"{seed}/{row}") / 2**64 for row in range(len(weights))]
        edges = np.cumsum(weights / weights.sum(-1, keepdims=True), axis=-1)[:, :-1] * block
        edges = np.floor(edges + (0.5 if len(weights) == 1 else np.array(offsets)[:, None]))
        full = np.full((len(weights), 1), block)
        self.edges = np.concatenate([0 * full, edges.astype(int), full], axis=1)
        self.counts = np.diff(self.edges)
        self.before = np.cumsum(self.counts, axis=0) - self.counts

    def __len__(self) -> int:
        return ENDLESS

    def source_of(self, index: int) -> int:
        """The number of the source that a record comes from."""
        return self._place(index)[0]

    def __getitem__(self, index: int) -> Any:
        number, place = self._place(index)
        source = self.sources[number]
        epoch, place = divmod(place, len(source))
        return source[permuted(place, len(source), f"{self.seed}/{number}/{epoch}")]

    def _place(self, index: int) -> tuple[int, int]:
        """The source of a record, and how many of its records come before."""
        block, slot = divmod(index, self.block)
        row = min(block, len(self.counts) - 1)
        slot = permuted(slot, self.block, f"{self.seed}/{block}")
        number = int(np.searchsorted(self.edges[row], slot, side="right")) - 1
        earlier = self.before[row, number] + (block - row) * self.counts[row, number]
        return number, int(earlier + slot - self.edges[row, number])


@checked
def mix_sources(
    sources: Sequence[Any], weights: Sequence[float] | Float[np.ndarray, "*rounds sources"], *,
    seed: int = 0, block: int = 1024,
) -> MixedSources:  # fmt: skip
    """Mix sources of records so that each provides its share, for `record_batches`.

        of the records b block .. (b + 1) block - 1, source j provides w_bj block

    rounded to whole records and in an order drawn for each block. Each source is read in its own
    permutations, epoch after epoch: a record comes again when all others of its source have come,
    whatever the weights and lengths. A record is a function of (seed, index), so that a resumed run
    needs no state of the data.

    Args:
        sources: each has `len` and an index, such as a list, a `grain.MapDataset`, `TokenWindows`
            or the rows of `pack_documents`.
        weights: of each source, in any unit; or one row of weights per block, of which the last
            holds for all later blocks.
        seed: of the orders.
        block: records that divide as the weights say.

    Returns:
        An endless source, itself one for `grain.MapDataset.source`; use it unshuffled:
        `record_batches(mixed, seed=0, batch=8, is_shuffled=False)`.

    Raises:
        CorpusError: when a source is empty.
        ValueError: when weights are negative, or too small to give a record of a block.

    Cost: Some tens of microseconds per record, beside reading it.

    Example:
        >>> mixed = mix_sources([["a", "b"], ["x"]], [3.0, 1.0], block=4)
        >>> sorted(mixed[i] for i in range(4)), sorted(mixed.source_of(i) for i in range(4))
        (['a', 'a', 'b', 'x'], [0, 0, 0, 1])
    """
    if block < 1:
        raise ValueError(f"block: got {block}, wanted at least 1")
    table = np.atleast_2d(np.asarray(weights, float))
    if table.ndim != 2 or table.shape[1] != len(sources) or not len(sources) or not len(table):
        raise ValueError(
            f"weights: got an array of {list(np.shape(weights))} for {len(sources)} sources; "
            "wanted one weight per source"
        )
    if not np.isfinite(table).all() or (table < 0).any() or not table.any(axis=1).all():
        raise ValueError(f"weights: got {weights}, wanted numbers of 0 or more, and one above 0")
    for number, source in enumerate(sources):
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise ValueError(
                f"sources: got {type(source).__name__}, wanted ones with len(source) and "
                "source[index]"
            )
        if not len(source):
            raise CorpusError(f"sources: number {number} is empty")
    mixed = MixedSources(sources, table, seed, block)
    if len(table) == 1 and (lost := (table > 0) & (mixed.counts == 0)).any():
        raise ValueError(
            f"weights: {table[lost][0]:g} is less than half a record of a block of {block}; wanted "
            "0, or a larger block"
        )
    return mixed
