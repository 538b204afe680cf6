"""What the instruments of serving show, held against the runs that they show."""

import itertools

import numpy as np
import pytest

pytest.importorskip("anywidget")

from toolkit.lab.serving import gantt, knee
from toolkit.lab.serving.knee import PAGE, POLICIES, served

TIGHT = {"pages": 128, "slots": 32}


@pytest.mark.parametrize(("policy", "evicts"), [("chunks", True), ("pools", False)])
def test_lanes_and_pages_are_those_of_the_run(policy, evicts):
    run = served(policy, 60.0, 60, evicts=evicts, **TIGHT)
    for number, own in enumerate(gantt.spans(run, 60)):
        request = run.requests[number]
        # Without gaps, from arrival to the last token, and every token is in a bar.
        assert own[0].start == pytest.approx(request.arrival)
        assert own[-1].end == request.times[-1]
        assert all(a.end == b.start for a, b in itertools.pairwise(own))
        wrote = sum(span.tokens for span in own if span.kind == gantt.WRITES)
        reads = sum(span.tokens for span in own if span.kind == gantt.READ)
        again = sum(number in turn.evicted for turn in run.turns)
        assert wrote + 1 + again == request.entry.output
        assert (reads > request.entry.prompt) == (again > 0)
        assert again == sum(span.kind == gantt.EVICTED for span in own)
    assert evicts == any(turn.evicted for turn in run.turns)
    end = max(turn.end for turn in run.turns)
    cells = gantt.page_map(run, TIGHT["pages"], end)
    times = (np.arange(cells.shape[2]) + 0.5) / cells.shape[2] * end
    for turn in run.turns:
        for column in np.flatnonzero((times > turn.start) & (times < turn.end)):
            filled = (cells[turn.instance, :, column] > 0).mean()
            assert filled == pytest.approx(turn.used / PAGE / TIGHT["pages"], abs=0.02)


def test_a_stall_is_seen_where_prompts_go_first_and_in_no_chunks():
    def stalled(policy):
        own = gantt.spans(served(policy, 40.0, 60), 24)
        return sum(s.end - s.start for spans in own for s in spans if s.kind == gantt.STALLS)

    assert stalled("first") > 0.5 > 0.0 == stalled("chunks")


def test_the_knee_is_where_the_share_falls():
    assert knee.knee([1.0] * len(knee.LOADS)) == knee.LOADS[-1]
    assert knee.knee([0.5] * len(knee.LOADS)) == 0.0
    falling = [1.0, 1.0, 0.8, *[0.1] * (len(knee.LOADS) - 3)]
    assert knee.knee(falling) == pytest.approx((knee.LOADS[1] + knee.LOADS[2]) / 2)
    panel = knee.GoodputPanel()
    assert panel.slots == 16
    by_gap = panel.view.knees
    assert by_gap["pools"] < by_gap["chunks"] / 2
    panel.gap = "per_token"
    # A mean hides the stalls of prompts first, and nothing of a chunk.
    assert panel.view.knees["first"] > 1.3 * by_gap["first"]
    panel.count = 120
    assert not panel.view.shares
    assert "press the button" in panel.view.sentence()
    assert next(panel.pieces())[:2] == (0, len(POLICIES) * len(knee.LOADS))
