"""What the tests of every panel ask of its controls."""

import itertools
from collections.abc import Iterable
from typing import Any

from yardstick import assert_quick

MAX_WARM_SECONDS = 0.1


def assert_quick_update(panel: Any, control: str, values: Iterable[Any]) -> None:
    """Moves a slider over and over through the values: its update takes a tenth of a second."""
    slider = panel.page.controls[control].inputs[0]
    ahead = itertools.cycle(dict.fromkeys(values))

    def move() -> None:
        slider.value = next(value for value in ahead if value != slider.value)

    move()
    assert_quick(move, MAX_WARM_SECONDS, what=f"{type(panel).__name__}.{control}")
