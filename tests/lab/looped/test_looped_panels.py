"""The two panels on looped models, driven from Python and by their sliders."""

import numpy as np
import pytest
from panel_moves import assert_quick_update
from tiers import by_night

pytest.importorskip("ipywidgets")

from toolkit.figures.axes import round_up
from toolkit.lab.looped.panel import LoopPanel
from toolkit.lab.looped.reader import MAX_LOOPS, PATTERNS
from toolkit.lab.looped.state import LoopStatePanel

BINARY = (1, 1.5, 2), 2

# Together they compute for longer than the first tier has time.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("pattern", by_night({"full full", "window window"}, PATTERNS.values()))
@pytest.mark.parametrize(
    ("kind", "control", "values"),
    [
        (LoopPanel, "token", range(20, 32)),
        (LoopPanel, "window", range(2, 50)),  # more than are remembered
        (LoopPanel, "loops", [3, 4, 5]),
        (LoopStatePanel, "token", range(20, 32)),
        (LoopStatePanel, "loops", [3, 4, 5, 6, 7, 8]),
    ],
)
@pytest.mark.timed
def test_a_warm_update_is_quick(kind, control: str, values, pattern: str) -> None:
    assert_quick_update(kind(pattern=pattern), control, values)


def test_the_red_line_stands_where_the_reach_ends() -> None:
    panel = LoopPanel(pattern="window window", window=4, token=30, loops=4)
    influence = panel._plots[0]
    x, y = influence.edge.get_data()
    np.testing.assert_array_equal(x[::2], [29 + 1 - reach - 0.5 for reach in (7, 13, 19, 25)])
    assert (y[0], y[-1]) == (0, 1)
    words = [words.get_text().strip() for words in influence.edge_words]
    assert words == ["7", "13", "19", "25", *[""] * 4]
    panel.window = 5  # the fourth loop reaches the start
    assert [bool(words.get_text()) for words in influence.edge_words] == [True] * 3 + [False] * 5
    panel.pattern = "full full"
    assert np.isnan(influence.edge.get_xdata()).all()


def test_what_the_notebook_says_of_its_first_panel() -> None:
    panel = LoopPanel(pattern="window window", window=8)
    assert panel.view.reach == (15, 29, 43, 57)
    assert set(np.diff(panel.view.reach)) == {14}
    used = [panel.view.distance(loop) + 1 for loop in range(4)]
    assert max(used) < 8
    assert set(np.diff(used)) == {0, 1}
    panel.text = "The class"
    assert [best[0][0] for best in panel.view.best] == ["e", "e", "␣", "␣"]


def test_the_map_is_the_view_and_beyond_the_reach_it_is_empty() -> None:
    panel = LoopPanel(pattern="window window", window=4, token=30, loops=3)
    shown = panel._plots[0].matrix.get_array()
    share = panel.view.share
    data = panel.data()
    rows = [row for row, what in enumerate(data["what"]) if what == "share of influence"]
    np.testing.assert_array_equal([data["loop 2"][row] for row in rows], share[1])
    assert (
        data["loop 3"][data["what"].index("loss of the text, nats per byte")] == panel.view.loss[2]
    )
    likeliest = data["what"].index("likeliest next byte")
    assert tuple(data["loop 3"][likeliest : likeliest + 2]) == panel.view.best[2][0]
    np.testing.assert_array_equal(shown.mask, share == 0)
    visible = (share > 1e-5) & ~shown.mask
    np.testing.assert_allclose(shown[visible], np.log10(share[visible]), rtol=1e-6)
    assert panel.view.chances.shape[0] == panel.view.loss.shape[0] == 3


@pytest.mark.parametrize("loops", [1, MAX_LOOPS])
def test_any_number_of_loops_fills_the_picture(loops: int) -> None:
    panel = LoopPanel(loops=loops)
    influence = panel._plots[0]
    assert influence.matrix.get_array().shape[0] == loops
    assert tuple(influence.matrix.get_extent())[2:] == (1, 0)
    assert sum(bool(name.get_text()) for name in influence.names) == loops
    states = LoopStatePanel(loops=loops)
    assert len(states._plots[0].lines["size of h"].get_xdata()) == loops


def test_the_second_panel_follows_the_first() -> None:
    panel = LoopPanel(loops=3)
    states = LoopStatePanel().follow(panel)
    panel.change(pattern="gdn full", text="some other text", token=5)
    slider = panel.page.controls["loops"].inputs[0]
    slider.value = 6
    assert panel.state.items() <= states.state.items()
    recurrent = states._plots[1]
    assert recurrent.lines["state, layer 1"].get_xdata().size == 6
    states.pattern = "full full"  # its own menus still move it alone
    assert (states.pattern, panel.pattern) == ("full full", "gdn full")
    assert recurrent.nothing.get_text()


def test_a_text_that_surprises_stretches_the_axis_of_the_loss() -> None:
    panel = LoopPanel()
    axes = panel._plots[3].axes
    before = axes.get_xlim()[1]
    panel.text = "~~~#### zqzqzq @@@@ 0x7f %%%"
    assert axes.get_xlim()[1] > max(before, panel.view.loss.max())


def test_errors_stay_under_the_panel_and_the_picture_stays() -> None:
    panel = LoopPanel()
    png = panel.png
    (box,) = panel.page.controls["text"].inputs
    box.value = "x"
    assert "wanted at least two bytes" in panel.error
    assert panel.png == png
    box.value = "xy"
    assert panel.error == ""
    with pytest.raises(ValueError, match="pattern: got 'gdn gdn'"):
        panel.pattern = "gdn gdn"


def test_the_token_slider_is_as_long_as_the_text() -> None:
    for panel in (LoopPanel(), LoopStatePanel()):
        panel.text = "eleven text"
        assert panel.page.controls["token"].inputs[0].max == 11


@pytest.mark.parametrize(
    ("value", "wanted", "others"),
    [(0.03, 0.05, ()), (1.0, 1.0, ()), (51, 100, ()), (5, 6, BINARY), (8, 8, BINARY)],
)
def test_limits_move_in_coarse_steps(value: float, wanted: float, others: tuple) -> None:
    assert round_up(value, *others) == pytest.approx(wanted)
