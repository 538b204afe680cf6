"""Schedules searched for: the shortest steady state of a shape, and whole schedules with a bound.

* `Block`: a piece of one microbatch's work, on one or several devices
* `tessel_shape`: the placements V, X, M, NN and K of Tessel's evaluation
* `shape_of`: the placement of any schedule, to search for a better order
* `find_repetend`: the shortest period, by modulo scheduling (extra `search`)
* `Repetend`: its result
* `search_schedule`: the best schedule found, never worse than its bound says
* `Found`: its result: starts, makespan, bound, faults, and the `Schedule`
* `exact_schedule`: the shortest schedule of small cases, proved
* `handcrafted`: the known schedules of a shape's placement, with which a search begins
* `wave_bound`, `wave_plan`: several tasks on the same devices, in waves (Spindle)
* `wave_shape`: such waves as a shape, for the same searches
* `Wave`: tasks side by side
"""

from toolkit.schedules.search.exact import exact_schedule
from toolkit.schedules.search.handcrafted import handcrafted
from toolkit.schedules.search.modulo import Repetend, find_repetend
from toolkit.schedules.search.shapes import Block, shape_of, tessel_shape
from toolkit.schedules.search.waves import Wave, wave_bound, wave_plan, wave_shape
from toolkit.schedules.search.whole import Found, search_schedule

__all__ = [
    "Block", "Found", "Repetend", "Wave", "exact_schedule", "find_repetend", "handcrafted",
    "search_schedule", "shape_of", "tessel_shape", "wave_bound", "wave_plan", "wave_shape",
]  # fmt: skip
