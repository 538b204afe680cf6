"""Panels and questions that need no kernel: places for `_static/replay.js` below notebooks' cells.

`toolkit export-site` records them; a page without recordings shows its stills.
"""

import html
import json
import os
import re
from pathlib import Path

from toolkit.lab.site.export import SCRIPTS
from toolkit.lab.site.panels import shown_in
from toolkit.lab.site.python import EXERCISES

DOCS = Path(__file__).parent.parent
PLAYER = DOCS.parent / "toolkit/lab/kit/player.js"
STILL = (
    '<p class="replay-still">A still: this picture moves where a kernel runs, on Binder, on Colab '
    "or by <code>toolkit lab</code>.</p>"
)


def add_replays(page, notebook):
    """Adds a place below every cell that has a recording, and words below the other pictures."""
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        pictures = [one for one in cell["outputs"] if "image/png" in one.get("data", {})]
        for one in pictures:
            words = one["metadata"]["image/png"].get("alt", "")
            cell["metadata"]["mystnb"] = {"image": {"alt": words}}
        if place := exercise_in(page, "".join(cell["source"])):
            cell["outputs"] = [output(place)]
        facts = recorded_in(page, "".join(cell["source"]))
        if facts:
            facts["folder"] = f"{os.path.relpath(SCRIPTS, page.parent)}/"
            data = "".join(f' data-{key}="{html.escape(words)}"' for key, words in facts.items())
            cell["outputs"].append(output(f'<div class="replay"{data}></div>'))
        elif pictures:
            cell["outputs"].append(output(STILL))


def recorded_in(page, source):
    """What of a cell is recorded: its panel, how that starts, and the question that locks it."""
    facts = {}
    name, start = shown_in(str(page.with_suffix("")), source)
    if name and is_recorded(name):
        facts["replay"] = name
        if start:
            facts["start"] = json.dumps(start)
    if asked := re.search(r'\.predict\("(\w+)"', source):
        lesson = re.sub(r"^\d+_", "", page.stem)
        if not is_recorded(f"questions-{lesson}"):
            return {}  # what is locked stays locked
        facts |= {"lesson": lesson, "guess": asked[1]}
    return facts


def exercise_in(page, source):
    """The place where an exercise is checked in the browser; none if Python was not brought."""
    lesson = re.sub(r"^\d+_", "", page.stem)
    asked = re.search(r'lesson\.check\("(\w+)", \w+\)', source)
    if not asked or asked[1] not in EXERCISES.get(lesson, ()):
        return ""
    if not (DOCS / "_static/python/toolkit.zip").exists():
        return ""
    facts = {
        "folder": f"{os.path.relpath('_static/python', page.parent)}/",
        "lesson": lesson,
        "exercise": asked[1],
        "stub": source.partition("\n\n\nlesson.check")[0],
    }
    data = "".join(f' data-{key}="{html.escape(words)}"' for key, words in facts.items())
    return f'<div class="exercise"{data}></div>'


def is_recorded(name):
    return (DOCS / SCRIPTS / f"{name}.js").exists()


def output(text):
    return {"output_type": "display_data", "data": {"text/html": text}, "metadata": {}}


def add_module(app, pagename, templatename, context, doctree):
    """The modules themselves in pages that have a place: browsers read no module from file://."""
    modules = []
    if 'class="replay"' in context.get("body", ""):
        modules += [player_module(), (DOCS / "_static/replay.js").read_text(encoding="utf-8")]
    if 'class="exercise"' in context.get("body", ""):
        modules.append((DOCS / "_static/exercise.js").read_text(encoding="utf-8"))
    for module in modules:
        app.add_js_file(None, body=module, type="module")


def player_module():
    """The player of scenes, as replay.js finds it on a page."""
    style = json.dumps(PLAYER.with_suffix(".css").read_text(encoding="utf-8"))
    made = f"globalThis.toolkitPlayer = {{ render, style: {style} }};"
    return PLAYER.read_text(encoding="utf-8").replace("export default { render };", made)


def setup(app):
    app.connect("html-page-context", add_module)
    return {"parallel_read_safe": True}
