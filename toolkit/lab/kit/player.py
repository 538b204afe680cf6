"""A widget that plays a scene: Player(scene)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from toolkit.figures import Picture
from toolkit.lab.kit.scene import Scene
from toolkit.lab.kit.still import still

NOT_PLAYED = -1.0


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
            follows on the page, and that picture's size, in pixels,
            and how high it is shown: its clock goes through them.
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
