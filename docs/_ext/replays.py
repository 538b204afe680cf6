"""Panels that move without a kernel: places for `_static/replay.js` below cells of notebooks.

`toolkit export-site` records the panels; a page whose panels are not recorded shows its stills.
"""

import html
import os
from pathlib import Path

from toolkit.lab.site.export import SCRIPTS
from toolkit.lab.site.panels import REPLAYED

DOCS = Path(__file__).parent.parent
STILL = (
    '<p class="replay-still">A still: this picture moves where a kernel runs, on Binder, on Colab '
    "or by <code>toolkit lab</code>.</p>"
)


def add_replays(page, notebook):
    """Adds a place below every cell of a page whose panel is recorded, words below the others."""
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        name = recorded_in(page, "".join(cell["source"]))
        pictures = [one for one in cell["outputs"] if "image/png" in one.get("data", {})]
        for one in pictures:
            words = one["metadata"]["image/png"].get("alt", "")
            cell["metadata"]["mystnb"] = {"image": {"alt": words}}
        if name:
            cell["outputs"].append(output(place(page, name)))
        elif pictures:
            cell["outputs"].append(output(STILL))


def recorded_in(page, source):
    """The name of the recorded panel that a cell shows, or None."""
    for name, replayed in REPLAYED.items():
        where, start = replayed.cell
        is_shown = where == str(page.with_suffix("")) and f"\n{start}" in f"\n{source}"
        if is_shown and (DOCS / SCRIPTS / f"{name}.js").exists():
            return name
    return None


def place(page, name):
    source = os.path.relpath(f"{SCRIPTS}/{name}.js", page.parent)
    return f'<div class="replay" data-replay="{name}" data-source="{html.escape(source)}"></div>'


def output(text):
    return {"output_type": "display_data", "data": {"text/html": text}, "metadata": {}}


def add_module(app, pagename, templatename, context, doctree):
    """The module itself in pages that have a place: browsers read no module from file://."""
    if 'class="replay"' in context.get("body", ""):
        module = (DOCS / "_static/replay.js").read_text(encoding="utf-8")
        app.add_js_file(None, body=module, type="module")


def setup(app):
    app.connect("html-page-context", add_module)
    return {"parallel_read_safe": True}
