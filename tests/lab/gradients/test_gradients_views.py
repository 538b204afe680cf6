"""What the instruments of gradients show, held against the rooms that compute it."""

import itertools

import pytest

pytest.importorskip("anywidget")

from toolkit.experiments import load_experiment
from toolkit.lab.gradients.lanes import SEARCHES, TENSORS, lanes_view, stretches
from toolkit.lab.gradients.sent import ROWS, WIDTH, sent_view, stored_runs

SENT = {"replicas": 8, "density": 0.01, "block": 256, "link": "InfiniBand", "zipf": 1.1}
LANES = {"chips": "h100:64", "compressor": "int4", "tokens": 4096, "decisions": len(TENSORS)}
EXACT = 1e-9


def test_bytes_are_the_formulas_and_move_as_they_should():
    view = sent_view(**SENT)
    numbers = ROWS * WIDTH
    assert view.sent["dense"] == 2 * 7 / 8 * 4 * numbers
    assert view.sent["int8"] == 2 * 7 / 8 * numbers * (1 + 4 / 256)
    assert view.seconds("dense") == pytest.approx(view.sent["dense"] / 50e9)
    many = sent_view(**SENT | {"replicas": 64})
    # A gather grows with the replicas, a scatter hardly does.
    assert many.sent["largest, gathered"] > 8 * view.sent["largest, gathered"]
    assert many.sent["int8"] < 1.2 * view.sent["int8"]
    short = sent_view(**SENT | {"block": 32})
    assert short.sent["int8"] > view.sent["int8"]
    assert short.sent["sign"] == view.sent["sign"]
    assert view.ranges.max() > 3 > 1.3 > view.permuted.max()
    assert sent_view(**SENT | {"zipf": 0.0}).ranges.max() < 1.3


def test_stored_runs_are_those_of_the_record():
    settings = load_experiment("gradients").settings
    assert [label for label, *_ in stored_runs()] == [
        label for label, setting in settings.items() if setting.exchange
    ]


def test_lanes_are_those_of_the_schedule_shown():
    views = {name: lanes_view(search=name, **LANES) for name in SEARCHES}
    ends = {name: view.shown.seconds for name, view in views.items()}
    assert ends["grouped"] <= ends["best"] <= ends["greedy"] <= ends["dense"]
    for view in views.values():
        found = stretches(view.shown)
        for lane in found.values():
            assert all(a[1] <= b[0] + EXACT for a, b in itertools.pairwise(lane))
        last = max(end for lane in found.values() for _, end, _ in lane)
        assert last == pytest.approx(view.shown.seconds)
    undecided = lanes_view(search="greedy", **LANES | {"decisions": 0}).shown
    assert undecided.options() == views["dense"].shown.options()
