"""What the tests of every panel ask of its controls."""

import itertools
import time
from collections.abc import Iterable
from typing import Any


def quickest_update(panel: Any, control: str, values: Iterable[Any], moves: int = 12) -> float:
    """Seconds of the quickest of some moves of a slider, over and over through the values.

    Time of all threads: no less than an idle machine's clock would show, and what other processes
    take of a busy one is not the panel's.
    """
    slider = panel._control_widgets[control].inputs[0]
    seconds = []
    for value in itertools.islice(itertools.cycle(values), moves):
        start = time.process_time()
        slider.value = value
        seconds.append(time.process_time() - start)
    return min(seconds)
