"""Drafts kept round by round: every row's text from its drafts and the dense passes."""

import pytest

from toolkit.lab.sparsity.acceptance import (
    DRAFTED,
    DRAFTS,
    LENGTH,
    OWN,
    REFUSED,
    SYSTEMS,
    acceptance_view,
    kept_by_round,
)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_row_writes_its_text_from_drafts_and_dense_passes(system):
    kept = kept_by_round(system)
    last = acceptance_view(system=system, round=len(kept))
    assert (last.written == LENGTH).all()
    assert ((kept >= -1) & (kept <= DRAFTS)).all()
    first = acceptance_view(system=system, round=1)
    tiles = first.tiles()
    assert ((tiles == DRAFTED).sum(axis=1) == kept[0]).all()
    assert ((tiles == OWN).sum(axis=1) == 2).all()
    assert ((tiles == REFUSED).sum(axis=1) == DRAFTS - kept[0]).all()
    assert (first.per_pass == kept[0] + 1).all()
    assert 1 <= last.per_pass.min() <= last.per_pass.max() <= DRAFTS + 1
