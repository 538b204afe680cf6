"""What every panel owes its reader: one suite for all, driven from Python as a notebook does."""

import itertools

import pytest
from panel_moves import quickest_update

pytest.importorskip("anywidget")

from toolkit import lab
from toolkit.lab.attention import instrument
from toolkit.lab.attention.view import Machine
from toolkit.lab.kit.controls import Choice, Number, Words

MAX_WARM_SECONDS = 0.1
FIRST_TIER = ("CostPanel", "MemoryPanel", "ReadingPanel")
SECOND_TIER = (
    "MixerPanel", "MixerCostPanel", "LoopPanel", "LoopStatePanel", "SearchPanel", "RacePanel",
    "MeshPanel", "StepPanel", "DecodePanel", "SlicePanel", "ChipMemoryPanel", "FitsPanel",
    "PlanPanel", "SpeedupPanel", "DropPanel",
)  # fmt: skip
WITH_TEXT = ("MixerPanel", "LoopPanel")
PANELS = [*FIRST_TIER, *(pytest.param(name, marks=pytest.mark.slow) for name in SECOND_TIER)]
# Where the ends of a menu will not do; an empty pair is a control with a test of its own.
MOVES = {
    "DropPanel": {"context": (1024, 4096)},  # reading 32,768 tokens takes a while
    "SearchPanel": {
        "problem": ("quadratic 10", "quadratic 100"), "budget": (500, 2000),
        "candidates": (), "kappa": (), "round": (),
    },
    "RacePanel": {
        "problem": ("quadratic 10", "quadratic 100"), "budget": (500, 1000),
        "points": (((0.0, 0.5), (1.0, 0.0)), ((0.0, 0.5), (1.0, 0.1))),
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("this machine", 1e11, 1e10, 4)
    monkeypatch.setattr(instrument, "this_machine", lambda: machine)


def two_values(control) -> tuple:
    """Far enough apart for every control of its kind to show it."""
    if isinstance(control, Choice):
        every = list(control.options.values())
        return every[0], every[-1]
    if isinstance(control, Words):
        return "one two one", "three four five six"
    assert isinstance(control, Number)
    low, high = control.low, control.high
    if control.powers_of_two:
        return low * 8, high // 8
    pair = low + (high - low) / 10, low + (high - low) / 2
    return tuple(map(round, pair)) if control.is_integer else pair


@pytest.mark.parametrize("name", PANELS)
def test_every_control_moves_numbers_and_picture_there_and_back(name: str) -> None:
    panel = getattr(lab, name)()
    for control in panel._controls.values():
        moved = f"{name}.{control.name}"
        values = MOVES.get(name, {}).get(control.name, None)
        if values == ():
            continue
        one, other = values or two_values(control)
        panel.change(**{control.name: one})
        words, png = (panel.view.sentence(), panel.view.table()), panel.png
        panel.change(**{control.name: other})
        assert (panel.view.sentence(), panel.view.table()) != words, moved
        assert panel.png != png, moved
        assert panel._image.value == panel.png
        assert len(panel.png) < 140_000, moved  # as base64 below the 200 kB of a saved output
        panel.change(**{control.name: one})
        assert panel.png == png, moved
        panel.change(**{control.name: control.default})


def words_cut_off(figure) -> list[str]:
    """What is written, all or in part, outside the figure."""
    figure.canvas.draw()
    texts = list(figure.texts)
    for axes in figure.axes:
        texts += [*axes.texts, axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            texts += [label for tick in ticks for label in (tick.label1, tick.label2)]
    shown = [text for text in texts if text.get_visible() and text.get_text().strip()]
    whole = figure.bbox.padded(-2)
    corners = [(text.get_text(), text.get_window_extent().corners()) for text in shown]
    return [words for words, four in corners if whole.count_contains(four) < len(four)]


@pytest.mark.parametrize("name", PANELS)
def test_no_words_are_cut_off(name: str) -> None:
    panel = getattr(lab, name)()
    assert words_cut_off(panel.picture.figure) == []
    for end in ("low", "high"):
        numbers = (c for c in panel._controls.values() if isinstance(c, Number))
        ends = {c.name: getattr(c, end) for c in numbers if MOVES.get(name, {}).get(c.name) != ()}
        panel.change(**ends)
        assert words_cut_off(panel.picture.figure) == [], end


@pytest.mark.parametrize("name", PANELS)
def test_numbers_are_given_once_and_controls_are_documented(name: str) -> None:
    panel = getattr(lab, name)()
    columns = panel.data()
    assert len({len(values) for values in columns.values()}) == 1
    table = panel.view.table()
    assert [*panel.view.row(-1).values()] == [*table.rows[-1]]
    assert all(f"\n    {control}: " in type(panel).__doc__ for control in panel._controls)


@pytest.mark.parametrize(
    "name", ["ReadingPanel", *(pytest.param(name, marks=pytest.mark.slow) for name in WITH_TEXT)]
)
def test_token_slider_is_as_long_as_the_text(name: str) -> None:
    panel = getattr(lab, name)(token=12)
    slider = panel._control_widgets["token"].inputs[0]
    panel.text = "a b c"
    assert slider.max == panel.view.token + 1 == (5 if name == "LoopPanel" else 3)
    slider.value = 1
    assert panel.view.token == 0


@pytest.mark.parametrize(
    "name",
    [
        *FIRST_TIER,
        "MixerPanel",
        "MixerCostPanel",
        "MeshPanel",
        "StepPanel",
        "DecodePanel",
        "SlicePanel",
        "ChipMemoryPanel",
        "SpeedupPanel",
        "DropPanel",
    ],
)
@pytest.mark.timed
def test_a_warm_update_is_quick(name: str) -> None:
    panel = getattr(lab, name)()
    for control in panel._controls.values():
        if isinstance(control, Number) and control.is_continuous:
            low, high = two_values(control)
            values = [control.check(low + (high - low) * part / 6) for part in range(7)]
            seconds = quickest_update(panel, control.name, itertools.cycle(values))
            assert seconds < MAX_WARM_SECONDS, control.name
            panel.change(**{control.name: control.default})
