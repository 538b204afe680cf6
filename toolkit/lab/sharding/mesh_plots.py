"""The plots of `MeshPanel`: the grid of devices, each array in parts, and bytes per device."""

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from toolkit.figures import FAINT, INK, look
from toolkit.figures.axes import set_limits
from toolkit.lab.kit.plot import Plot
from toolkit.lab.sharding.mesh_view import COPIES, MeshView, Placed, box_of
from toolkit.lab.sharding.mlp_step import DEVICES
from toolkit.measure import in_words

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
        self.draw(
            [
                (
                    box_of(part, array.pieces),
                    device_range(part.holders),
                    view.device in part.holders,
                )
                for part in array.parts
            ]
        )
        self._spec.set_text(short_spec(array))


class BytesPlot(Plot):
    """What the chosen device holds of each state, beside what one device alone would."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Bytes per device", grid="")
        self.name_rows([*COPIES])
        axes.set(xticks=[], ylim=(len(COPIES) - 0.3, -0.4))
        axes.spines["bottom"].set_visible(False)
        whole = axes.barh(range(len(COPIES)), 0, 0.45, color="white", edgecolor=FAINT, hatch="//")
        stored = axes.barh(range(len(COPIES)), 0, 0.45, color=look("full").colour)
        self._whole, self._stored = (list(map(self.moving, bars)) for bars in (whole, stored))
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


def short_spec(array: Placed) -> str:
    """The spec without quotation marks: it stands above a small array."""
    return array.spec.replace("'", "")
