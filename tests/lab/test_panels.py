"""What every panel owes its reader: one suite for all, driven from Python as a notebook does."""

import functools
import itertools
from base64 import b64encode
from collections.abc import Callable, Sequence

import pytest
from matplotlib.font_manager import findfont as find_font
from panel_moves import assert_quick_update
from PIL import ImageFont

pytest.importorskip("anywidget")

from toolkit import lab
from toolkit.figures import use_size
from toolkit.lab.attention import instrument
from toolkit.lab.attention.cost_curves import Machine
from toolkit.lab.kit.controls import LABEL_WIDTH, Choice, Number, Words
from toolkit.lab.kit.drags import nearest
from toolkit.lab.kit.panel import Panel

# The registry is `toolkit.lab` itself: a new panel inherits every test, at night.
EVERY = [
    name
    for name in lab.__all__
    if isinstance(getattr(lab, name), type)
    and issubclass(getattr(lab, name), Panel)
    and getattr(lab, name) is not Panel
]
FIRST_TIER = ("CostPanel", "MemoryPanel", "ReadingPanel")
# One of each subject in the second tier; their sisters, and those that take longest, at night.
SECOND_TIER = (
    "AcceptancePanel", "CutPanel", "DecodePanel", "ExpertPanel", "LanesPanel",
    "MeshPanel", "MixerPanel", "PipelinePanel", "PlanPanel", "RequestsPanel", "RingPanel",
    "SalePanel", "SearchPanel", "SentPanel", "SpeedupPanel", "TimelinePanel",
)  # fmt: skip
UNITS_ARE_WORDS = ("ReadingPanel", "MixerPanel")
WITH_TEXT = ("MixerPanel", "LoopPanel", "ExpertPanel")


def in_tiers(second: Sequence[str]) -> list:
    """Every panel: some by day, those of `second` in the second tier, all others at night."""
    day, night = dict.fromkeys(FIRST_TIER, ()), (pytest.mark.slow, pytest.mark.nightly)
    marks = dict.fromkeys(second, (pytest.mark.slow,)) | day
    return [pytest.param(name, marks=marks.get(name, night)) for name in EVERY]


MOVED = in_tiers(SECOND_TIER)
# Where the ends of a menu will not do; an empty pair is a control with a test of its own.
MOVES = {
    # Reading 32,768 tokens takes a while.
    **{name: {"context": (1024, 4096)} for name in ("DropPanel", "FitPanel", "CodesPanel")},
    "SearchPanel": {
        "problem": ("quadratic 10", "quadratic 100"), "budget": (500, 2000),
        "candidates": (), "kappa": (), "round": (),
    },
    "GoodputPanel": {"count": (60, 120)},
    # The layers that it opens with have no window; `test_looped_view.py` moves it.
    "LoopStatePanel": {"window": ()},
    # The largest does not fit 64 chips, and the panel says so.
    "PlanPanel": {"model": ("llama-3.2-1b", "qwen-3-32b")},
    # Of all recorded times a few pass the filters.
    "SpeedupPanel": {"point": (2, 20)},
    "PipelinePanel": {"moves": ("none", "F4@0 to 3"), "slow": (0, 2)},
    "RacePanel": {
        "problem": ("quadratic 10", "quadratic 100"), "budget": (500, 1000),
        "points": (((0.0, 0.5), (1.0, 0.0)), ((0.0, 0.5), (1.0, 0.1))),
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("this machine", 1e11, 1e10, 4)
    monkeypatch.setattr(instrument, "this_machine", lambda: machine)


def test_no_label_is_cut() -> None:
    """Menus and sliders leave their labels LABEL_WIDTH, and the browser cuts what is longer."""
    font = ImageFont.truetype(find_font("DejaVu Sans"), 13)  # JupyterLab's size
    for name in EVERY:
        for control in getattr(lab, name).controls.values():
            if isinstance(control, Choice | Number | Words):
                room = int(LABEL_WIDTH.removesuffix("px")) - 6
                assert font.getlength(control.label) < room, (name, control.label)


@pytest.fixture(scope="module")
def shown() -> Callable[[str], Panel]:
    """A panel as it opens; the tests that ask for it leave it as it was."""
    return functools.cache(lambda name: getattr(lab, name)())


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


@pytest.mark.parametrize("name", MOVED)
def test_every_control_moves_numbers_and_picture_there_and_back(name: str, shown) -> None:
    panel = shown(name)
    for control in panel.controls.values():
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
        assert panel.page.image.value == panel.png
        assert len(b64encode(panel.png)) < 200_000, moved  # as a saved output holds it
        panel.change(**{control.name: one})
        assert panel.png == png, moved
        panel.change(**{control.name: control.default})


def written(figure) -> list:
    """Every text of a figure that is shown, and every legend."""
    figure.canvas.draw()
    texts, legends = list(figure.texts), list(figure.legends)
    for axes in figure.axes:
        texts += [*axes.texts, axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
        legends += [one for one in [axes.get_legend()] if one]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            texts += [label for tick in ticks for label in (tick.label1, tick.label2)]
    return [one for one in texts if one.get_visible() and one.get_text().strip()] + legends


def said_by(artist) -> str:
    return artist.get_text() if hasattr(artist, "get_text") else "legend"


def faults(figure) -> list[str]:
    """What is written, all or in part, outside the figure, and what lies on something else."""
    whole, artists = figure.bbox.padded(-2), written(figure)
    boxes = [(said_by(one), one.get_window_extent()) for one in artists]
    found = [f"cut off: {w}" for w, box in boxes if whole.count_contains(box.corners()) < 4]
    # Slanted words beside each other have boxes that overlap, and do not.
    upright = [
        pair
        for pair, one in zip(boxes, artists, strict=True)
        if not hasattr(one, "get_rotation") or one.get_rotation() % 90 == 0
    ]
    for (words, one), (others, other) in itertools.combinations(upright, 2):
        width = min(one.x1, other.x1) - max(one.x0, other.x0)
        height = min(one.y1, other.y1) - max(one.y0, other.y0)
        if width > 2 and height > 2:
            found.append(f"overlap: {words} | {others}")
    return found


@pytest.mark.parametrize("name", MOVED)
def test_no_words_are_cut_off_or_overlap(name: str, shown) -> None:
    panel, fixed = shown(name), [c for c, values in MOVES.get(name, {}).items() if values == ()]
    numbers = [c for c in panel.controls.values() if isinstance(c, Number) and c.name not in fixed]
    for end in ("low", "high", "default"):
        panel.change(**{control.name: getattr(control, end) for control in numbers})
        assert faults(panel.picture.figure) == [], end


@pytest.mark.parametrize("name", MOVED)
def test_a_panel_fits_a_screen(name: str, shown) -> None:
    from toolkit.lab.kit.page import ROW_PIXELS, SCREEN_PIXELS, WORDS_PIXELS, rows_of

    panel = shown(name)
    picture = int(panel.page.image.layout.height.removesuffix("px"))
    assert (
        WORDS_PIXELS + ROW_PIXELS * rows_of(panel) + panel.pixels_above + picture <= SCREEN_PIXELS
    )


@pytest.mark.parametrize("name", in_tiers(second=()))
def test_a_panel_for_a_room_is_the_same_but_larger(name: str) -> None:
    use_size("projector")
    try:
        panel = getattr(lab, name)()
    finally:
        use_size("page")
    assert faults(panel.picture.figure) == []
    inches = panel.figure_size[0]
    assert panel.picture.figure.canvas.get_width_height()[0] == round(1.5 * 130 * inches)
    assert panel.page.image.layout.max_width == f"{round(150 * inches)}px"


@pytest.mark.parametrize("name", MOVED)
def test_a_panel_is_for_all(name: str, shown) -> None:
    panel = shown(name)
    for control in panel.controls.values():
        inputs = panel.page.controls[control.name].inputs
        if isinstance(control, Number):
            kinds = [type(widget).__name__ for widget in inputs]
            assert [kind.endswith("Slider") for kind in kinds] == [True, False], control.name
            assert kinds[1].startswith("Bounded"), control.name
        for widget in inputs:  # plain form elements, which a keyboard reaches, each with a name
            assert not getattr(widget, "disabled", False), control.name
            assert getattr(widget, "tabbable", None) is not False, control.name
            named = [getattr(widget, one, "") for one in ("description", "tooltip")]
            named.append("aria-label" in str(getattr(widget, "_esm", "")))  # the curve's own
            assert any(named), control.name
    data, metadata = panel._repr_mimebundle_()
    assert metadata["image/png"]["alt"] == panel.view.sentence()
    assert len(panel.view.sentence()) > 40
    assert panel.title in data["text/plain"]
    panel.page.show_numbers.value = True
    assert panel.page.table.value.count("<th scope='col'") == len(panel.data())
    assert panel.page.table.value.count("<tr>") == 1 + len(panel.view.table().rows)
    panel.page.show_numbers.value = False


@pytest.mark.parametrize("name", MOVED)
def test_a_number_is_dragged_where_it_is_drawn(name: str, shown) -> None:
    panel = shown(name)
    if panel.page.drags is None:
        pytest.skip("no plot of it draws a number of its controls")
    for place, plot in enumerate(panel.page.drags._plots):
        control = panel.controls[plot.drag.control]
        for wanted in two_values(control):
            wanted = nearest(control, wanted, panel.view)
            panel.change(**{control.name: wanted})
            handle = panel.page.drags.places[place]
            left, right, top, bottom = handle["box"]
            across = (handle["at"] - left) / (right - left)
            share = across if handle["axis"] == "x" else (bottom - handle["at"]) / (bottom - top)
            panel.change(**{control.name: control.default})
            panel.page.drags._handle_custom_msg({"place": place, "share": share}, [])
            assert panel.state[control.name] == wanted, (plot, control.name)
        panel.change(**{control.name: control.default})


@pytest.mark.parametrize("name", MOVED)
def test_numbers_are_given_once_and_controls_are_documented(name: str, shown) -> None:
    panel = shown(name)
    columns = panel.data()
    assert len({len(values) for values in columns.values()}) == 1
    table = panel.view.table()
    assert [*panel.view.row(-1).values()] == [*table.rows[-1]]
    assert all(f"\n    {control}: " in (type(panel).__doc__ or "") for control in panel.controls)


@pytest.mark.parametrize(
    "name", ["ReadingPanel", *(pytest.param(name, marks=pytest.mark.slow) for name in WITH_TEXT)]
)
def test_token_slider_is_as_long_as_the_text(name: str) -> None:
    panel = getattr(lab, name)(token=12)
    slider = panel.page.controls["token"].inputs[0]
    panel.text = "a b c"
    assert slider.max == panel.view.token + 1 == (3 if name in UNITS_ARE_WORDS else 5)
    slider.value = 1
    assert panel.view.token == 0


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.timed
def test_a_warm_update_is_quick(name: str) -> None:
    panel = getattr(lab, name)()
    for control in panel.controls.values():
        if isinstance(control, Number) and control.is_continuous:
            low, high = two_values(control)
            values = [control.check(low + (high - low) * part / 6) for part in range(7)]
            assert_quick_update(panel, control.name, values)
            panel.change(**{control.name: control.default})
