"""The rule: which margins make a claim seen, contradicted or not shown."""

import numpy as np
import pytest

from toolkit.experiments import Claim, MissingResultError, Results, above, below


@pytest.mark.parametrize(
    ("margins", "word"),
    [
        ([1, 1, 1, 1, 1e-9], "seen"),
        ([1, 1, 1, 1, 0], "not shown"),
        # However large the mean is, one seed that disagrees decides.
        ([9, 9, 9, 9, 9, -1e-9], "not shown"),
        ([-1, -2, -1, -1, -1e-9], "contradicted"),
        ([0, 0, 0, 0, 0], "not shown"),
        ([9, 9, 9, 9], "not shown"),
        ([-9, -9, -9], "not shown"),
        ([1, 1, 1, 1, np.nan], "not shown"),
        ([], "not shown"),
    ],
)
def test_all_of_five_seeds_decide(margins, word):
    verdict = Claim("a is right", lambda results: (margins, "numbers")).verdict(Results({}))
    assert verdict.word == word
    assert verdict.seeds == len(margins)


def test_three_seeds_are_said_to_be_three():
    verdict = Claim("a is right", lambda results: ([1, -1, 1], "a 1 0 1")).verdict(Results({}))
    assert str(verdict) == (
        "not shown    a is right (3 seeds)\n             2 of 3 seeds bear it out; a 1 0 1"
    )


def test_settings_are_paired_by_seed():
    def results(**found):
        return Results({
            label: {seed: {"loss": loss} for seed, loss in runs.items()}
            for label, runs in found.items()
        })  # fmt: skip

    found = results(a={0: 1.0, 2: 5.0, 1: 3.0}, b={1: 4.0, 2: 7.0, 3: 0.0}, c={1: 9.0, 2: 6.0})
    np.testing.assert_array_equal(found.paired("loss", ["a", "b"]), [[3, 5], [4, 7]])
    margins, words = below("loss", ["a"], ["b", "c"])(found)
    np.testing.assert_array_equal(margins, [1, 1])
    assert words == "loss: a 3.00 5.00, b 4.00 7.00, c 9.00 6.00"
    np.testing.assert_array_equal(above("loss", ["b", "c"], ["a"])(found)[0], [1, 1])
    np.testing.assert_array_equal(above("loss", ["b", "a"], 4.0)(found)[0], [-1, 1])
    np.testing.assert_array_equal(below("loss", ["b", "a"], 6.0)(found)[0], [2, -1])
    with pytest.raises(MissingResultError, match="no seed has 'loss' of all of a, d"):
        results(a={0: 1.0}, d={1: 1.0}).paired("loss", ["a", "d"])
