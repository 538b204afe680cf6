"""The suite of serving: engine and transformers write the same texts, or nothing is timed."""

import pytest

from toolkit.bench.serving import OURS, PEER, serving_case, trace


@pytest.mark.slow
@pytest.mark.oracle
def test_every_contender_writes_the_same_texts_and_another_text_is_noticed():
    case = serving_case(trace(4), 32, 1, "small", width=32)
    results = {name: call() for name, call in case.contenders.items()}
    case.check(results)
    assert PEER in results
    assert [len(text) for text in results[OURS]] == [entry.output for entry in trace(4)]
    assert len({tuple(text[:3]) for text in results[OURS]}) > 1
    results[PEER][1][2] += 1
    with pytest.raises(ValueError, match="at token 2 of 1"):
        case.check(results)
