"""Documents packed into rows: none lost, none cut needlessly, few rows."""

import itertools

import numpy as np
import pytest

from toolkit.training import CorpusError, pack_documents


def test_every_pair_of_tokens_is_in_one_row_once():
    rng = np.random.default_rng(0)
    documents = [np.arange(n) + 100 * n for n in rng.integers(1, 40, 200)]
    rows = pack_documents(documents, 16)
    pairs = sorted(
        (int(i), int(t)) for row in rows for i, t in zip(row[0], row[1], strict=True) if t >= 0
    )
    wanted = sorted((int(i), int(t)) for doc in documents for i, t in itertools.pairwise(doc))
    assert pairs == wanted
    assert len(rows) <= 1.1 * len(wanted) / 16 + 1
    for inputs, targets, segments in rows:
        assert ((targets >= 0) == (segments > 0)).all()
        joined = segments[1:] == segments[:-1]
        assert (targets[:-1][joined] == np.where(segments[1:] > 0, inputs[1:], -1)[joined]).all()


@pytest.mark.parametrize(
    ("documents", "time", "error", "word"),
    [
        ([np.arange(3)], 0, ValueError, "time"),
        ([np.ones((2, 2), int)], 4, ValueError, "documents"),
        ([np.ones(3)], 4, ValueError, "documents"),
        ([np.arange(1)], 4, CorpusError, "documents"),
    ],
)
def test_what_cannot_be_packed_is_refused(documents, time, error, word):
    with pytest.raises(error, match=word):
        pack_documents(documents, time)
