"""Pipeline schedules as data: tasks per device, their order and cost.

A schedule (`schedule.py`):

* `Schedule`: for each device its ordered tasks; `placement` gives the device of each stage
* `Task`: one forward, backward, input gradient or weight gradient of one microbatch
* `faults`: the errors of a schedule, in words
* `to_csv`, `from_csv`: files in the format of PyTorch's pipelining

The ones the field uses (`orders.py`, `chunked_orders.py`):

* `gpipe`: all forwards, then all backwards
* `one_forward_one_backward`: 1F1B, which holds few activations
* `interleaved`: 1F1B with several chunks per device, its loops depth first
* `breadth_first`: GPipe with several chunks per device
* `zero_bubble_h1`, `zero_bubble_h2`: weight gradients fill the bubble
* `zero_bubble_v`: likewise, with the stages laid out as a V
* `dual_pipe_v`: a V whose forwards stand beside backwards, half of DeepSeek's DualPipe

Found by a program (`toolkit.schedules.search`): steady states, whole schedules, proved optima.

What it costs (`simulation.py`):

* `simulate`: when each task runs, for given durations and a delay between devices
* `Durations`: of a forward, an input gradient and a weight gradient
* `Span`: when a task ran
* `Timeline`: the result: makespan, both bubbles, memory over time, drawn as text

On links that messages and collectives share (`links.py`):

* `simulate_on_links`: tasks and transfers, whose rates are max-min fair, as a `SharedTimeline`
* `Transfer`: data on their way, with the load of every link
* `stage_messages`, `gradient_sums`: the transfers of a schedule
* `fair_rates`: the rates of transfers that share links
"""

from toolkit.schedules.chunked_orders import breadth_first, dual_pipe_v, interleaved, zero_bubble_v
from toolkit.schedules.links import (
    SharedTimeline,
    Transfer,
    fair_rates,
    gradient_sums,
    simulate_on_links,
    stage_messages,
)
from toolkit.schedules.orders import gpipe, one_forward_one_backward, zero_bubble_h1, zero_bubble_h2
from toolkit.schedules.schedule import Schedule, Task, faults, from_csv, to_csv
from toolkit.schedules.simulation import Durations, Span, Timeline, simulate

__all__ = [
    "Durations", "Schedule", "SharedTimeline", "Span", "Task", "Timeline", "Transfer",
    "breadth_first", "dual_pipe_v", "fair_rates", "faults", "from_csv", "gpipe", "gradient_sums",
    "interleaved", "one_forward_one_backward", "simulate", "simulate_on_links", "stage_messages",
    "to_csv", "zero_bubble_h1", "zero_bubble_h2", "zero_bubble_v",
]  # fmt: skip
