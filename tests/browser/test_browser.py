"""The notebooks in JupyterLab, in a real Chromium, with a real mouse."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe import serious_violations
from jupyterlab_server import jupyterlab

from toolkit.lab.notebooks.index import write_index

ROOT = Path(__file__).resolve().parents[2]
SCREENSHOTS = ROOT / "runs" / "browser"
RUN_MILLISECONDS = 400_000
UPDATE_MILLISECONDS = 60_000


def find_chromium() -> str | None:
    """Path of a Chromium: TOOLKIT_CHROMIUM, then PATH."""
    named = os.environ.get("TOOLKIT_CHROMIUM")
    return named or shutil.which("chromium") or shutil.which("chromium-browser")


pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        find_chromium() is None,
        reason="no chromium on PATH (Debian: apt-get install chromium) nor in TOOLKIT_CHROMIUM",
    ),
    # Playwright's own event loop closes its sockets late.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

RUN_ALL = """async () => {
    const app = window.jupyterapp; await app.started;
    const panel = app.shell.currentWidget;
    await panel.context.ready; await panel.sessionContext.ready;
    await panel.sessionContext.session.kernel.info;
    return await app.commands.execute('notebook:run-all-cells');
}"""
KERNEL_IS_IDLE = """() => window.jupyterapp?.shell?.currentWidget?.sessionContext
    ?.session?.kernel?.status === 'idle'"""
PICTURE_HASH = """async image => {
    const bytes = await (await fetch(image.src)).arrayBuffer();
    const digest = await crypto.subtle.digest('SHA-256', bytes);
    return Array.from(new Uint8Array(digest)).join(' ');
}"""
ERROR_OUTPUTS = ".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']"
FITS = "box => box.scrollWidth <= box.parentElement.clientWidth + 1"
TEXT_CONTAINS = "([element, words]) => element.textContent.includes(words)"
PICTURE_IS_NEW = "([image, old]) => image.src !== old && image.complete && image.naturalWidth > 0"


@pytest.fixture(scope="module")
def open_notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """name -> page with that notebook open in JupyterLab, every cell run; errors are collected."""
    playwright = pytest.importorskip("playwright.sync_api")
    notebooks, state = (tmp_path_factory.mktemp(name) for name in ("notebooks", "state"))
    for path in (*ROOT.glob("notebooks/*.ipynb"), ROOT / "tutorials/07_pipeline.ipynb"):
        shutil.copy(path, notebooks)
    for folder in ("notebooks", "tutorials"):
        shutil.copytree(ROOT / folder, notebooks / folder)
    write_index(notebooks)
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    arguments += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    with (
        jupyterlab(notebooks, state, ROOT) as address,
        playwright.sync_playwright() as driver,
        driver.chromium.launch(
            executable_path=find_chromium(), headless=True, args=arguments
        ) as browser,
    ):
        guessed: set[str] = set()

        def open_page(name: str, errors: list[str] | None = None) -> Any:
            page = browser.new_page(viewport={"width": 1400, "height": 1100})
            if errors is not None:
                page.on("pageerror", lambda error: errors.append(str(error)))
                page.on("console", lambda said: said.type == "error" and errors.append(said.text))
            page.set_default_timeout(RUN_MILLISECONDS)
            page.goto(f"{address}/lab/tree/{name}.ipynb?reset", wait_until="domcontentloaded")
            page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook .jp-Cell")
            page.wait_for_function(KERNEL_IS_IDLE)
            page.evaluate(RUN_ALL)
            page.wait_for_function(KERNEL_IS_IDLE)
            page.set_default_timeout(UPDATE_MILLISECONDS)
            if name not in guessed:  # the kernel remembers a guess
                enter_guess(page)
                guessed.add(name)
            return page

        yield open_page


@pytest.fixture(scope="module")
def page(open_notebook: Callable[[str], Any]) -> Any:
    """The attention notebook."""
    return open_notebook("attention")


def enter_guess(page: Any) -> None:
    """Unlock the first panel, if it is locked."""
    prediction = page.locator(".toolkit-prediction").first
    if not page.locator(".toolkit-prediction").count():
        return
    assert prediction.locator(".toolkit-panel").count() == 0
    choices = prediction.locator("input[type=radio]")
    if choices.count():
        choices.first.check()
    else:
        prediction.locator("input[type=text]").fill("3")
        prediction.locator("input[type=text]").press("Enter")
    if choices.count():
        prediction.locator(".lesson-enter").dblclick()  # a second click is harmless
    prediction.locator("img").first.wait_for()
    page.wait_for_function(KERNEL_IS_IDLE)


def drag(page: Any, slider: Any, fraction: float) -> None:
    """Take the slider's handle with the mouse and put it at `fraction` of its track."""
    slider.scroll_into_view_if_needed()
    handle = slider.locator(".noUi-handle").bounding_box()
    track = slider.locator(".noUi-base").bounding_box()
    page.mouse.move(handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2)
    page.mouse.down()
    middle = track["y"] + track["height"] / 2
    page.mouse.move(track["x"] + fraction * track["width"], middle, steps=8)
    page.mouse.up()


def wait_for_new_picture(page: Any, picture: Any, old_source: str) -> None:
    page.wait_for_function(PICTURE_IS_NEW, arg=[picture.element_handle(), old_source])


def assert_no_errors(page: Any) -> None:
    assert page.locator(ERROR_OUTPUTS).count() == 0
    assert page.locator(".jupyter-widgets-error-widget").count() == 0


def move_first_control(page: Any, panel: Any) -> None:
    """Drag the panel's first slider to the other half, or choose another option where none is."""
    for at in range(panel.locator(".noUi-target").count()):
        slider = panel.locator(".noUi-target").nth(at)
        if slider.is_visible():
            handle = slider.locator(".noUi-handle")
            low, high, now = (
                float(handle.get_attribute(f"aria-value{name}")) for name in ("min", "max", "now")
            )
            is_high = now > (low + high) / 2
            drag(page, slider, 0.25 if is_high else 0.75)
            if float(handle.get_attribute("aria-valuenow")) == now:
                # The notebook moved under the mouse, as it does when it lays out more cells.
                handle.press("Home" if is_high else "End")
            return
    menu = panel.locator("select").first
    chosen = menu.evaluate("menu => menu.selectedIndex")
    menu.select_option(index=1 if chosen == 0 else 0)


def drag_and_check(page: Any, name: str, fraction: float, words: str) -> Any:
    """Drag a slider; its panel's picture and caption follow, without an error. The panel."""
    panel = page.locator(".toolkit-panel", has=page.locator(f".{name}")).first
    slider = panel.locator(f".{name}")
    slider.scroll_into_view_if_needed()
    picture = panel.locator("img.panel-picture")
    source, content = picture.get_attribute("src"), picture.evaluate(PICTURE_HASH)
    drag(page, slider, fraction)
    wait_for_new_picture(page, picture, source)
    # A drag sends several values: wait for the caption of the one it ended on.
    value = float(slider.locator(".noUi-handle").get_attribute("aria-valuenow"))
    wait_for_caption(page, panel, words.format(round(value)))
    page.wait_for_function(KERNEL_IS_IDLE)
    assert picture.evaluate(PICTURE_HASH) != content
    assert panel.locator(".panel-error").inner_text().strip() == ""
    panel.scroll_into_view_if_needed()
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    return panel


def wait_for_caption(page: Any, panel: Any, words: str) -> None:
    caption = panel.locator(".panel-caption").element_handle()
    page.wait_for_function(TEXT_CONTAINS, arg=[caption, words])


def test_sliders_move_the_pictures(page: Any) -> None:
    assert_no_errors(page)
    for name, fraction, words in (
        ("slider-token", 0.2, "(token {} of 16)"),
        ("slider-sequences", 0.9, "at once"),
    ):
        drag_and_check(page, name, fraction, words)
        page.screenshot(path=SCREENSHOTS / f"{name}.png")
    assert_no_errors(page)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [path.stem for path in sorted(ROOT.glob("notebooks/*.ipynb"))])
def test_every_panel_moves(name: str, open_notebook: Callable[..., Any]) -> None:
    errors: list[str] = []
    page = open_notebook(name, errors)
    page.set_default_timeout(RUN_MILLISECONDS)
    panels = page.locator(".toolkit-panel")
    assert panels.count()
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for at in range(panels.count()):
        panel = panels.nth(at)
        panel.scroll_into_view_if_needed()
        picture = panel.locator("img.panel-picture")
        content, source = picture.evaluate(PICTURE_HASH), picture.get_attribute("src")
        move_first_control(page, panel)
        wait_for_new_picture(page, picture, source)
        page.wait_for_function(KERNEL_IS_IDLE)
        assert picture.evaluate(PICTURE_HASH) != content
        assert panel.locator(".panel-error").inner_text().strip() == ""
        panel.screenshot(path=SCREENSHOTS / f"{name}-{at}.png")
    assert_no_errors(page)
    # Badges come from the network, which there may not be.
    assert not [said for said in errors if not said.startswith("Failed to load resource")]
    page.close()


def test_a_measurement_can_be_stopped_and_the_panel_lives_on(page: Any) -> None:
    panel = page.locator(".toolkit-panel", has=page.locator(".job-run")).first
    heads = panel.locator(".box-heads input")
    heads.scroll_into_view_if_needed()
    heads.fill("3")  # sizes not measured yet
    heads.press("Enter")
    panel.locator(".job-run").click()
    panel.locator(".job-stop:enabled").click()
    words = panel.locator(".job-text")
    page.wait_for_function(
        "words => words.textContent.startsWith('stopped after')", arg=words.element_handle(),
        timeout=RUN_MILLISECONDS,
    )  # fmt: skip
    picture = panel.locator("img.panel-picture")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    source = picture.get_attribute("src")
    drag(page, panel.locator(".slider-context_length"), 0.3)
    wait_for_new_picture(page, picture, source)
    words.scroll_into_view_if_needed()
    page.screenshot(path=SCREENSHOTS / "measurement.png")
    assert_no_errors(page)


@pytest.mark.nightly
def test_two_mixers_are_picked_and_read_on(open_notebook: Callable[[str], Any]) -> None:
    page = open_notebook("mixers")
    assert_no_errors(page)
    panel = drag_and_check(page, "slider-token", 0.35, "(token {} of 24)")
    panel.locator(".choice-left select").select_option("Mamba-2")
    costs = page.locator(".toolkit-panel", has=page.locator(".slider-context_length")).first
    for one in (panel, costs):  # the second panel follows the menus of the first
        wait_for_caption(page, one, "Mamba-2")
    panel.scroll_into_view_if_needed()
    page.screenshot(path=SCREENSHOTS / "mixers.png")
    costs.locator("img.panel-picture").scroll_into_view_if_needed()
    page.screenshot(path=SCREENSHOTS / "mixer-costs.png")
    assert_no_errors(page)
    page.close()


@pytest.mark.nightly
def test_loops_are_added_and_seen_in_both_panels(open_notebook: Callable[[str], Any]) -> None:
    page = open_notebook("looped")
    assert_no_errors(page)
    panel = drag_and_check(page, "slider-loops", 0.6, "after {} loops")
    page.screenshot(path=SCREENSHOTS / "looped.png")
    panel.locator(".choice-pattern select").select_option("gated delta net, full attention")
    states = page.locator(".toolkit-panel", has=page.locator(".slider-context_length")).first
    for one in (panel, states):  # the second panel follows the first
        wait_for_caption(page, one, "gdn full")
    states.locator("img.panel-picture").scroll_into_view_if_needed()
    page.screenshot(path=SCREENSHOTS / "loop-states.png")
    assert_no_errors(page)
    page.close()


@pytest.mark.nightly
def test_a_search_is_stepped_and_a_schedule_is_drawn(open_notebook: Callable[[str], Any]) -> None:
    page = open_notebook("lr_search")
    assert_no_errors(page)
    panel = page.locator(".toolkit-panel", has=page.locator(".search-step")).first
    panel.locator(".search-step").click()
    wait_for_caption(page, panel, "Round 7:")
    drag_and_check(page, "slider-round", 0.3, "Round {}:")
    page.screenshot(path=SCREENSHOTS / "search.png")
    panel.locator(".job-run").click()
    panel.locator(".job-stop:enabled").click()
    words = panel.locator(".job-text").element_handle()
    page.wait_for_function(TEXT_CONTAINS, arg=[words, "stopped after"])
    panel.locator(".search-reset").click()
    wait_for_caption(page, panel, "Round 1:")
    race = page.locator(".toolkit-panel", has=page.locator(".curve-points")).first
    draw_and_check(page, race)
    page.screenshot(path=SCREENSHOTS / "race.png")
    assert_no_errors(page)
    page.close()


def draw_and_check(page: Any, race: Any) -> None:
    """Draw a stroke with the mouse, move a point by keys, remove one: the caption follows."""
    editor, caption = race.locator("svg.curve-editor"), race.locator(".panel-caption")
    editor.scroll_into_view_if_needed()
    # The axes change with the notebook's width: points say where the curve is.
    first, last = (race.locator(".curve-points circle").nth(end) for end in (0, -1))
    left, right = first.bounding_box(), last.bounding_box()
    height = left["y"] - 30
    before = caption.inner_text()
    page.mouse.move(left["x"] + 60, height)
    page.mouse.down()
    page.mouse.move(left["x"] + 0.6 * (right["x"] - left["x"]), height + 10, steps=12)
    page.mouse.up()
    drawn = wait_for_change(page, caption, before)
    # One point a sixteenth of the run: nothing has taken the sliders' eight instead.
    texts = race.locator(".curve-points circle").evaluate_all(
        "points => points.map(point => point.getAttribute('aria-valuetext').split(' ')[1])"
    )
    assert {"19", "25", "31", "38", "44", "50"} < set(texts)
    point = race.locator(".curve-points circle").nth(3)
    words = point.get_attribute("aria-valuetext")
    point.focus()
    page.keyboard.press("Shift+ArrowDown")
    moved = wait_for_change(page, caption, drawn)
    point = race.locator(".curve-points circle").nth(3)
    assert point.get_attribute("aria-valuetext") != words
    assert point.evaluate("point => point === document.activeElement")
    count = race.locator(".curve-points circle").count()
    page.keyboard.press("Delete")
    wait_for_change(page, caption, moved)
    assert race.locator(".curve-points circle").count() == count - 1
    page.wait_for_function(KERNEL_IS_IDLE)
    assert race.locator(".panel-error").inner_text().strip() == ""


def wait_for_change(page: Any, element: Any, old: str) -> str:
    """The text of an element once it is another, and the kernel has no more to say."""
    page.wait_for_function(
        "([element, old]) => element.innerText !== old", arg=[element.element_handle(), old]
    )
    page.wait_for_function(KERNEL_IS_IDLE)
    return element.inner_text()


def test_a_lesson_is_predicted_solved_checked_and_exported(
    open_notebook: Callable[[str], Any],
) -> None:
    page = open_notebook("07_pipeline")  # its guess was 3
    assert_no_errors(page)
    first, second = (page.locator(".toolkit-prediction").nth(at) for at in (0, 1))
    assert "You guessed 3. They idle 27.3%" in first.inner_text()
    assert first.locator("img").count() == 1
    assert "Locked" in second.inner_text()
    code = """
import math
from pathlib import Path
def microbatches_for(devices, bubble):
    return math.ceil((devices - 1) * (1 - bubble) / bubble)
print("checked:", lesson.check("microbatches_for", microbatches_for).words)
print("exported:", len(Path(lesson.export(learner="Ada")).read_text()) > 1000)
"""
    page.evaluate(
        """async code => {
            const panel = window.jupyterapp.shell.currentWidget;
            const cells = panel.content.model.sharedModel;
            cells.insertCell(cells.cells.length, {cell_type: "code", source: code});
            panel.content.activeCellIndex = cells.cells.length - 1;
            await window.jupyterapp.commands.execute("notebook:run-cell");
        }""",
        code,
    )
    page.wait_for_function(KERNEL_IS_IDLE)
    last = page.locator(".jp-OutputArea-output").last
    assert "checked: Right: m >= (p-1)(1-b)/b" in last.inner_text()
    assert "exported: True" in last.inner_text()
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    first.scroll_into_view_if_needed()
    page.screenshot(path=SCREENSHOTS / "lesson.png")
    box = page.locator(".toolkit-hand-in")
    box.scroll_into_view_if_needed()
    box.locator("input").first.fill("Ada")
    box.locator("input").first.press("Enter")
    with page.expect_download() as loading:
        box.locator("a", has_text="Download the page").click()
    assert "Draw 1F1B" in Path(loading.value.path()).read_text()
    page.screenshot(path=SCREENSHOTS / "hand-in.png")
    page.close()


@pytest.mark.nightly
@pytest.mark.parametrize("name", [path.stem for path in sorted(ROOT.glob("tutorials/*.ipynb"))])
def test_every_lesson_is_opened_run_guessed_and_handed_in(
    name: str, open_notebook: Callable[..., Any]
) -> None:
    errors: list[str] = []
    page = open_notebook(f"tutorials/{name}", errors)  # enters its first guess
    assert_no_errors(page)
    assert "You guessed" in page.locator(".toolkit-prediction").first.inner_text()
    assert page.locator(".jp-RenderedImage img, img.panel-picture").count()
    box = page.locator(".toolkit-hand-in")
    box.scroll_into_view_if_needed()
    box.locator("input").first.fill("Ada")
    box.locator("input").first.press("Enter")
    box.locator("a", has_text="Download the page").wait_for()
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.evaluate("window.jupyterapp.shell.collapseLeft()")
    for width in (400, 1300, 1920):  # a telephone, a laptop, a projector
        page.set_viewport_size({"width": width, "height": 1080})
        page.wait_for_timeout(1000)
        page.locator(".toolkit-prediction").first.scroll_into_view_if_needed()
        page.screenshot(path=SCREENSHOTS / f"lesson-{name}-{width}.png")
        for box in page.locator(".toolkit-prediction, .toolkit-hand-in").all():
            box.scroll_into_view_if_needed()
            assert box.evaluate(FITS), (width, box.inner_text())
    assert not errors
    page.close()


def test_the_index_shows_pictures_and_opens_notebooks(open_notebook: Callable[[str], Any]) -> None:
    page = open_notebook("index")
    pictures = page.locator(".jp-RenderedMarkdown img")
    lessons = [*(ROOT / "tutorials").glob("*.ipynb"), *(ROOT / "notebooks").glob("*.ipynb")]
    assert pictures.count() == len(lessons)
    for at in range(pictures.count()):
        picture = pictures.nth(at)
        picture.scroll_into_view_if_needed()
        assert picture.evaluate("image => image.complete && image.naturalWidth") == 300
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    pictures.first.scroll_into_view_if_needed()
    page.screenshot(path=SCREENSHOTS / "index.png")
    link = page.locator(".jp-RenderedMarkdown a", has_text="07 · Draw 1F1B").first
    link.scroll_into_view_if_needed()
    page.screenshot(path=SCREENSHOTS / "index-lessons.png")
    link.click()
    page.wait_for_function(
        "() => jupyterapp.shell.currentWidget.context?.path === 'tutorials/07_pipeline.ipynb'"
    )
    page.close()


@pytest.mark.nightly
def test_nobody_is_kept_out_of_the_index(open_notebook: Callable[[str], Any]) -> None:
    page = open_notebook("index")
    for at in range(page.locator(".jp-RenderedMarkdown").count()):
        page.locator(".jp-RenderedMarkdown").nth(at).scroll_into_view_if_needed()
    # Around it are buttons of JupyterLab, which are not ours.
    assert not serious_violations(page, ".jp-RenderedMarkdown")
    page.close()


@pytest.mark.nightly
def test_a_task_is_dragged_and_a_refusal_says_why(open_notebook: Callable[..., Any]) -> None:
    errors: list[str] = []
    page = open_notebook("pipelines", errors)
    panel = page.locator(".toolkit-panel", has=page.locator("canvas")).nth(1)
    panel.scroll_into_view_if_needed()
    canvas, words = panel.locator("canvas"), panel.locator(".words-moves input")
    box = canvas.bounding_box()
    wide = (box["width"] - 84 - 14) / 41  # a forward; the schedule ends at 41
    y = box["y"] + max(86, 0.12 * box["width"]) + 13
    page.mouse.move(box["x"] + 84 + 0.5 * wide, y)
    page.mouse.down()
    page.mouse.move(box["x"] + 84 + 1.8 * wide, y, steps=6)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    panel.screenshot(path=SCREENSHOTS / "pipelines-dragged.png")
    page.mouse.up()
    page.wait_for_function("box => box.value === 'F0@0 to 1'", arg=words.element_handle())
    page.wait_for_function(KERNEL_IS_IDLE)
    assert panel.locator(".panel-error").inner_text().strip() == ""
    words.fill("B0@0 to 0")
    words.press("Enter")
    error = panel.locator(".panel-error").element_handle()
    page.wait_for_function(TEXT_CONTAINS, arg=[error, "it needs F0@0"])
    canvas.press("Home")
    panel.locator(".scene-play").click()
    page.wait_for_timeout(2000)
    panel.locator(".scene-play").click()
    panel.screenshot(path=SCREENSHOTS / "pipelines-refused.png")
    assert_no_errors(page)
    assert not [said for said in errors if not said.startswith("Failed to load resource")]
    page.close()


def test_a_cable_is_slowed_and_cut_by_mouse_and_by_keyboard(
    open_notebook: Callable[..., Any],
) -> None:
    errors: list[str] = []
    page = open_notebook("collectives", errors)
    panel = page.locator(".toolkit-panel").nth(1)  # the torus, with its stubs
    panel.scroll_into_view_if_needed()
    cables = panel.locator(".picture-spots path")
    cables.first.wait_for(state="attached")
    assert cables.count() == 32
    box = cables.nth(0).bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.click(*middle)
    wait_for_caption(page, panel, "with cable 1 (0,0 – 0,1) at 0.5 times its rate")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "cable-slowed.png")
    page.keyboard.down("Shift")
    page.mouse.click(*middle)
    page.keyboard.up("Shift")
    wait_for_caption(page, panel, "with cable 1 (0,0 – 0,1) cut")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    wait_for_caption(page, panel, "with cable 2 (0,0 – 0,3) at 0.5 times its rate")
    page.keyboard.press("Delete")
    wait_for_caption(page, panel, "with cable 2 (0,0 – 0,3) cut")
    page.screenshot(path=SCREENSHOTS / "cable-cut.png")
    page.keyboard.press("Delete")
    wait_for_caption(page, panel, "with all cables as built")
    assert not [error for error in errors if "spots" in error or "TypeError" in error], errors
