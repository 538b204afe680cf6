"""The picture that the README opens with: `python docs/picture.py` writes docs/_static/panel.png.

An instrument as one sees it in JupyterLab, measured on this machine; Chromium takes the picture.
It needs the extra `test` and a Chromium on the path.
"""

import io
import json
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageOps
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/support"))

from jupyterlab_server import jupyterlab  # noqa: E402  (found by the line above)

PICTURE = ROOT / "docs/_static/panel.png"
CODE = """from toolkit.lab import CostPanel
panel = CostPanel(heads=8, head_size=64, window=512)
panel.measure()
panel"""
RUN_ALL = """async () => {
    const app = window.jupyterapp; await app.started;
    const panel = app.shell.currentWidget;
    await panel.context.ready; await panel.sessionContext.ready;
    await panel.sessionContext.session.kernel.info;
    await app.commands.execute('notebook:run-all-cells');
}"""
SECONDS = 300


def screenshot() -> bytes:
    cell = {"cell_type": "code", "source": CODE, "metadata": {}, "outputs": [], "id": "panel",
            "execution_count": None}  # fmt: skip
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = {"cells": [cell], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    with tempfile.TemporaryDirectory() as scratch:
        notebooks, state = Path(scratch) / "notebooks", Path(scratch) / "state"
        notebooks.mkdir()
        (notebooks / "panel.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
        with (
            jupyterlab(notebooks, state, ROOT) as address,
            sync_playwright() as driver,
            driver.chromium.launch(
                executable_path=shutil.which("chromium") or shutil.which("chromium-browser"),
                args=["--no-sandbox", "--disable-gpu"],
            ) as browser,
        ):
            page = browser.new_page(viewport={"width": 1400, "height": 1100})
            page.set_default_timeout(1000 * SECONDS)
            page.goto(f"{address}/lab/tree/panel.ipynb?reset", wait_until="domcontentloaded")
            page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell")
            page.evaluate(RUN_ALL)
            page.wait_for_selector(".toolkit-panel img.panel-picture")
            page.wait_for_timeout(2000)  # for fonts and the last layout
            return page.locator(".toolkit-panel").first.screenshot()


def main() -> None:
    picture = ImageOps.expand(Image.open(io.BytesIO(screenshot())).convert("RGB"), 16, "white")
    picture = ImageOps.expand(picture, 1, "#e3e7eb")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        PICTURE, optimize=True
    )
    print(f"{PICTURE.relative_to(ROOT)}: {picture.size}, {PICTURE.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
