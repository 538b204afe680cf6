"""Classes of sequence lengths with little padding, and even parts.

Source: Wang et al., "FlexSP: Accelerating large language model training via flexible sequence
parallelism", ASPLOS 2025 (arXiv:2412.01523), section 4.
"""

from collections.abc import Sequence

import numpy as np

from toolkit._checks import checked

MOST_SEQUENCES, MOST_TOKENS, MOST_BUCKETS = 4096, 1 << 40, 64


@checked
def bucket_lengths(lengths: Sequence[int], buckets: int) -> list[tuple[int, int]]:
    """Divide lengths into classes that minimise the padding to each class's longest.

        padded[i, b] = min_j padded[j, b - 1] + sum over lengths j..i of (longest - length)

    Args:
        lengths: tokens of each sequence.
        buckets: largest number of classes.

    Returns:
        (longest length, number of sequences) of each class, shortest first.

    Cost: O(buckets * sequences^2) additions.

    Source: FlexSP, 2025, section 4 (sequence bucketing).

    Example:
        >>> bucket_lengths([1, 2, 3, 10, 11, 12, 50], 3)
        [(3, 3), (12, 3), (50, 1)]
    """
    check_lengths(lengths)
    if not 1 <= buckets <= MOST_BUCKETS:
        raise ValueError(f"buckets: got {buckets}, wanted 1 to {MOST_BUCKETS}")
    ordered = np.sort(np.asarray(lengths, np.int64))
    size, sums = len(ordered), np.concatenate([[0], np.cumsum(ordered)])
    padded = np.where(np.arange(size + 1) == 0, 0, np.inf)
    cuts = []
    for _ in range(min(buckets, size)):
        best, cut = padded.copy(), np.arange(size + 1)
        for end in range(1, size + 1):
            start = np.arange(end)
            total = padded[:end] + ordered[end - 1] * (end - start) - (sums[end] - sums[:end])
            if total.min() < best[end]:
                best[end], cut[end] = total.min(), total.argmin()
        padded = best
        cuts.append(cut)
    ends, end = [], size
    for cut in reversed(cuts):
        if cut[end] < end:
            ends.append((int(ordered[end - 1]), int(end - cut[end])))
        end = int(cut[end])
    return ends[::-1]


@checked
def divide_evenly(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Divide sequences, longest first, into consecutive parts with the smallest possible maximum.

    Parts are the micro-batches of a step: similar lengths, which need similar groups, come
    together.

    Args:
        lengths: tokens of each sequence.
        parts: largest number of parts.

    Returns:
        The indices of each part's sequences.

    Source: FlexSP, 2025, section 4 (sequence blaster).

    Example:
        >>> [len(part) for part in divide_evenly([9, 8, 7, 6, 5, 4, 3, 2, 1], 3)]
        [2, 2, 5]
    """
    check_lengths(lengths)
    if not 1 <= parts <= MOST_SEQUENCES:
        raise ValueError(f"parts: got {parts}, wanted 1 to {MOST_SEQUENCES}")
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])

    def divided(most: int) -> list[list[int]]:
        found, room = [[]], most
        for index in order:
            if lengths[index] > room:
                found.append([])
                room = most
            found[-1].append(index)
            room -= lengths[index]
        return found

    low, high = max(lengths), sum(lengths)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(divided(middle)) <= parts else (middle + 1, high)
    return divided(low)


def check_lengths(lengths: Sequence[int]) -> None:
    """Refuse lengths that are not valid numbers of tokens, or too many of them."""
    if not 1 <= len(lengths) <= MOST_SEQUENCES:
        raise ValueError(f"lengths: got {len(lengths)} of them, wanted 1 to {MOST_SEQUENCES}")
    for length in lengths:
        is_whole = isinstance(length, int | np.integer) and not isinstance(length, bool)
        if not is_whole or not 1 <= length <= MOST_TOKENS:
            raise ValueError(f"lengths: got {length!r}, wanted whole numbers, 1 to {MOST_TOKENS}")
