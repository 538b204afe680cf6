"""Axes with units at their ticks."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from toolkit._checks import checked
from toolkit.measure import short


@checked
def log_axes(axes: Axes, *, x_unit: str, y_unit: str) -> None:
    """Logarithmic axes with units at their ticks: 1k, 32k, 1M tokens; 1 ms, 1 s; 64 KiB, 1 GiB.

    Args:
        axes: changed in place.
        x_unit: as in `in_words`; `"tokens"` ticks at powers of two.
        y_unit: as in `in_words`; `"bytes"` ticks at powers of two.

    Example:
        >>> axes = new_figure().add_subplot()
        >>> log_axes(axes, x_unit="tokens", y_unit="seconds")
        >>> axes.xaxis.get_major_formatter()(32 * 1024)
        '32k'
    """
    for axis, scale, unit in (
        (axes.xaxis, axes.set_xscale, x_unit),
        (axes.yaxis, axes.set_yscale, y_unit),
    ):
        base = 2 if unit in ("tokens", "bytes") else 10
        scale("log", base=base)
        axis.set_major_locator(LogLocator(base=base, numticks=7))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _, unit=unit: short(value, unit)))


def log_ticks(axis: Axis, *parts: float, count: int | None = None) -> None:
    """Ticks of a logarithmic axis in plain numbers, at these parts of every power of ten."""
    axis.set_major_locator(LogLocator(subs=parts or (1,), numticks=count))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")


def few_log_ticks(axis: Axis, low: float, high: float) -> None:
    """Plain numbers on a logarithmic axis, as dense as its limits allow."""
    span = high / low
    log_ticks(axis, *((1, 1.2, 1.5, 2, 3) if span < 4 else (1, 2, 5) if span < 300 else (1,)))


def count_ticks(axis: Axis, count: int) -> None:
    """At most `count` ticks, with commas between thousands."""
    axis.set_major_locator(MaxNLocator(count))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def round_up(value: float, steps: Sequence[float] = (1, 2, 5, 10), base: int = 10) -> float:
    """The next of 1, 2, 5, 10, 20, ... (or other steps), for a limit that rarely changes."""
    power = float(base) ** math.floor(math.log(value, base))
    return next(step * power for step in steps if step * power >= value * (1 - 1e-9))


def set_limits(axes: Axes, **limits: tuple[float, float]) -> bool:
    """Set limits of x and y only if they differ, because setting them redraws the whole figure."""
    now = {"x": axes.get_xlim(), "y": axes.get_ylim()}
    new = {name: pair for name, pair in limits.items() if tuple(pair) != now[name]}
    axes.set(**{f"{name}lim": pair for name, pair in new.items()})
    return bool(new)
