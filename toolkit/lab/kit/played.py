"""A panel that has a player above its picture.

class RingPanel(PlayedPanel):      # a panel that also says its scene
    def scene(self, view): ...
"""

import base64
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from toolkit.figures import save_figure
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.scene import Scene
from toolkit.lab.kit.still import still

NO_PICK = -1
BELOW_PIXELS = 44  # the player's buttons and what it says, below what it draws
LANES_LEFT, LANES_WIDTH = 84 / 960, 1 - 14 / 960 - 84 / 960  # the player's lanes, of its width


class PlayedPanel(Panel):
    """A panel with a player between its controls and its picture.

    The player's clock goes through the plots that are timed, and a selected bar and the time at
    rest set controls.

    Attributes:
        player: plays the scene of the view.
        bar_control: name of the control that a selected bar sets, to its pick of the scene.
        time_control: name of the control that counts steps of time from 1, if any.
    """

    bar_control = ""
    time_control = ""

    @property
    def pixels_above(self) -> int:
        return self.scene(self.view).pixels(self.pixels[0]) + BELOW_PIXELS

    @property
    def player(self) -> Any:
        return self.page.above[0]

    scene: Callable[[Any], Scene]
    """What the player plays: a pure function of the view."""

    def widgets_above(self) -> list[Any]:
        from toolkit.lab.kit.page import height_of
        from toolkit.lab.kit.player import Player  # a panel draws without widgets too

        player = Player(layout={"max_width": f"{self.pixels[0]}px"})
        player.add_class("panel-player")
        player.timed, player.size = self.timed(), [*self.pixels, height_of(self)]
        player.observe(self._selected, names="selected")
        player.observe(self._rested, names="time")
        return [player]

    def timed(self) -> list[list[float]]:
        """Left, right, top and bottom of the plots over the scene's time, in pixels."""
        wide, high = self.pixels
        boxes = [plot.axes.get_position() for plot in self._plots if plot.is_timed]
        return [
            [round(x, 1) for x in (wide * b.x0, wide * b.x1, high * (1 - b.y1), high * (1 - b.y0))]
            for b in boxes
        ]

    def _selected(self, change: Any) -> None:
        picks = self.player.scene["picks"] if change["new"] >= 0 else []
        pick = picks[change["new"]] if picks else NO_PICK
        if pick not in (NO_PICK, self.state.get(self.bar_control)):
            self.attempt(self.change, **{self.bar_control: pick})

    def adjust(self, view: Any) -> None:
        self.player.show(self.scene(view))

    def _rested(self, change: Any) -> None:
        if self.time_control and change["new"] > 0:
            step = min(int(change["new"]) + 1, round(self.player.scene["end"]))
            if step != self.state[self.time_control]:
                self.attempt(self.change, **{self.time_control: step})

    def save(self, path: str | os.PathLike, columns: int = 2) -> Path:
        """As of every panel; the scene is a second file, `NAME-scene` with the same ending."""
        path = Path(path)
        save_figure(still(self.scene(self.view)), path.with_stem(f"{path.stem}-scene"), columns)
        return super().save(path, columns)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        data, metadata = super()._repr_mimebundle_(**kwargs)
        whole = _stacked(self.player.still(), self.png)
        data["image/png"] = base64.b64encode(whole).decode()
        return data, metadata


def _stacked(*pictures: bytes) -> bytes:
    """Pictures below one another, as wide as the widest."""
    opened = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
    size = max(frame.width for frame in opened), sum(frame.height for frame in opened)
    whole, top = Image.new("RGB", size, "white"), 0
    for frame in opened:
        whole.paste(frame, (0, top))
        top += frame.height
    buffer = io.BytesIO()
    whole.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
        buffer, format="png", optimize=True
    )
    return buffer.getvalue()
