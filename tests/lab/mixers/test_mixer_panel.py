"""The two panels on mixers, driven from Python and by their sliders."""

import numpy as np
import pytest
from tiers import by_night

pytest.importorskip("ipywidgets")

from toolkit.attention import mixer
from toolkit.lab.mixers.inputs import recurrent_mixers
from toolkit.lab.mixers.panel import COUNTED, MixerCostPanel, MixerPanel, decode_costs

# Together they compute for longer than the first tier has time.
pytestmark = pytest.mark.slow

EVERY = list(recurrent_mixers())


@pytest.mark.parametrize("name", by_night({*EVERY} - {"gla", "gdn", "rwkv7"}, EVERY))
def test_every_mixer_of_the_table_can_be_shown(name: str) -> None:
    panel, costs = MixerPanel(left=name), MixerCostPanel(left=name)
    title = mixer(name).title
    assert title in panel.view.sentence()
    assert title in costs.view.sentence()
    assert panel._plots[0].heading.get_text() == title
    assert panel.view.left.name == name
    (menu,) = panel.page.controls["right"].inputs
    assert name in [value for _, value in menu.options]


def test_equal_mixers_are_drawn_alike_on_equal_axes() -> None:
    plots = MixerPanel(left="gdn", right="gdn")._plots
    left, right = plots[:3], plots[3:]
    np.testing.assert_array_equal(left[0].dots.get_ydata(), right[0].dots.get_ydata())
    for one, other in zip(left, right, strict=True):
        assert one.axes.get_ylim() == other.axes.get_ylim()
        assert one.axes.get_xlim() == other.axes.get_xlim()
    np.testing.assert_array_equal(left[2].matrix.get_array(), right[2].matrix.get_array())


def test_bars_are_the_shares_and_the_span_is_the_distance() -> None:
    panel = MixerPanel(left="retention", token=12, head=2)
    plot, memory = panel._plots[1], panel.view.left
    heights = plot.bars.get_data().values[::2]
    count = len(panel.view.words)
    np.testing.assert_allclose(heights[:count], memory.share(11, 2))
    assert not heights[count:].any()
    distance = memory.distance(11, 2)
    assert plot.span_words.get_text() == f"90%: {distance} tokens back"
    assert plot.span.get_xdata()[0] == pytest.approx(11 - distance - 0.4)


def test_dots_mark_the_same_word_up_to_the_token() -> None:
    panel = MixerPanel(text="The cat, the dog and the cat", token=3)
    plot = panel._plots[4]
    assert list(plot.same.get_xdata()) == [0, 2]
    np.testing.assert_allclose(plot.same.get_ydata(), panel.view.right.share(2, 0)[[0, 2]])


def test_without_decay_a_delta_rule_alone_prefers_the_newest_of_equal_words() -> None:
    settings = {"token": 19, "head": 3, "decay_strength": 0, "write_strength": 1}
    view = MixerPanel(left="retention", right="gdn", **settings).view
    equal = [at for at, word in enumerate(view.words) if word == "the"]
    alike, newest = (memory.share(18, 2)[equal] for memory in (view.left, view.right))
    assert len(equal) == 6
    assert np.ptp(alike) < 1e-6
    assert newest[-1] > 2 * newest[:-1].max()


def test_the_token_is_where_the_player_rests() -> None:
    panel = MixerPanel(text="the cat saw the dog", token=2)
    panel.player.time = 3.2
    assert panel.token == 4
    panel.player.time = 5.0  # the end is the last token
    assert panel.token == 5
    words = panel.player.scene["grids"][1]
    assert words["labels"][:5] == ["the", "cat", "saw", "the", "dog"]
    assert [value > 100 for value in words["values"][1][:5]] == [False] * 2 + [True] * 3


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("heads", "head_size", "number"), [(1, 32, 1), (64, 256, 4)])
def test_costs_are_those_of_the_table_and_fit_the_axes(name, heads, head_size, number) -> None:
    view = decode_costs(
        left=name, right="gdn", context_length=4096, heads=heads, head_size=head_size,
        bytes_per_number=number,
    )  # fmt: skip
    row, sizes = mixer(name), (1, 4096, heads, head_size, head_size)
    wanted = {
        "operations": row.step_flops(*sizes, **row.options),
        "moved": row.step_bytes(*sizes, element_bytes=number, **row.options),
        "kept": row.state_bytes(*sizes, element_bytes=number, **row.options),
    }
    for what, counted in COUNTED.items():
        assert view.cost(what, "left") == wanted[what]
        low, high = counted.limits
        for curve in view.curves[what].values():
            assert low <= curve.min() <= curve.max() <= high


def test_a_mixer_beside_itself_has_its_own_columns() -> None:
    columns = MixerCostPanel(left="gdn", right="gdn").data()
    assert len(columns) == 1 + 3 * len(COUNTED)


def test_the_cache_outgrows_the_state_where_the_words_say() -> None:
    view = MixerCostPanel(left="gdn", right="gdn", heads=1, head_size=64).view
    assert "outgrows the smaller state at 64 tokens" in view.sentence()  # 64² × 4 / (128 × 2)
    assert "Modelled" in view.sentence()
