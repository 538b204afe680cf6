"""A text in a looped model, loop by loop: influences on a prediction, state and cost."""

import functools
from typing import Any

from matplotlib.figure import Figure

from toolkit.lab.kit.controls import Choice, Number, Words
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.looped.models import PATTERNS
from toolkit.lab.looped.plots import BestPlot, ChancePlot, InfluencePlot, LossPlot
from toolkit.lab.looped.reader import MAX_LOOPS, MAX_TOKENS
from toolkit.lab.looped.state_plots import loop_plots
from toolkit.lab.looped.state_view import StateView, look_inside
from toolkit.lab.looped.view import LoopView, look

TEXT = "The class statement defines a class object. The class"
ON_OFF = {"on": True, "off": False}


class TextPanel(Panel):
    """The controls of both panels: a text, a byte of it, and the model that reads it."""

    text = Words("Text", TEXT, f"Up to {MAX_TOKENS} bytes; press Enter")
    token = Number(
        "Byte", MAX_TOKENS, low=1, high=MAX_TOKENS, maximum=lambda view: len(view.words),
        explanation="Whose prediction is traced",
    )  # fmt: skip
    loops = Number(
        "Loops", 4, low=1, high=MAX_LOOPS, is_continuous=False,
        explanation="How often the layers run; trained with 4",
    )  # fmt: skip
    window = Number(
        "Window (bytes)", 8, low=1, high=MAX_TOKENS,
        explanation="What a window layer sees, itself included; trained with 8",
    )  # fmt: skip
    pattern = Choice("Layers", "window window", PATTERNS, explanation="A model trained for each")
    output_gate = Choice(
        "Output gate", False, ON_OFF, explanation="The model trained with it, or the one without"
    )
    residual_gate = Choice(
        "Residual gate", True, ON_OFF, explanation="rho as trained, or switched off in that model"
    )


class LoopPanel(TextPanel):
    """The influences on a byte's prediction, and the prediction, after each loop of a trained
    model.

    Example:
        >>> panel = LoopPanel(pattern="window window", window=4)
        >>> panel.loops = 2
        >>> panel.view.reach
        (7, 13)
    """

    title = "What one byte sees, loop by loop"
    figure_size = (9.6, 5.6)

    def __init__(self, **values: Any) -> None:
        # Compiles for each kind of layer, so that no menu waits later.
        compile_ahead()
        super().__init__(**values)

    def compute(self, **state: Any) -> LoopView:
        return look(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        places = {"left": 0.07, "right": 0.982, "top": 0.93, "bottom": 0.125}
        grid = figure.add_gridspec(
            2, 2, **places, width_ratios=(0.605, 0.217), height_ratios=(0.385, 0.3),
            wspace=0.22, hspace=0.35,
        )  # fmt: skip
        plots = (InfluencePlot, BestPlot, ChancePlot, LossPlot)
        return [plot(figure.add_subplot(grid[place])) for place, plot in enumerate(plots)]


class LoopStatePanel(TextPanel):
    """Hidden state, recurrent state, residual gate, attention sink and cost, loop by loop.

    Example:
        >>> panel = LoopStatePanel(pattern="gdn full", loops=3)
        >>> panel.context_length = 4096
        >>> [len(column) for column in panel.data().values()][:2]
        [3, 3]
    """

    title = "What a loop changes, carries and costs"
    figure_size = (9.6, 5.4)

    pattern = Choice("Layers", "gdn full", PATTERNS, explanation="A model trained for each")
    context_length = Number(
        "Context (tokens)", 16384, low=64, high=1 << 20, powers_of_two=True, is_continuous=False,
        explanation="Of the two plots of cost; the slider doubles, the box takes any number",
    )  # fmt: skip

    def compute(self, **state: Any) -> StateView:
        return look_inside(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        boxes = ((0.06, 0.6, 0.4, 0.31), (0.57, 0.6, 0.4, 0.31), (0.06, 0.16, 0.25, 0.27),
                 (0.385, 0.16, 0.265, 0.27), (0.77, 0.16, 0.22, 0.27))  # fmt: skip
        return loop_plots(map(figure.add_axes, boxes))


@functools.cache
def compile_ahead() -> None:
    """Read one text with every model, so that no menu waits for a compiler later: 10 s, once."""
    for pattern in PATTERNS.values():
        look(
            TEXT, token=1, loops=1, pattern=pattern, window=8, output_gate=False,
            residual_gate=True,
        )  # fmt: skip
