"""Small pictures of each lesson's subject, to be told apart in the index."""

import io
from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Circle

from toolkit.figures import ACCENT, FAINT, GRID, INK, WEIGHTS, look, new_figure, style

BLUE, GREEN, ORANGE = (look(name).colour for name in ("full", "window", "gdn"))


def _cost(axes: Axes) -> None:
    x = np.linspace(0, 1, 40)
    axes.plot(x, x**2, color=BLUE)
    axes.plot(x, 0.35 * x, color=ORANGE, linestyle=look("gdn").dashes)


def _honest(axes: Axes) -> None:
    samples = np.array([[0.1], [0.35]]) + np.random.default_rng(0).gamma(4, 0.08, (2, 300))
    for sample, colour in zip(samples, (BLUE, ORANGE), strict=True):
        axes.hist(sample, bins=24, range=(0, 1.4), color=colour, alpha=0.75)


def _ledger(axes: Axes) -> None:
    start = 0
    for size, colour in ((1, BLUE), (1, GREEN), (2, ORANGE), (3, FAINT)):
        axes.barh(0, size, left=start, color=colour, edgecolor="white", linewidth=3)
        start += size


def _mesh(axes: Axes) -> None:
    axes.imshow(np.arange(8).reshape(2, 4), cmap=WEIGHTS, vmin=-4, vmax=12)
    axes.vlines(np.arange(0.5, 3), -0.5, 1.5, color="white", linewidth=4)
    axes.axhline(0.5, color="white", linewidth=4)


def _ring(axes: Axes) -> None:
    angle = np.arange(9) * np.pi / 4
    axes.plot(np.cos(angle), np.sin(angle), color=FAINT)
    for place in angle[:8]:
        axes.add_patch(Circle((np.cos(place), np.sin(place)), 0.2, color=BLUE, zorder=3))
    axes.set_aspect("equal")


def _cut_block(axes: Axes) -> None:
    for part in range(4):
        colour = (BLUE, ORANGE)[part % 2]
        axes.bar(part / 2, 2, 0.45, color=colour, align="edge")
        axes.barh(part / 2, 2, 0.45, left=2.6, color=colour, align="edge")
    axes.set_aspect("equal")


def _pipeline(axes: Axes) -> None:
    for stage in range(4):
        axes.barh([stage] * 4, 0.9, left=stage + np.arange(4), color=BLUE)
        axes.barh([stage] * 4, 0.9, left=10.5 - stage + np.arange(4), color=ORANGE)
    axes.invert_yaxis()


def _cluster(axes: Axes) -> None:
    filled = 0.2 + 0.8 * np.random.default_rng(1).random(8)
    axes.bar(range(8), 1, color=GRID)
    axes.bar(range(8), filled, color=BLUE)


def _killed(axes: Axes) -> None:
    x = np.linspace(0, 1, 60)
    axes.plot(x, np.exp(-3 * x), color=FAINT, linewidth=5)
    axes.plot(x[:30], np.exp(-3 * x[:30]), color=BLUE)
    axes.plot(x[24:], np.exp(-3 * x[24:]), color=BLUE, linestyle=look("gdn").dashes)
    axes.plot(x[29], np.exp(-3 * x[29]), "X", color=ACCENT, markersize=14)


def _memory(axes: Axes) -> None:
    back = np.subtract.outer(np.arange(16), np.arange(16))
    axes.imshow(np.where(back >= 0, 0.8 ** np.maximum(back, 0), 0), cmap=WEIGHTS)


def _skipped(axes: Axes) -> None:
    kept = np.random.default_rng(3).random((12, 12)) < 0.25
    axes.imshow(np.tril(kept | np.eye(12, dtype=bool)), cmap=WEIGHTS, vmax=1.3)


def _loops(axes: Axes) -> None:
    turns = np.linspace(0, 6 * np.pi, 300)
    axes.plot(turns / 4 + np.sin(turns), np.cos(turns), color=BLUE)


def _rates(axes: Axes) -> None:
    x = np.linspace(-1, 1, 60)
    axes.plot(x, x**2 + 0.1, color=BLUE)
    axes.plot([-0.9, 0.8, -0.5, 0.3, 0.02], [0.91, 0.74, 0.35, 0.19, 0.1], "D", color=ORANGE)


def _blocks(axes: Axes) -> None:
    axes.imshow(np.arange(24).reshape(4, 6) // 12, cmap=WEIGHTS, vmin=-1, vmax=3)
    axes.hlines(np.arange(0.5, 3), -0.5, 5.5, color="white", linewidth=2)
    axes.vlines(np.arange(0.5, 5), -0.5, 3.5, color="white", linewidth=2)
    axes.axhline(1.5, color=ACCENT, linewidth=5)


def _trace(axes: Axes) -> None:
    for lane, starts in enumerate(((0, 2.2, 5), (1.2, 4.1), (2.5, 6.2))):
        for start in starts:
            axes.barh(-lane, 0.9 + lane / 3, 0.7, left=start, color=(BLUE, ORANGE, GREEN)[lane])


def _formats(axes: Axes) -> None:
    for row, (exponent, mantissa) in enumerate(((8, 7), (5, 2), (4, 3), (0, 7))):
        for bit in range(1 + exponent + mantissa):
            colour = FAINT if not bit else ORANGE if bit <= exponent else BLUE
            axes.barh(-row, 0.9, 0.75, left=bit, color=colour)


def _routed(axes: Axes) -> None:
    tokens, experts = np.arange(8), (0, 2, 2, 1, 3, 2, 0, 2)
    for token, expert in zip(tokens, experts, strict=True):
        axes.plot([0.0, 2.0], [float(token), 1 + 1.7 * expert], color=FAINT, linewidth=2)
    axes.plot(0 * tokens, tokens, "o", color=BLUE, markersize=9)
    axes.plot([2] * 4, 1 + 1.7 * np.arange(4), "s", color=ORANGE, markersize=16)
    axes.invert_yaxis()


def _tree(axes: Axes) -> None:
    places = [(0.0, 0.0), (-2.0, -1.0), (2.0, -1.0), (-3.0, -2.0), (-1.0, -2.0), (3.0, -2.0)]
    for child, parent in enumerate((0, 0, 1, 1, 2), start=1):
        is_cut = child == 2
        look_of = {"color": ACCENT if is_cut else FAINT, "linewidth": 6 if is_cut else 3}
        axes.plot(*zip(places[parent], places[child], strict=True), **look_of)
    axes.plot(*zip(*places, strict=True), "o", color=BLUE, markersize=15)


def _ticks(axes: Axes) -> None:
    for device in range(4):
        for tick in range(4):
            axes.barh(-device, 0.9, 0.8, left=device + tick, color=BLUE)
            axes.barh(-device, 0.9, 0.8, left=11 - device + tick, color=ORANGE)


def _few_bits(axes: Axes) -> None:
    x = np.linspace(0, 2 * np.pi, 200)
    axes.plot(x, np.sin(x), color=FAINT, linewidth=5)
    axes.step(x, np.round(3 * np.sin(x)) / 3, color=BLUE)
    axes.step(x, np.where(np.sin(x) >= 0, 0.64, -0.64), color=ACCENT, linestyle=look("gdn").dashes)


def _queue(axes: Axes) -> None:
    for request in range(5):
        axes.barh(-request, 2 * request, 0.7, left=request, color=GRID)
        axes.barh(-request, 1.5, 0.7, left=3 * request, color=BLUE)
        axes.barh(-request, 6, 0.7, left=3 * request + 1.7, color=GREEN)


PICTURES: dict[str, Callable[[Axes], None]] = {
    "attention_cost": _cost,
    "honest_benchmark": _honest,
    "memory_ledger": _ledger,
    "meshes": _mesh,
    "ring": _ring,
    "shard_transformer": _cut_block,
    "pipeline": _pipeline,
    "cluster_plan": _cluster,
    "kill_worker": _killed,
    "attention_memory": _memory,
    "skip_and_compress": _skipped,
    "causality_trap": _loops,
    "who_goes_where": _routed,
    "pipeline_on_devices": _ticks,
    "trees_and_cuts": _tree,
    "four_bits": _few_bits,
    "first_token": _queue,
    "known_rates": _rates,
    "own_kernel": _blocks,
    "real_trace": _trace,
    "fewer_bits": _formats,
}


def lesson_picture(name: str, title: str) -> bytes:
    """A PNG of a lesson's subject and number; it holds no answer."""
    with style():
        figure = new_figure(4.8, 2.2)
        axes = figure.add_axes((0.3, 0.1, 0.64, 0.8))
        axes.axis("off")
        PICTURES[name](axes)
        number = title.partition(" ")[0]
        figure.text(0.06, 0.5, number, fontsize=38, fontweight="bold", color=INK, va="center")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
