"""Eight devices as a grid, and the shards of every array of a train step."""

from typing import Any

from matplotlib.figure import Figure

from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.sharding.mesh_plots import ArrayPlot, BytesPlot, MeshPlot
from toolkit.lab.sharding.mesh_view import BATCH_NAME, COPIES, MeshView, who_holds_what
from toolkit.lab.sharding.mlp_step import DEVICES, MESHES, SCHEMES

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


class MeshPanel(Panel):
    """The shards of one block's train step under a scheme, and their bytes.

    Example:
        >>> panel = MeshPanel(mesh="8x1", scheme="zero1")
        >>> [panel.view.bytes_of(state) for state in ("weights", "optimizer")]
        [131328, 33280]
    """

    title = "Who holds what?"
    figure_size = (9.6, 5.8)

    mesh = MESH
    scheme = SCHEME
    device = Number("Device", 3, low=0, high=DEVICES - 1, explanation="Whose parts are framed")

    def compute(self, **state: Any) -> MeshView:
        return who_holds_what(**state)

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
