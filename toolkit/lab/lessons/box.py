"""What the boxes of a lesson share: words without a kernel, and Enter."""

import asyncio
import html
from collections.abc import Callable
from typing import Any

import ipywidgets as widgets
from IPython.display import display

from toolkit.lab.kit.panel import WIDGET_VIEW
from toolkit.lab.lessons.drawing import as_base64

TYPED_SECONDS = 0.3
NOT_RUN = (
    "Nothing to type into here? The lesson was not run: run its first cell of code, then this one "
    "(click into it, Shift+Enter)."
)


def narrow() -> widgets.Layout:
    """The place of a field to type in: no wider than a telephone."""
    return widgets.Layout(width="300px", max_width="calc(100% - 4px)")


def on_enter(field: widgets.Text, act: Callable[[], None]) -> None:
    """Call `act` when Enter is pressed in a field, not when the field is left."""

    def pressed(_: Any, content: dict[str, Any], buffers: Any) -> None:
        if content.get("event") == "submit":
            # The browser sends the key before what was typed.
            asyncio.get_running_loop().call_later(TYPED_SECONDS, act)

    field.on_msg(pressed)


class Box(widgets.VBox):
    """Widgets of a lesson, with words for a reader without a kernel.

    Attributes:
        png: a picture; may be empty.
    """

    png = b""

    def words(self) -> str:
        """What a page without widgets shows."""
        raise NotImplementedError

    def alert(self, error: Exception) -> str:
        """An error as a line of the page, which a screen reader speaks at once."""
        return f"<span role='alert'>&#9888; {html.escape(str(error))}</span>"

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        words = self.words()
        data = {
            WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": self.model_id},
            "text/plain": words,
        }
        metadata = {}
        if self.png:
            data["image/png"] = as_base64(self.png)
            metadata["image/png"] = {"width": 960, "alt": words}
        return data, metadata

    def _ipython_display_(self) -> None:
        """Show the bundle by a separate message, for the reasons given in `Panel`."""
        data, metadata = self._repr_mimebundle_()
        display(data, metadata=metadata, raw=True)
