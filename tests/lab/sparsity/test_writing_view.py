"""A text written with a small cache: what is read is softmax on what the system keeps."""

import numpy as np
import pytest
from tiers import by_night

pytest.importorskip("anywidget")

from toolkit.lab.sparsity.writing import EVICTING, SYSTEMS, TEXT, WritingPanel, step, written

WORDS = tuple(TEXT.split())


# They compile a step of every system.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("system", by_night(set(SYSTEMS.values()) - {"h2o"}, SYSTEMS.values()))
def test_what_is_read_is_softmax_on_what_is_kept(system):
    programs = step._cache_size()
    weights, full = written(WORDS, system, 6, 6)
    for row in range(6, len(WORDS)):
        read = weights[row] > 0
        wanted = np.where(read, full[row], 0) / full[row][read].sum()
        np.testing.assert_allclose(weights[row], wanted, atol=1e-5)
        assert read.sum() <= 6 + (system == "quest")  # whole pages
        assert read[row]
    np.testing.assert_allclose(written(WORDS, system, 24, 6)[0], full, atol=1e-5)
    assert step._cache_size() == programs + 1  # whatever the budget
    was_lost = [
        set(np.flatnonzero(weights[row - 1, :row] == 0)) & set(np.flatnonzero(weights[row]))
        for row in range(7, len(WORDS))
    ]
    # What H2O and TOVA evicted never comes back; what a system only leaves unread does.
    if system in ("h2o", "tova"):
        assert not any(was_lost)
    if system in ("oracle", "quest"):
        assert any(was_lost)


def test_the_player_crosses_out_what_is_gone_and_its_word_is_the_caption_s():
    panel = WritingPanel(system="tova", budget=4, prompt=4)
    assert panel.view.system in EVICTING
    now = panel.player.scene["grids"][0]["values"][12]
    assert now.count(None) == 13 - 4
    assert now[13] > 100  # not yet written
    panel.player.time = 9.5
    assert panel.token == 10
    assert f"“{WORDS[9]}” (word 10)" in panel.view.sentence()
