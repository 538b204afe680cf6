"""Sentences of lessons that hold a number or a comparison, beside what the package computes."""

import math

import numpy as np
import pytest

from toolkit.attention import mixer
from toolkit.lab.lessons.catalogue import load_outline
from toolkit.lab.lessons.subjects.attention_memory import CHANNELS, _recall_errors

OF_ITS_SIZE = 0.1


def test_work_of_a_gated_delta_net_doubles_with_chunks_of_one_length_only():
    answer = load_outline("attention_cost").question("doubling").answer()
    row = mixer("gdn")
    sizes = (8, 64, 64)
    here = row.forward_flops(1, 8192, *sizes) / row.forward_flops(1, 4096, *sizes)
    fixed = row.forward_flops(1, 8192, *sizes, chunk=64) / row.forward_flops(
        1, 4096, *sizes, chunk=64
    )
    assert fixed == 2
    assert here > 2.1
    assert f"grows {here:.3g} times here" in answer.words


def test_a_sum_of_pairs_errs_by_half_at_a_quarter_of_its_channels_and_by_all_at_as_many():
    errors = _recall_errors()
    for pairs, words in ((CHANNELS // 4, 0.5), (CHANNELS, 1.0)):
        assert errors[pairs - 1] == pytest.approx(words, abs=OF_ITS_SIZE)
        assert errors[pairs - 1] == pytest.approx(
            math.sqrt((pairs - 1) / CHANNELS), abs=OF_ITS_SIZE
        )
    assert np.all(np.diff(errors) > -OF_ITS_SIZE)
