"""A widget that plays a scene, and a panel that has one above its picture.

Player(scene)                      # plays by itself

class RingPanel(PlayedPanel):      # or with controls: a panel that also says its scene
    def scene(self, view): ...
"""

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from PIL import Image

from toolkit.figures import Picture
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.scene import Scene, still

AT_THE_END = -1.0


class Player(anywidget.AnyWidget):
    """A scene that plays: play, step, scrub and speed, by mouse or by keyboard.

    Where the reader prefers no motion, it goes from event to event. A bar is selected by a click;
    where bars are movable, dragging one calls what `on_move` was given.

    Attributes:
        scene: as `Scene.as_json` has it; `show` sets it.
        time: where it stands; -1 is the end.
        selected: number of the selected bar, or -1.
        movable: whether bars can be dragged to another place of their lane.
    """

    _esm = Path(__file__).with_name("player.js")
    _css = Path(__file__).with_name("player.css")
    scene = traitlets.Dict().tag(sync=True)
    time = traitlets.Float(AT_THE_END).tag(sync=True)
    selected = traitlets.Int(-1).tag(sync=True)
    movable = traitlets.Bool(False).tag(sync=True)

    def __init__(self, scene: Scene | None = None, **values: Any) -> None:
        super().__init__(**values)
        self._movers: list[Callable[[int, int], Any]] = []
        self.on_msg(self._told)
        if scene is not None:
            self.show(scene)

    def show(self, scene: Scene) -> None:
        """Play this from now on; time stays where it is if the scene is as long, and the selection
        if it has the same bars."""
        self._scene, shown, before = scene, scene.as_json(), self.scene
        if before.get("end") != scene.end:
            self.time = AT_THE_END
        if before.get("bars", {}).get("label") != shown["bars"]["label"]:
            self.selected = -1
        self.scene = shown

    def on_move(self, act: Callable[[int, int], Any]) -> None:
        """Call `act(bar, place)` when a bar is dragged: its new place among its lane's bars."""
        self._movers.append(act)
        self.movable = True

    def still(self) -> bytes:
        """The scene as a PNG file, for readers without a kernel."""
        at = self.time if self.time > 0 else None
        return Picture(still(self._scene, at), has_palette=True).png()

    def _told(self, _: Any, content: Any, __: Any) -> None:
        if isinstance(content, dict) and {"bar", "place"} <= content.keys():
            for act in self._movers:
                act(int(content["bar"]), int(content["place"]))


class PlayedPanel(Panel):
    """A panel with a player between its controls and its picture.

    Attributes:
        player: plays the scene of the view.
    """

    @property
    def player(self) -> Player:
        return self.page.above[0]

    def scene(self, view: Any) -> Scene:
        """What the player plays: a pure function of the view."""
        raise NotImplementedError

    def widgets_above(self) -> list[Player]:
        player = Player(layout={"max_width": f"{self.pixels[0]}px"})
        player.add_class("panel-player")
        return [player]

    def adjust(self, view: Any) -> None:
        self.player.show(self.scene(view))

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
