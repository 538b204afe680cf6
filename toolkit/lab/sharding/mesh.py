"""Eight devices as a grid, and the shards of every array of a train step.

Modelled: counted from the specs of `parallel.layout`; no program is run.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from toolkit.figures import FAINT, INK, look
from toolkit.figures.axes import set_limits
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.played import PlayedPanel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.scene import Grid, Kind, Message, Node, Scene
from toolkit.lab.kit.view import Data, View
from toolkit.lab.sharding.stored_steps import (
    BATCH,
    COPIES,
    DEVICES,
    MESHES,
    SCHEMES,
    WIDTH,
    Part,
    Placed,
    place,
    stored_step,
)
from toolkit.measure import in_words
from toolkit.measure.words import counted

BATCH_NAME = "batch"


@dataclass(frozen=True)
class MeshView(View):
    """Every array on the mesh, and one device's shards."""

    mesh: str
    scheme: str
    device: int
    axes: dict[str, int]
    arrays: tuple[Placed, ...]  # the batch, then every parameter in every state

    def bytes_of(self, state: str) -> int:
        """Bytes of a device's shards of one state of all parameters."""
        return sum(array.bytes_per_device for array in self.arrays if array.state == state)

    def bytes_whole(self, state: str) -> int:
        """The same on a single device."""
        return sum(
            array.bytes_per_device * len(array.parts)
            for array in self.arrays
            if array.state == state
        )

    def data(self) -> Data:
        return {
            "array": [array.name for array in self.arrays],
            "state": [array.state for array in self.arrays],
            "spec": [array.spec for array in self.arrays],
            "parts": [len(array.parts) for array in self.arrays],
            "copies": [array.copies for array in self.arrays],
            "per device (bytes)": [array.bytes_per_device for array in self.arrays],
        }

    def sentence(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.axes.items())
        stored = ", ".join(
            f"{in_words(self.bytes_of(state), 'bytes')} of {name}"
            for state, name in (
                ("weights", "weights"), ("gradient", "gradients"), ("optimizer", "Adam's moments"),
            )
        )  # fmt: skip
        total = sum(map(self.bytes_of, COPIES))
        share = total / sum(map(self.bytes_whole, COPIES))
        return (
            f"{DEVICES} devices as {axes}, scheme {self.scheme!r}. Device {self.device} holds "
            f"{stored}: {in_words(total, 'bytes')} in all, {share:.0%} of what one device "
            "alone would hold. Modelled: counted from the layout."
        )

    def footnote(self) -> str:
        return (
            "Numbers in a part: the devices that hold it; framed: the part of the chosen device. "
            "Modelled from the layout."
        )


def who_holds_what(*, mesh: str, scheme: str, device: int) -> MeshView:
    """Every array of the step under a scheme of `parallel.layout` on a mesh such as "2x4"."""
    step = stored_step(mesh, scheme)
    arrays = [place(BATCH_NAME, "input", (BATCH, WIDTH), step.batch, step.axes)]
    for array in step.arrays:
        name = array.path.removesuffix("/kernel").removeprefix("feed_forward/")
        arrays += [
            place(name, state, array.shape, cuts, step.axes) for state, cuts in array.states.items()
        ]
    return MeshView(mesh, scheme, device, step.axes, tuple(arrays))


def box_of(part: Part, pieces: tuple[int, ...]) -> tuple[float, float, float, float]:
    """Left, top, width and height of a part as shares of its array; a vector stands upright."""
    row, column = (*part.start, 0)[:2]
    rows, columns = (*pieces, 1)[:2]
    return column / columns, row / rows, 1 / columns, 1 / rows


HELD, OTHERS = "#a8cfe8", "#eef1f4"


class Boxes(Plot):
    """As many boxes with words in them as there are devices; those not needed are hidden."""

    def __init__(self, axes: Axes, fontsize: float) -> None:
        super().__init__(axes, grid="", xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        boxes = (Rectangle((0, 0), 1, 1, linewidth=0.8, clip_on=False) for _ in range(DEVICES))
        self.boxes = [self.moving(axes.add_patch(box)) for box in boxes]
        self._frame = self.frame(0, 0, 1, 1, linewidth=2)
        self._frame.set_clip_on(False)
        look = {"fontsize": fontsize, "ha": "center", "va": "center"}
        self.words = [self.text(**look) for _ in range(DEVICES)]

    def draw(self, rows: list[tuple[tuple[float, float, float, float], str, bool]]) -> None:
        """Boxes as (left, top, width, height), what is in them, and whether it is the chosen."""
        for box, words in zip(self.boxes[len(rows) :], self.words[len(rows) :], strict=True):
            box.set_visible(False)
            words.set_visible(False)
        for box, words, (bounds, inside, is_chosen) in zip(
            self.boxes, self.words, rows, strict=False
        ):
            left, top, width, height = bounds
            for patch in (box, *((self._frame,) if is_chosen else ())):
                patch.set_bounds(left, top, width, height)
            box.set(visible=True, facecolor=HELD if is_chosen else OTHERS, edgecolor=FAINT)
            words.set(
                visible=True, x=left + width / 2, y=top + height / 2, text=inside,
                fontweight="bold" if is_chosen else "normal",
            )  # fmt: skip


class MeshPlot(Boxes):
    """The devices as a grid with named axes."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, 10)
        axes.set_title("The mesh", pad=19)
        self._across = self.text(0.5, -0.03, ha="center", va="bottom", fontsize=9)
        self._down = self.text(-0.05, 0.5, ha="right", va="center", rotation=90, fontsize=9)

    def show(self, view: MeshView) -> None:
        (down, rows), (across, columns) = view.axes.items()
        cells = []
        for device in range(DEVICES):
            row, column = divmod(device, columns)
            bounds = (column / columns, row / rows, 1 / columns, 1 / rows)
            cells.append((bounds, str(device), device == view.device))
        self.draw(cells)
        self._across.set_text(f"{across} = {columns}")
        self._down.set_text(f"{down} = {rows}")


class ArrayPlot(Boxes):
    """One array in one state: who holds which part."""

    def __init__(self, axes: Axes, name: str, state: str) -> None:
        super().__init__(axes, 7.5)
        self._name, self._state = name, state
        self._spec = self.text(0.5, -0.04, ha="center", va="bottom", fontsize=8, color=INK)

    def show(self, view: MeshView) -> None:
        (array,) = (
            array for array in view.arrays if (array.name, array.state) == (self._name, self._state)
        )
        boxes = [box_of(part, array.pieces) for part in array.parts]
        holders = [part.holders for part in array.parts]
        chosen = [view.device in devices for devices in holders]
        self.draw([*zip(boxes, map(device_range, holders), chosen, strict=True)])
        # Without quotation marks: it stands above a small array.
        self._spec.set_text(array.spec.replace("'", ""))


class BytesPlot(Plot):
    """What the chosen device holds of each state, beside what one device alone would."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Bytes per device", grid="")
        self.name_rows([*COPIES])
        axes.set(xticks=[], ylim=(len(COPIES) - 0.3, -0.4))
        axes.spines["bottom"].set_visible(False)
        hatched = {"color": "white", "edgecolor": FAINT, "hatch": "//"}
        self._whole, self._stored = (
            self.bars_at(range(len(COPIES)), 0.45, is_flat=True, **style)
            for style in (hatched, {"color": look("full").colour})
        )
        self._words = [
            self.text(0, at + 0.46, fontsize=8, va="center") for at in range(len(COPIES))
        ]

    def show(self, view: MeshView) -> None:
        whole = [view.bytes_whole(state) for state in COPIES]
        for at, state in enumerate(COPIES):
            stored = view.bytes_of(state)
            self._whole[at].set_width(whole[at])
            self._stored[at].set_width(stored)
            self._words[at].set_text(
                f"{in_words(stored, 'bytes')} of {in_words(whole[at], 'bytes')}"
            )
        set_limits(self.axes, x=(0, max(whole)))


def device_range(holders: tuple[int, ...]) -> str:
    """Devices in few letters."""
    first, last = holders[0], holders[-1]
    if len(holders) == DEVICES:
        return f"all {DEVICES}"
    if len(holders) > 2 and last - first == len(holders) - 1:
        return f"{first}–{last}"
    return " ".join(map(str, holders))


MESH = Choice(
    "Mesh", "2x4", {name.replace("x", " x "): name for name in MESHES},
    explanation="Rows by columns; what an axis is for follows from the scheme",
)  # fmt: skip
SCHEME = Choice(
    "Scheme", "zero3", {name: name for name in SCHEMES}, explanation="Of parallel.layout"
)
# Where each parameter is drawn: left and width; and how high it is, as shares of the figure.
_COLUMNS = {"up": (0.38, 0.25, 0.16), "down": (0.71, 0.13, 0.22), "norm/scale": (0.9, 0.06, 0.16)}
_ROWS = {"weights": 0.8, "gradient": 0.5, "optimizer": 0.2}


_KINDS = {
    "input": Kind("batch", "#cfd6dc"), "weights": Kind("weights", "#a8cfe8"),
    "gradient": Kind("gradients", "#f4c99b"), "optimizer": Kind("moments", "#b9dfc4"),
}  # fmt: skip
_LETTERS = {"input": "", "weights": "W", "gradient": "dW", "optimizer": "m"}


def device_nodes(axes: dict[str, int], left: float, width: float) -> list[Node]:
    """The devices as the mesh has them, between left and left + width."""
    rows, columns = (max(size - 1, 1) for size in axes.values())
    across = [*axes.values()][1]
    return [
        Node(str(n), left + width * (n % across) / columns, n // across / rows)
        for n in range(DEVICES)
    ]


def mesh_scene(view: MeshView) -> Scene:
    """Array after array is laid out: each part goes to the devices that hold it, and they fill up,
    as far as one device alone would be full."""
    end, kinds = len(view.arrays), [*_KINDS]
    stored = np.array([array.bytes_per_device for array in view.arrays])
    alone = sum(array.bytes_per_device * len(array.parts) for array in view.arrays)
    filled = [0.0, *map(float, np.cumsum(stored) / alone)]
    shares = np.full((end + 1, DEVICES, end), np.inf)
    for at, array in enumerate(view.arrays):
        shares[at + 1 :, :, at] = 1 / len(array.parts)
    names = [f"{a.name.removesuffix('/scale')} {_LETTERS[a.state]}" for a in view.arrays]
    grid = Grid(
        "Share of each array on each device", (0.43, 0, 0.57, 1),
        [f"device {n}" for n in range(DEVICES)], names, [*map(float, range(end + 1))], shares,
    )  # fmt: skip
    return Scene(
        end=float(end), words=view.sentence(), unit="arrays", tall=0.2, grids=(grid,),
        nodes=(Node("all", 0, 0.5), *device_nodes(view.axes, 0.1, 0.3)),
        edges=tuple((0, 1 + device) for device in range(DEVICES)),
        levels=(((0.0,), (0.0,)), *([(range(end + 1), filled)] * DEVICES)),
        kinds=tuple(_KINDS.values()),
        messages=tuple(
            Message(0, 1 + device, at, at + 1, f"1/{len(array.parts)}", kinds.index(array.state))
            for at, array in enumerate(view.arrays)
            for part in array.parts
            for device in part.holders
        ),
        notes=tuple(
            (float(at), f"{array.name}, {_KINDS[array.state].name}, {array.spec}: "
             f"{counted(len(array.parts), 'part')}, {counted(array.copies, 'device')} for each; "
             f"a device keeps {in_words(array.bytes_per_device, 'bytes')}.")
            for at, array in enumerate(view.arrays)
        ),
    )  # fmt: skip


class MeshPanel(PlayedPanel):
    """The shards of one block's train step under a scheme, laid out one after another, and bytes.

    Example:
        >>> panel = MeshPanel(mesh="8x1", scheme="zero1")
        >>> [panel.view.bytes_of(state) for state in ("weights", "optimizer")]
        [131328, 33280]
    """

    title = "Who holds what?"
    figure_size = (9.6, 5.1)

    mesh = MESH
    scheme = SCHEME
    device = Number("Device", 3, low=0, high=DEVICES - 1, explanation="Whose parts are framed")

    compute = staticmethod(who_holds_what)
    scene = staticmethod(mesh_scene)

    def plots(self, figure: Figure) -> list[Plot]:
        places = []
        for name, (left, width, height) in _COLUMNS.items():
            for state, middle in _ROWS.items():
                axes = figure.add_axes((left, middle - height / 2, width, height))
                places.append(ArrayPlot(axes, name, state))
                if name == "up":
                    words = "optimizer\n(2 moments)" if COPIES[state] > 1 else state
                    look: dict[str, Any] = {"ha": "right", "va": "center", "fontweight": "bold"}
                    figure.text(left - 0.015, middle, words, fontsize=9.5, **look)
            heading = {"up": "up [64, 256]", "down": "down [256, 64]", "norm/scale": "norm [64]"}
            figure.text(
                left + width / 2, 0.965, heading[name], ha="center", fontsize=10.5,
                fontweight="bold",
            )  # fmt: skip
        batch = figure.add_axes((0.05, 0.365, 0.2, 0.17))
        batch.set_title("batch [1024, 64]", pad=16)
        return [
            MeshPlot(figure.add_axes((0.05, 0.655, 0.2, 0.215))),
            ArrayPlot(batch, BATCH_NAME, "input"),
            BytesPlot(figure.add_axes((0.09, 0.075, 0.17, 0.195))),
            *places,
        ]
