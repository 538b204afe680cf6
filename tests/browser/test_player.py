"""The player of scenes on a page without a kernel, in a real Chromium."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_browser import SCREENSHOTS, find_chromium
from test_browser import pytestmark as of_the_browser

pytest.importorskip("anywidget")

from toolkit.lab.kit.scene import Bar, Grid, Kind, Message, Node, Scene

pytestmark = of_the_browser
SOURCE = Path(__file__).resolve().parents[2] / "toolkit/lab/kit/player.js"

SHOW = """async ([source, style, values]) => {
    document.body.innerHTML = `<style>${style}</style><div id="here" style="width:900px"></div>`;
    const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    const { default: player } = await import(url);
    window.sent = [];
    window.values = values;
    const began = performance.now();
    player.render({ el: document.getElementById("here"), model: {
        get: (name) => values[name], set: (name, value) => { values[name] = value; },
        save_changes() {}, on() {}, send: (message) => window.sent.push(message),
    } });
    return performance.now() - began;
}"""
FRAMES = """async () => {
    const canvas = document.querySelector("canvas"), all = [];
    document.querySelector(".scene-play").click();
    await new Promise((done) => {
        const count = (now) => {
            all.push(now);
            if (all.length < 90) requestAnimationFrame(count); else done();
        };
        requestAnimationFrame(count);
    });
    document.querySelector(".scene-play").click();
    return all;
}"""
TWO = Scene(
    end=4.0, words="Two devices.", unit="units",
    nodes=(Node("0", 0.2, 0.5), Node("1", 0.8, 0.5)), edges=((0, 1),),
    messages=(Message(0, 1, 1, 2, "F0"), Message(1, 0, 3, 4, "B0", 1)),
    lanes=("device 0", "device 1"), kinds=(Kind("forward", "#a8cfe8"), Kind("backward", "#2f7fb8")),
    bars=(Bar(0, 0, 1, "F0"), Bar(0, 1, 2, "F1"), Bar(1, 2, 3, "B0", 1)),
)  # fmt: skip
DEVICES, EACH = 64, 200


def large() -> Scene:
    """64 devices on a torus that send 200 messages each."""
    nodes = tuple(Node(str(n), n % 8 / 7, n // 8 / 7) for n in range(DEVICES))
    edges = [(n, n // 8 * 8 + (n + 1) % 8) for n in range(DEVICES)]
    edges += [(n, (n + 8) % DEVICES) for n in range(DEVICES)]
    messages = [
        Message(n, edges[n + DEVICES * (k % 2)][1], k, k + 1.5)
        for k in range(EACH)
        for n in range(DEVICES)
    ]
    bars = [Bar(n, k, k + 0.8, str(k), k % 2) for k in range(EACH) for n in range(DEVICES)]
    return Scene(
        EACH + 1.0, "A torus.", "steps", nodes, tuple(edges), 0.45, tuple(messages),
        tuple(map(str, range(DEVICES))), tuple(bars), TWO.kinds,
    )  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    arguments = ["--no-sandbox", "--disable-gpu", "--no-first-run"]
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=find_chromium(), args=arguments)


def shown(page: Any, scene: Scene, **values: Any) -> float:
    given = {"scene": scene.as_json(), "time": 0.0, "selected": -1, "movable": False} | values
    return page.evaluate(SHOW, [SOURCE.read_text(), SOURCE.with_suffix(".css").read_text(), given])


def test_a_scene_is_played_moved_and_read_by_keyboard(browser: Any) -> None:
    page = browser.new_page(viewport={"width": 960, "height": 500})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    shown(page, TWO, movable=True)
    canvas = page.locator("canvas")
    canvas.focus()
    for key, wanted in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 4)):
        canvas.press(key)
        assert page.evaluate("values.time") == wanted, key
    canvas.press("Home")
    canvas.press("Shift+ArrowRight")
    canvas.press("Shift+ArrowRight")
    assert page.locator(".scene-words").inner_text() == "F1: 1 to 2 units on device 0"
    canvas.press("Alt+ArrowLeft")
    assert page.evaluate("sent") == [{"bar": 1, "place": 0}]
    canvas.press("Shift+ArrowDown")
    assert page.evaluate("values.selected") == 2
    # The first task is dragged behind the second.
    box = canvas.bounding_box()
    wide = (900 - 84 - 14) / 4
    y = box["y"] + box["height"] - 22 - 26 - 13
    page.mouse.move(box["x"] + 84 + wide / 2, y)
    page.mouse.down()
    page.mouse.move(box["x"] + 84 + 1.8 * wide, y, steps=5)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "player-dragged.png")
    page.mouse.up()
    assert page.evaluate("sent[1]") == {"bar": 0, "place": 1}
    assert not errors


def test_a_heading_wider_than_its_cells_goes_on_below(browser: Any) -> None:
    name = "Each word a row: what it read of all that was there"
    grid = Grid(name, (0.5, 0, 0.4, 1), [""] * 3, [""] * 3, [0.0], np.ones((1, 3, 3)))
    scene = dataclasses.replace(TWO, grids=(grid,), tall=0.3)
    page, drawn = browser.new_page(viewport={"width": 960, "height": 700}), {}
    page.evaluate("""() => {
        const before = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
            (window.drawn ??= []).push([text, Math.round(y), this.measureText(text).width]);
            before.call(this, text, x, y);
        };
    }""")
    for width in (900, 384):
        values = {"scene": scene.as_json(), "time": 0.0, "selected": -1, "movable": False}
        script = SHOW.replace("900px", f"{width}px").replace(
            "const began", "window.drawn = []; const began"
        )
        page.evaluate(script, [SOURCE.read_text(), "", values])
        found = [row for row in page.evaluate("window.drawn") if row[0] and row[0] in name]
        drawn[width] = [text for text, *_ in sorted(found, key=lambda row: row[1])]
        assert all(wide <= 0.4 * (width - 16) for _, _, wide in found)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "player-narrow.png")
    assert [" ".join(dict.fromkeys(lines)) for lines in drawn.values()] == [name] * 2
    assert len(set(drawn[384])) > len(set(drawn[900]))


def test_cells_change_notes_follow_and_the_clock_goes_through_the_plots_below(browser: Any) -> None:
    values = np.array([[[1.0, -0.5, np.inf]], [[np.nan, 0.25, 1.0]]])
    grid = Grid("Words", (0, 0, 1, 1), [""], [""] * 3, [0.0, 2.0], values, ["cat", "sat", "mat"])
    scene = dataclasses.replace(
        TWO, nodes=(), edges=(), messages=(), grids=(grid,), notes=((0, "It starts."), (2, "Now.")),
    )  # fmt: skip
    page = browser.new_page(viewport={"width": 960, "height": 700})
    shown(page, scene, timed=[[100, 500, 10, 90]], size=[960, 100])
    words, canvas = page.locator(".scene-words"), page.locator("canvas")
    assert words.inner_text() == "It starts."
    box = canvas.bounding_box()
    found = []
    for at in ("Home", "End"):
        canvas.press(at)
        for part in (0.2, 0.5, 0.8):
            page.mouse.move(box["x"] + part * box["width"], box["y"] + 60)
            found.append(words.inner_text())
        page.mouse.move(0, 690)
    assert found == [
        "Words: cat: 100 %", "Words: sat: -50 %", "Words: mat: not yet",
        "Words: cat: gone", "Words: sat: 25 %", "Words: mat: 100 %",
    ]  # fmt: skip
    assert words.inner_text() == "Now."
    page.screenshot(path=SCREENSHOTS / "player-cells.png")
    canvas.press("Home")
    canvas.press("ArrowRight")
    canvas.press("ArrowRight")
    assert page.evaluate("values.time") == 2
    assert page.locator(".scene-over line").get_attribute("x1") == "300"


def test_a_node_its_lane_and_its_messages_are_found_together(browser: Any) -> None:
    page = browser.new_page(viewport={"width": 960, "height": 500})
    shown(page, TWO, time=1.5)
    inks = """() => {
        const canvas = document.querySelector("canvas"), pen = canvas.getContext("2d");
        const all = pen.getImageData(0, 0, canvas.width, canvas.height).data, accent = [0];
        for (let at = 0; at < all.length; at += 4)
            if (all[at] === 179 && all[at + 1] === 36 && all[at + 2] === 91) accent[0]++;
        return accent[0];
    }"""
    before, box = page.evaluate(inks), page.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + 38 + 0.2 * (900 - 76), box["y"] + 38 + 0.5 * (126 - 86))
    assert page.locator(".scene-words").inner_text() == "0"
    assert page.evaluate(inks) > before + 60  # the frame of the node, and its lane's name


def test_a_handle_is_dragged_along_its_axis(browser: Any) -> None:
    page = browser.new_page(viewport={"width": 600, "height": 300})
    drags = SOURCE.with_name("drags.js").read_text()
    box = {"name": "Token", "axis": "x", "box": [100, 300, 20, 80], "at": 150}
    values = {"places": [box, box | {"axis": "y", "at": 50}], "size": [480, 100]}
    page.evaluate(
        SHOW.replace("900px", "480px"), [drags, ".picture-drags{position:absolute}", values]
    )
    root = page.locator("#here").bounding_box()
    for start, end in (((150, 25), (250, 30)), ((290, 50), (290, 35))):
        page.mouse.move(root["x"] + start[0], root["y"] + start[1])
        page.mouse.down()
        page.mouse.move(root["x"] + end[0], root["y"] + end[1], steps=3)
        page.mouse.up()
    sent = page.evaluate("sent")
    assert [one["place"] for one in sent] == sorted(one["place"] for one in sent)
    last = {one["place"]: one["share"] for one in sent}
    assert last == {0: 0.75, 1: 0.75}


def test_the_largest_scene_is_quick(browser: Any) -> None:
    page = browser.new_page(viewport={"width": 960, "height": 1000})
    assert shown(page, large()) < 1000  # milliseconds to the first frame
    frames = page.evaluate(FRAMES)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "player-large.png")
    gaps = sorted(after - at for at, after in itertools.pairwise(frames))
    assert gaps[len(gaps) // 2] < 1000 / 55, gaps
    files = (SOURCE, SOURCE.with_suffix(".css"))
    assert sum(path.stat().st_size for path in files) < 60_000


def test_without_motion_it_goes_from_event_to_event(browser: Any) -> None:
    page = browser.new_page(reduced_motion="reduce")
    shown(page, TWO)
    page.locator(".scene-play").click()
    seen = set()
    for _ in range(30):
        seen.add(page.locator("input").input_value())
        page.wait_for_timeout(60)
    assert seen <= {"0", "1", "2", "3", "4"}
    assert len(seen) > 1
    page.locator(".scene-play").click()
