"""Documents of different lengths packed into rows of one length."""

import bisect
from collections.abc import Iterable

import numpy as np

from toolkit._checks import checked
from toolkit.training.data.sources import CorpusError

PADDING = -1


@checked
def pack_documents(
    documents: Iterable[np.ndarray], time: int
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Pack whole documents into rows, longest first, each into the fullest row with room.

        inputs = a b c | x y | -       segment_ids = 1 1 1 | 2 2 | 0
        targets = b c d | y z | -1     (documents a b c d and x y z, time 6)

    With the segment ids, a model computes the same for every document as for the document alone.
    Documents of more than time + 1 tokens are cut into pieces that share one token, so that every
    token except the first is predicted once; documents of one token are left out.

    Args:
        documents: whole numbers [length], each a document.
        time: tokens per row.

    Returns:
        (inputs, targets, segment_ids) of each row, int32 [time]; unused places have input 0,
        target -1 and segment 0. A source for `record_batches`.

    Raises:
        CorpusError: when no document has two tokens.

    Cost: O(n log n) for n documents. Best fit decreasing needs at most 11/9 of the fewest rows, +
        4.

    Source: Johnson, "Near-optimal bin packing algorithms", 1973.

    Example:
        >>> import numpy as np
        >>> (row,) = pack_documents([np.array([5, 6, 7]), np.array([1, 2, 3, 4])], time=6)
        >>> [part.tolist() for part in row]
        [[1, 2, 3, 5, 6, 0], [2, 3, 4, 6, 7, -1], [1, 1, 1, 2, 2, 0]]
    """
    if time < 1:
        raise ValueError(f"time: got {time}, wanted at least 1")
    pieces = [piece for document in documents for piece in _pieces(document, time)]
    if not pieces:
        raise CorpusError("documents: got none of two tokens, wanted at least one")
    pieces.sort(key=len, reverse=True)
    rows: list[list[np.ndarray]] = []
    rooms: list[tuple[int, int]] = []  # (room, row), least room first
    for piece in pieces:
        size = len(piece) - 1
        best = bisect.bisect_left(rooms, (size, -1))
        if best == len(rooms):
            rows.append([])
            room, row = time, len(rows) - 1
        else:
            room, row = rooms.pop(best)
        rows[row].append(piece)
        bisect.insort(rooms, (room - size, row))
    return [_row(pieces, time) for pieces in rows]


def _pieces(document: np.ndarray, time: int) -> Iterable[np.ndarray]:
    document = np.asarray(document)
    if document.ndim != 1 or not np.issubdtype(document.dtype, np.integer):
        raise ValueError(
            f"documents: got one of {document.dtype}{list(document.shape)}, wanted whole numbers "
            "[length]"
        )
    return (document[at : at + time + 1] for at in range(0, len(document) - 1, time))


def _row(pieces: list[np.ndarray], time: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    inputs, segments = np.zeros(time, np.int32), np.zeros(time, np.int32)
    targets, at = np.full(time, PADDING, np.int32), 0
    for number, piece in enumerate(pieces, start=1):
        end = at + len(piece) - 1
        inputs[at:end], targets[at:end], segments[at:end] = piece[:-1], piece[1:], number
        at = end
    return inputs, targets, segments
