"""The three panels of the attention instrument, driven from Python as the notebook drives them."""

import pytest
from panel_moves import quickest_update

pytest.importorskip("ipywidgets")

from toolkit.lab.attention import instrument, measurement
from toolkit.lab.attention.instrument import CostPanel, MemoryPanel
from toolkit.lab.attention.reading_panel import ReadingPanel
from toolkit.lab.attention.view import DECODE, MIXER_NAMES, PREFILL, Machine

MAX_WARM_SECONDS = 0.1


@pytest.fixture(autouse=True)
def _known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("this machine", 1e11, 1e10, 4)
    monkeypatch.setattr(instrument, "this_machine", lambda: machine)


MOVES = [
    (CostPanel, {"context_length": 1000}, {"context_length": 200_000}),
    (CostPanel, {"heads": 2}, {"heads": 40}),
    (CostPanel, {"head_size": 32}, {"head_size": 256}),
    (CostPanel, {"window": 64}, {"window": 4096}),
    (CostPanel, {"chunk": 16}, {"chunk": 256}),
    (CostPanel, {"softmax": "dense"}, {"softmax": "blockwise"}),
    (CostPanel, {"unit": "FLOP"}, {"unit": "bytes"}),
    (CostPanel, {"machine": "h100"}, {"machine": "here"}),
    (MemoryPanel, {"context_length": 1000}, {"context_length": 200_000}),
    (MemoryPanel, {"sequences": 1}, {"sequences": 64}),
    (MemoryPanel, {"bytes_per_number": 4}, {"bytes_per_number": 1}),
    (MemoryPanel, {"device": "h200"}, {"device": "h100"}),
    (ReadingPanel, {"token": 3}, {"token": 9}),
    (ReadingPanel, {"window": 2}, {"window": 20}),
    (ReadingPanel, {"keep": 0.6}, {"keep": 1.0}),
    (ReadingPanel, {"write_strength": 0.1}, {"write_strength": 0.9}),
    (ReadingPanel, {"text": "one two one"}, {"text": "three four five six"}),
]


@pytest.mark.parametrize(
    ("kind", "one", "other"), MOVES, ids=lambda x: x.__name__ if isinstance(x, type) else str(x)
)
def test_every_control_changes_the_numbers_and_the_picture(kind, one: dict, other: dict) -> None:
    panel = kind(**one)
    words, png = panel.view.table(), panel.png
    panel.change(**other)
    if "token" not in one and "machine" not in one and "device" not in one:
        assert panel.view.table() != words or panel.view.sentence() != ""
    assert panel.png != png
    assert panel._image.value == panel.png
    assert panel.png.startswith(b"\x89PNG")
    assert len(panel.png) < 140_000  # as base64 below the 200 kB a saved output may have
    panel.change(**one)
    assert panel.png == png


@pytest.mark.parametrize(
    ("kind", "control", "values"),
    [
        (CostPanel, "context_length", [256, 1024, 4096, 16384, 65536, 262144]),
        (MemoryPanel, "context_length", [256, 1024, 4096, 16384, 65536, 262144]),
        (ReadingPanel, "token", [3, 4, 5, 6, 7, 8]),
        (ReadingPanel, "keep", [0.7, 0.75, 0.8, 0.85, 0.9, 0.95]),
    ],
)
@pytest.mark.timed
def test_a_warm_update_is_quick(kind, control: str, values: list) -> None:
    assert quickest_update(kind(), control, values) < MAX_WARM_SECONDS


def test_token_slider_is_as_long_as_the_sentence() -> None:
    panel = ReadingPanel(token=12)
    slider = panel._control_widgets["token"].inputs[0]
    assert slider.max == 16
    panel.text = "only three words"
    assert slider.max == 3
    assert panel.view.token == 2
    slider.value = 1
    assert panel.view.token == 0


def test_empty_sentence_shows_its_error_and_recovers() -> None:
    panel = ReadingPanel()
    (words,) = panel._control_widgets["text"].inputs
    words.value = "  "
    assert "wanted some words" in panel.error
    words.value = "all is well"
    assert panel.error == ""


@pytest.mark.slow
def test_measure_checks_then_times_and_keeps_the_points(monkeypatch) -> None:
    panel = CostPanel(heads=2, head_size=32, window=32)
    pieces = measurement.measure_pieces
    monkeypatch.setattr(
        instrument,
        "measure_pieces",
        lambda sizes: pieces(sizes, lengths={PREFILL: (64,), DECODE: (64,)}),
    )
    png = panel.png
    pieces_of_panel = panel._measure_pieces()
    next(pieces_of_panel)  # stopped after the check: nothing is kept as measured
    pieces_of_panel.close()
    panel.measure()
    points = panel.view.measured
    assert {(p.mixer, p.phase) for p in points} == {
        (name, phase) for name in MIXER_NAMES for phase in (PREFILL, DECODE)
    }
    assert all(p.seconds > 0 and p.tokens == 64 for p in points)
    assert panel.png != png
    assert "measured here" in panel.view.footnote()
    panel.heads = 3
    assert panel.view.measured == ()
    panel.heads = 2
    assert panel.view.measured == points
    panel.measure()
    assert "already measured" in panel._job.message


@pytest.mark.slow
def test_nothing_is_timed_when_a_mixer_is_wrong(monkeypatch) -> None:
    monkeypatch.setattr(measurement, "TOLERANCE", 0.0)
    panel = CostPanel(heads=1, head_size=32, window=32)
    with pytest.raises(RuntimeError, match="nothing is timed"):
        panel.measure()
    assert panel.points == {}
