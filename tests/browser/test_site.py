"""A panel replayed without a kernel and without a server, in a real Chromium with a real mouse."""

import functools
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from axe import serious_violations
from test_browser import SCREENSHOTS, find_chromium, pytestmark  # noqa: F401

from toolkit.lab import MixerCostPanel, PipelinePanel, WritingPanel
from toolkit.lab.lessons.catalogue import load_outline
from toolkit.lab.site.python import vendor
from toolkit.lab.site.questions import record_questions
from toolkit.lab.site.replay import as_script, record_panel

STATIC = Path(__file__).resolve().parents[2] / "docs/_static"
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Replay</title>
<link rel="stylesheet" href="site.css"><body><div class="cell_output"><img alt="still">
<div class="output text_html">
<div class="replay" data-folder="./" data-replay="costs"></div></div></div>
<div class="replay" data-folder="./" data-lesson="pipeline" data-guess="gpipe_bubble"
 data-replay="costs" data-start='{{"left": "Linear attention"}}'></div>
<script type="module">{module}</script></body></html>"""


def drag(page: Any, slider: Any, fraction: float) -> None:
    """Take the slider's handle, which is in its middle, and put it at `fraction` of its width."""
    box = slider.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 2, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + fraction * box["width"], middle, steps=8)
    page.mouse.up()


def test_a_dragged_slider_shows_what_the_view_says(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    panel, contexts = MixerCostPanel(context_length=4096), (128, 4096, 1 << 20)
    recorded = record_panel(panel, {"context_length": contexts, "left": ("linear", "retention")})
    (tmp_path / "costs.js").write_text(as_script("costs", recorded))
    questions = as_script("questions-pipeline", record_questions("pipeline"))
    (tmp_path / "questions-pipeline.js").write_text(questions)
    module = (STATIC / "replay.js").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(PAGE.format(module=module), encoding="utf-8")
    shutil.copy(STATIC / "site.css", tmp_path)
    question = load_outline("pipeline").question("gpipe_bubble")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=find_chromium(), headless=True, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((tmp_path / "page.html").as_uri())
        slider, caption = page.locator(".slider-context_length"), page.locator(".replay-caption")
        slider.wait_for(timeout=60_000)
        page.locator("summary").click()

        def shows(**state: Any) -> None:
            view = panel.compute(**{**panel.state, **state})
            assert caption.inner_text() == view.sentence()
            assert page.locator(".replay svg").get_attribute("aria-label") == view.sentence()
            cells = page.locator(".replay td").all_inner_texts()
            assert cells == [cell for row in view.table().rows for cell in row]
            assert view.cell_of("moved", "left") in page.locator(".replay svg").text_content()

        assert not page.locator("img").is_visible()
        shows(context_length=4096)
        drag(page, slider, 0.97)
        assert page.locator(".box-context_length").input_value() == str(1 << 20)
        assert slider.get_attribute("aria-valuetext") == "1,048,576"
        shows(context_length=1 << 20)
        page.locator(".choice-left").select_option("Linear attention")
        shows(context_length=1 << 20, left="linear")
        slider.focus()
        page.keyboard.press("Home")  # by keys
        shows(context_length=128, left="linear")
        page.locator(".box-context_length").fill("5000")  # by a number, the nearest one
        page.keyboard.press("Tab")
        assert page.locator(".box-context_length").input_value() == "4096"
        shows(context_length=4096, left="linear")
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / "replay.png")
        place = page.locator(".replay").nth(1)
        place.scroll_into_view_if_needed()
        place.locator("button").wait_for(timeout=60_000)
        assert question.answer().words not in page.content()
        assert place.locator("svg").count() == 0  # locked
        place.locator("input").fill("many")
        place.locator("button").click()
        assert place.locator(".replay-error").inner_text().startswith("Wanted a number")
        place.locator("input").fill("5")
        page.keyboard.press("Enter")
        answer = place.locator(".replay-answer").inner_text()
        assert answer == f"You guessed 5. {question.answer().words}"
        place.locator("svg").first.wait_for(timeout=60_000)
        page.reload()  # what was guessed is kept
        place.scroll_into_view_if_needed()
        place.locator("svg").first.wait_for(timeout=60_000)
        assert place.locator(".replay-answer").inner_text() == answer
        assert (
            place.locator("input[type=text]").get_attribute("aria-label")
            == "Your guess, in per cent"
        )
        assert place.locator(".choice-left").evaluate("menu => menu.selectedOptions[0].text") == (
            "Linear attention"
        )
        assert not errors
        browser.close()


TEXT = "one two three four five six"
PLAYED = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Replay</title>
<link rel="stylesheet" href="site.css"><body style="width:1000px">
<div class="replay" data-folder="./" data-replay="played"></div>
<div class="replay" data-folder="./" data-replay="written"></div>
<script type="module">{player}</script><script type="module">{module}</script></body></html>"""


def test_a_scene_plays_without_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    monkeypatch.syspath_prepend(str(STATIC.parent / "_ext"))
    from replays import player_module

    panel = PipelinePanel(times=1.0, delay=0.5)
    recorded = record_panel(panel, {"schedule": ("1F1B", "GPipe"), "device": (0, 1, 2)})
    (tmp_path / "played.js").write_text(as_script("played", recorded))
    recorded = record_panel(
        WritingPanel(system="window", prompt=2, text=TEXT, token=1), {"token": range(1, 7)}
    )
    (tmp_path / "written.js").write_text(as_script("written", recorded))
    module = (STATIC / "replay.js").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(PLAYED.format(module=module, player=player_module()))
    shutil.copy(STATIC / "site.css", tmp_path)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=find_chromium(), headless=True, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1100, "height": 1000})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((tmp_path / "page.html").as_uri())
        page.locator(".scene-play").nth(1).wait_for(timeout=60_000)
        said = page.locator(".replay-caption").all_inner_texts
        written = page.locator("canvas").nth(1)
        written.press("Home")
        for _ in range(3):  # where time rests is the word of the caption, and the clock stays there
            written.press("ArrowRight")
        assert page.locator(".box-token").input_value() == "4"
        assert "“four” (word 4)" in said()[1]
        assert page.locator(".scene-clock").nth(1).inner_text() == "3 / 6 words"
        assert page.locator(".box-device").input_value() == "0"
        page.locator("canvas").first.press("Shift+ArrowRight")
        for device in (1, 2):  # the device of the bar that is chosen is the control's
            page.locator("canvas").first.press("Shift+ArrowDown")
            assert page.locator(".box-device").input_value() == str(device)
            assert f"Device {device} is drawn boldly" in said()[0]
        page.locator(".replay").nth(1).evaluate("place => place.remove()")
        assert page.locator(".scene-clock").inner_text() == "41 / 41 forwards"
        page.locator(".choice-schedule").select_option("GPipe")
        assert page.locator(".scene-clock").inner_text() == "36 / 36 forwards"
        page.locator("canvas").press("Home")
        page.locator(".scene-play").click()
        page.wait_for_timeout(1500)
        page.locator(".scene-play").click()
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / "site-played.png")
        assert 0 < float(page.locator(".scene-clock").inner_text().split()[0]) < 36
        assert not errors


EXERCISED = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Exercise</title>
<link rel="stylesheet" href="site.css"><body><div class="exercise" data-folder="python/"
 data-lesson="{lesson}" data-exercise="{exercise}" data-stub="def {exercise}(): ..."></div>
<script type="module">{module}</script></body></html>"""
PLAIN = """
def busy(events):
    total, reached = 0, float("-inf")
    for _, start, end in sorted(events, key=lambda event: event[1]):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
"""


@pytest.mark.nightly
@pytest.mark.parametrize("width", [400, 1300])
def test_nobody_is_kept_out_of_a_question_or_a_panel(tmp_path: Path, width: int) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    recorded = record_panel(MixerCostPanel(context_length=4096), {"context_length": (128, 4096)})
    (tmp_path / "costs.js").write_text(as_script("costs", recorded))
    questions = as_script("questions-pipeline", record_questions("pipeline"))
    (tmp_path / "questions-pipeline.js").write_text(questions)
    module = (STATIC / "replay.js").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(PAGE.format(module=module), encoding="utf-8")
    shutil.copy(STATIC / "site.css", tmp_path)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=find_chromium(), headless=True, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.goto((tmp_path / "page.html").as_uri())
        page.locator("form input").first.fill("5")
        page.keyboard.press("Enter")
        page.locator(".replay-answer").wait_for(timeout=60_000)
        page.locator("svg").nth(1).wait_for(timeout=60_000)
        assert not serious_violations(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()


@pytest.mark.nightly
def test_an_exercise_is_checked_by_python_in_the_browser(tmp_path: Path) -> None:
    """Needs npm and, once, its registry; the page itself is served with no other network."""
    playwright = pytest.importorskip("playwright.sync_api")
    for name in ("exercise.py", "site.css"):
        shutil.copy(STATIC / name, tmp_path)
    try:
        assert len([*vendor(tmp_path)]) == 7
    except ValueError as error:
        pytest.skip(str(error))
    module = (STATIC / "exercise.js").read_text(encoding="utf-8")
    page_of = {"lesson": "real_trace", "exercise": "busy", "module": module}
    (tmp_path / "page.html").write_text(EXERCISED.format(**page_of), encoding="utf-8")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with server, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=find_chromium(), headless=True, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 900, "height": 600})
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"http://127.0.0.1:{server.server_port}/page.html")

        def check(source: str, state: str) -> str:
            page.locator("textarea").fill(source)
            page.locator("button").click()
            page.locator(f'.exercise[data-state="{state}"]').wait_for(timeout=200_000)
            return page.locator("[role=status]").inner_text()

        long = "def busy(events): return sum(end - start for _, start, end in events)"
        assert "what runs at the same time counts once" in check(long, "wrong")
        assert "\N{CHECK MARK} Right: a moment counts once" in check(PLAIN, "right")
        assert "raised SyntaxError" in check("def busy(", "wrong")
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        check(PLAIN, "right")
        page.screenshot(path=SCREENSHOTS / "exercise.png")
        assert not serious_violations(page)
        page.evaluate("document.querySelector('textarea').removeAttribute('aria-label')")
        assert serious_violations(page)  # the control: a field without a name is found
        page.reload()
        assert page.locator("textarea").input_value() == PLAIN
        assert all(url.startswith("http://127.0.0.1:") for url in asked)
        browser.close()
        server.shutdown()
