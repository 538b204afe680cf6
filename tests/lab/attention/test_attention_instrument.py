"""The three panels of the attention instrument, driven from Python as the notebook drives them."""

import pytest

pytest.importorskip("ipywidgets")

from toolkit.bench.mixers import layer_costs as measurement
from toolkit.bench.mixers.layer_costs import DECODE, MIXER_NAMES, PREFILL
from toolkit.lab.attention import instrument
from toolkit.lab.attention.cost_curves import Machine
from toolkit.lab.attention.instrument import CostPanel


@pytest.fixture(autouse=True)
def _known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("this machine, AMD EPYC, rates measured here", 1e11, 1e10, 4)
    monkeypatch.setattr(instrument, "this_machine", lambda: machine)


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
    pieces_of_panel = panel.pieces()
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
    assert panel._footnote.get_window_extent().x1 < panel.picture.figure.bbox.x1
    panel.heads = 3
    assert panel.view.measured == ()
    panel.heads = 2
    assert panel.view.measured == points
    panel.measure()
    assert "already measured" in panel.page.job.message


@pytest.mark.slow
def test_nothing_is_timed_when_a_mixer_is_wrong(monkeypatch) -> None:
    monkeypatch.setattr(measurement, "TOLERANCE", -1.0)
    panel = CostPanel(heads=1, head_size=32, window=32)
    with pytest.raises(ValueError, match="prefill' and 'its reference' disagree"):
        panel.measure()
    assert panel.points == {}
