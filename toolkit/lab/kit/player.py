"""A widget that plays a scene, and a panel that has one above its picture.

Player(scene)                      # plays by itself

class RingPanel(PlayedPanel):      # or with controls: a panel that also says its scene
    def scene(self, view): ...
"""

import base64
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from PIL import Image

from toolkit.figures import Picture, save_figure
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.scene import Scene
from toolkit.lab.kit.still import still

NOT_PLAYED = -1.0
NO_PICK = -1


class Player(anywidget.AnyWidget):
    """A scene that plays: play, step, scrub and speed, by mouse or by keyboard.

    Where the reader prefers no motion, it goes from event to event. A bar is selected by a click;
    where bars are movable, dragging one calls what `on_move` was given.

    Attributes:
        scene: as `Scene.as_json` has it; `show` sets it.
        time: where it stands; -1: it was not played, and shows the scene's `moment`.
        selected: number of the selected bar, or -1.
        movable: whether bars can be dragged to another place of their lane.
        timed, size: plots over the scene's time (left, right, top, bottom) in the picture that
            follows on the page, and that picture's size, in pixels: its clock goes through them.
    """

    _esm = Path(__file__).with_name("player.js")
    _css = Path(__file__).with_name("player.css")
    scene = traitlets.Dict().tag(sync=True)
    time = traitlets.Float(NOT_PLAYED).tag(sync=True)
    selected = traitlets.Int(-1).tag(sync=True)
    movable = traitlets.Bool(False).tag(sync=True)
    timed = traitlets.List().tag(sync=True)
    size = traitlets.List().tag(sync=True)

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
            self.time = NOT_PLAYED
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
    def player(self) -> Player:
        return self.page.above[0]

    def scene(self, view: Any) -> Scene:
        """What the player plays: a pure function of the view."""
        raise NotImplementedError

    def widgets_above(self) -> list[Player]:
        player = Player(layout={"max_width": f"{self.pixels[0]}px"})
        player.add_class("panel-player")
        player.timed, player.size = self.timed(), self.pixels
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
