"""The last box of a lesson: a field for the learner's name, and the page to hand in or to keep."""

import html
import os
import sys
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from toolkit.lab.lessons.box import NOT_RUN, Box, narrow, on_enter
from toolkit.lab.lessons.drawing import as_base64

_SERVICES = {
    "Colab": lambda: "google.colab" in sys.modules,
    "Kaggle": lambda: "KAGGLE_KERNEL_RUN_TYPE" in os.environ,
    "Binder": lambda: "BINDER_SERVICE_HOST" in os.environ,
}


def where_progress_lies(path: Path) -> str:
    """Where guesses and solutions are kept, and for how long."""
    place = f"Your progress is kept in {path.resolve()}"
    found = next((name for name, is_here in _SERVICES.items() if is_here()), "")
    if not found:
        return f"{place}."
    return f"{place}, on a machine of {found} that is deleted with the session: download it."


class HandIn(Box):
    """A field for a name and a button that writes the learner's page and offers it to download.

    Args:
        lesson: the `Lesson`.
    """

    def __init__(self, lesson: Any) -> None:
        self._lesson = lesson
        self.name = widgets.Text(
            value=lesson.progress.data["learner"], placeholder="as your teacher knows you",
            description="Your name", style={"description_width": "90px"}, layout=narrow(),
        )  # fmt: skip
        self.room = widgets.Text(
            placeholder="address, if your teacher shows one", description="Room",
            style={"description_width": "90px"}, layout=narrow(),
        )  # fmt: skip
        self.button = widgets.Button(description="Make my page", icon="save")
        self.done = widgets.HTML()
        self.button.on_click(lambda _: self.make())
        for field in (self.name, self.room):
            on_enter(field, self.make)
        place = html.escape(where_progress_lies(lesson.progress.path))
        fields = self.name, self.room, self.button, self.done
        super().__init__([*fields, widgets.HTML(f"<p style='line-height:1.4'>{place}</p>")])
        self.add_class("toolkit-hand-in")

    def make(self) -> None:
        """Write the page, send it to the room if there is one, and show path and links."""
        try:
            page = self._lesson.export(learner=self.name.value.strip())
            sent = ""
            if address := self.room.value.strip():
                from toolkit.lab.lessons.room import send

                sent = f"<br>{html.escape(send(page, address))}"
        except (ValueError, OSError) as error:
            self.done.value = self.alert(error)
            return
        parts = [(page, "text/html", "the page to hand in")]
        if self._lesson.progress.path.exists():
            parts.append((self._lesson.progress.path, "application/x-ndjson", "my progress"))
        links = " &middot; ".join(_download(*part) for part in parts)
        self.done.value = f"<p>Written: {html.escape(str(page.resolve()))}{sent}<br>{links}</p>"

    def words(self) -> str:
        return f"A field for your name, and a button that makes your page to hand in.\n{NOT_RUN}"


def _download(path: Path, kind: str, words: str) -> str:
    """A link that saves a file through the browser, wherever the kernel runs."""
    source = f"data:{kind};base64,{as_base64(path.read_bytes())}"
    name = html.escape(path.name, quote=True)
    return f"<a download='{name}' href='{source}'>Download {words}</a>"
