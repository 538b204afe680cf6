"""The base of every panel: controls, errors, still picture, table, jobs."""

import asyncio
import base64
import dataclasses
import io
from types import SimpleNamespace

import pytest

pytest.importorskip("ipywidgets")

from matplotlib.figure import Figure
from PIL import Image

from toolkit.lab.kit.controls import Choice, Number, Words
from toolkit.lab.kit.job import Job
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Table, View, as_html, in_cell


@dataclasses.dataclass(frozen=True)
class Line(View):
    height: float
    name: str

    def sentence(self) -> str:
        return f"A line called <{self.name}> at height {self.height:g}."

    def data(self):
        return {"height": [self.height], "cost (bytes)": [2048]}

    def footnote(self) -> str:
        return f"Drawn by {self.name}."


class LinePlot(Plot):
    def __init__(self, axes) -> None:
        super().__init__(axes)
        axes.set_ylim(0, 1024)
        self.height = self.line()

    def show(self, view: Line) -> None:
        self.height.set_data([0, 1], [view.height] * 2)


class LinePanel(Panel):
    title = "A line"
    figure_size = (4.0, 2.0)

    height = Number("Height", 3, low=0, high=1024)
    doubling = Number("Doubling", 8, low=1, high=1024, powers_of_two=True)
    share = Number("Share", 0.5, low=0.0, high=1.0, step=0.1)
    kind = Choice("Kind", "a", {"first": "a", "second": "b"})
    text = Words("Name", "line")

    def compute(self, *, height, text, **_) -> Line:
        if text == "broken":
            raise ArithmeticError("cannot draw <broken>")
        return Line(height, text)

    def plots(self, figure: Figure) -> list:
        return [LinePlot(figure.subplots())]


@pytest.fixture
def panel() -> LinePanel:
    return LinePanel()


def inputs_of(panel: Panel, name: str):
    return panel.page.controls[name].inputs


def test_a_footnote_is_drawn_anew_only_once_it_has_changed() -> None:
    panel = LinePanel()
    panel.height = 5
    assert panel._footnote not in panel.picture.moving
    panel.text = "another"
    assert panel._footnote in panel.picture.moving
    assert panel.png == LinePanel(height=5, text="another").png


def test_attribute_and_slider_do_the_same(panel: LinePanel) -> None:
    slider, box = inputs_of(panel, "height")
    panel.height = 500
    assert (slider.value, box.value, panel.view.height) == (500, 500, 500)
    from_python = panel.png
    slider.value = 10
    assert (panel.height, box.value, panel.view.height) == (10, 10, 10)
    assert panel.png != from_python
    box.value = 500
    assert (panel.height, slider.value) == (500, 500)
    assert panel.png == from_python
    assert panel.page.image.value == panel.png


def test_a_sum_of_a_sliders_steps_is_the_number_it_means(panel: LinePanel) -> None:
    slider, box = inputs_of(panel, "share")
    slider.value = 0.1 + 0.2
    assert (panel.share, slider.value, box.value) == (0.3, 0.3, 0.3)


def test_doubling_slider_takes_numbers_between_from_the_box(panel: LinePanel) -> None:
    slider, box = inputs_of(panel, "doubling")
    box.value = 100
    assert panel.doubling == 100
    slider.value = 256.0
    assert panel.doubling == 256
    assert isinstance(panel.doubling, int)


def test_every_number_has_a_slider_and_a_box(panel: LinePanel) -> None:
    for name in ("height", "doubling", "share"):
        kinds = {type(widget).__name__ for widget in inputs_of(panel, name)}
        assert any("Slider" in kind for kind in kinds)
        assert any("Text" in kind for kind in kinds)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("height", 2000, "wanted 0 to 1024"),
        ("height", "tall", "wanted a number"),
        ("kind", "c", "wanted one of 'a', 'b'"),
        ("text", " ", "wanted some words"),
    ],
)
def test_a_bad_value_is_refused_and_changes_nothing(panel, name, value, wanted) -> None:
    before, png = dict(panel.state), panel.png
    with pytest.raises(ValueError, match=f"{name}: got .*{wanted}"):
        setattr(panel, name, value)
    assert dict(panel.state) == before
    assert panel.png == png


def test_an_unknown_control_is_refused(panel: LinePanel) -> None:
    with pytest.raises(ValueError, match="weight: no such control, wanted one of height"):
        panel.change(weight=3)


def test_an_error_after_a_users_move_shows_under_the_panel_and_goes(panel: LinePanel) -> None:
    (words,), png = inputs_of(panel, "text"), panel.png
    words.value = "broken"
    assert panel.error == "ArithmeticError: cannot draw <broken>"
    assert "&lt;broken&gt;" in panel.page.error.value
    assert "role='alert'" in panel.page.error.value
    assert panel.text == "line"
    assert panel.png == png
    words.value = "mended"
    assert panel.error == panel.page.error.value == ""
    assert panel.view.name == "mended"


def test_an_error_from_python_is_raised_and_shown(panel: LinePanel) -> None:
    with pytest.raises(ArithmeticError, match="cannot draw"):
        panel.text = "broken"
    assert "cannot draw" in panel.error


def test_reads_without_a_kernel(panel: LinePanel) -> None:
    data, metadata = panel._repr_mimebundle_()
    picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
    assert picture.size == (520, 260)
    assert "A line\nA line called <line>" in data["text/plain"]
    assert "height 3" in metadata["image/png"]["alt"]
    assert "application/vnd.jupyter.widget-view+json" in data


def test_a_cell_shows_the_panel_by_a_display_message(panel: LinePanel, monkeypatch) -> None:
    shown = []
    monkeypatch.setattr("toolkit.lab.kit.panel.display", lambda *a, **b: shown.append((a, b)))
    # What IPython asks for first, whether ipywidgets (7) has a method of that name or not (8).
    panel._ipython_display_()
    data, metadata = panel._repr_mimebundle_()
    assert shown == [((data,), {"metadata": metadata, "raw": True})]


def test_numbers_are_shown_on_request(panel: LinePanel) -> None:
    assert panel.page.table.value == ""
    panel.page.show_numbers.value = True
    panel.height = 77
    assert "<td" in panel.page.table.value
    assert "77" in panel.page.table.value


def test_table_and_data_are_the_same_numbers(panel: LinePanel) -> None:
    panel.height = 77
    assert panel.data() == {"height": [77], "cost (bytes)": [2048]}
    assert panel.view.table() == Table(("height", "cost"), [("77", "2.00 KiB")])


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        ("word", "", "word"),
        (12_000, "", "12,000"),
        (0.123456, "", "0.1235"),
        (None, "", "–"),
        (float("nan"), "bytes", "–"),
        (float("inf"), "", "diverged"),
        ((1e-3, 1e-5), "seconds", "1.00 ms ± 10.0 µs"),
    ],
)
def test_one_way_to_write_a_number(value, unit: str, words: str) -> None:
    assert in_cell(value, unit) == words


def test_a_panel_follows_another_in_the_controls_both_have(panel: LinePanel) -> None:
    class Other(LinePanel):
        weight = Number("Weight", 3, low=0, high=10)

    other = Other(height=9).follow(panel)
    assert (other.height, other.weight) == (3, 3)
    slider, _ = inputs_of(panel, "height")
    slider.value = 12
    assert other.height == 12
    other.height = 4  # its own controls still move it alone
    assert panel.height == 12


def test_table_escapes_and_names_its_columns() -> None:
    text = as_html(Table(("a<b",), [("1 & 2",)]))
    assert "<th scope='col'" in text
    assert "a&lt;b" in text
    assert "1 &amp; 2" in text


def test_caption_follows_and_is_escaped(panel: LinePanel) -> None:
    panel.change(height=12, text="x")
    assert "&lt;x&gt; at height 12" in panel.page.caption.value


def make_job(pieces, seen: list) -> Job:
    return Job("Go", pieces, after_piece=lambda: seen.append("piece"), on_error=seen.append)


def three_pieces():
    for done in (1, 2, 3):
        yield done, 3, f"piece {done}"


def test_job_runs_to_the_end_from_python() -> None:
    seen: list = []
    job = make_job(three_pieces, seen)
    job.run()
    assert seen == ["piece"] * 3
    assert job.message == "piece 3 (3 of 3)"
    assert not job.is_running


def test_job_stops_between_pieces() -> None:
    seen: list = []
    job = make_job(three_pieces, seen)

    async def press_run_then_stop() -> None:
        job.start()
        await asyncio.sleep(0)
        assert job.is_running
        job.stop()
        await job._task

    asyncio.run(press_run_then_stop())
    assert seen == ["piece"]
    assert job.message.startswith("stopped after: piece 1")


def test_job_in_the_background_reports_an_error() -> None:
    seen: list = []

    def failing():
        yield 1, 2, "fine"
        raise RuntimeError("no longer")

    job = make_job(failing, seen)

    async def press() -> None:
        job.start()
        await job._task

    asyncio.run(press())
    assert seen[0] == "piece"
    assert str(seen[1]) == "no longer"
    assert not job.is_running


def test_a_misspelt_control_is_refused(panel: LinePanel) -> None:
    with pytest.raises(AttributeError, match="no control 'heigth'; wanted one of height"):
        panel.heigth = 3


@pytest.mark.parametrize(("columns", "width"), [(1, 3.35), (2, 7.0)])
def test_a_panel_is_saved_for_a_paper(tmp_path, columns, width):
    panel = LinePanel()
    before = panel.picture.png()
    empty = LinePanel(height=1024).save(tmp_path / "other.svg", columns).read_text()
    drawn = panel.save(tmp_path / "figure.svg", columns).read_text()
    assert f'width="{72 * width:g}pt"' in drawn
    assert drawn != empty  # the line that moves is in the file
    pdf = panel.save(tmp_path / "figure.pdf", columns).read_bytes()
    assert b"/FontFile2" in pdf  # embedded TrueType
    assert b"/Type3" not in pdf
    assert panel.save(tmp_path / "again.pdf", columns).read_bytes() == pdf
    assert panel.picture.png() == before
    with pytest.raises(ValueError, match="columns: got 3"):
        panel.save(tmp_path / "figure.pdf", columns=3)


def test_a_panel_of_many_controls_fits_a_screen():
    from toolkit.lab.kit.page import LEAST_SHARE, height_of

    few, many, tall = (
        height_of(
            SimpleNamespace(
                pixels=[960, height],
                pixels_above=0,
                extra_rows=0,
                button="",
                controls=dict.fromkeys(range(count)),
            )
        )
        for height, count in ((420, 4), (630, 8), (1200, 8))
    )
    assert few == 420
    assert many == 900 - 163 - 4 * 32 < 630
    assert tall == LEAST_SHARE * 1200
