"""Reliable numbers: timers, hardware, compiled programs, provenance.

Timing (`timing.py`):

* `time_contenders`: check callables, then time them interleaved
* `speedup`: ratio of two medians; refused unless the check passed
* `Timing`: median, spread and samples of one contender
* `UncheckedRatioError`: what `speedup` raises when it refuses
* `interquartile_range`: the reported spread
* `in_words`: a number with its unit and a fitting prefix; `short`: the same for ticks

Compiled programs (`programs.py`):

* `collectives`: every communication of a program, with bytes and runs
* `Collective`: one of them, from one device's view
* `collective_table`: the same as text
* `program_cost`: FLOPs, bytes and memory as the compiler counts them, as a `ProgramCost`
* `ProgramCost`: those counts, per device

Provenance (`provenance.py`):

* `Record`: one number with kind, device, versions, commit, date and command
* `record`: make one with the provenance of this process
* `write_records`, `read_records`: JSON, there and back unchanged
* `environment`: facts for a bug report, nothing private; `environment_rows`: as text

Hardware (`hardware.py`):

* `hardware`: the machine under this process, as a `Hardware`
* `Hardware`: name, cores, memory and, on request, measured rates
* `matmul_rate`: FLOP/s measured here
* `memory_bandwidth`: bytes/s measured here
* `cpu_name`, `available_cores`, `available_memory`: resources of this process

Published figures (`chips.py`):

* `published_peak`: a maker's figures for an accelerator, as a `Peak` (recorded)
* `Peak`: one row of that table
* `Link`: a connection between its chips
"""

from toolkit.measure.chips import Link, Peak, published_peak
from toolkit.measure.hardware import (
    Hardware,
    available_cores,
    available_memory,
    cpu_name,
    hardware,
    matmul_rate,
    memory_bandwidth,
)
from toolkit.measure.programs import (
    Collective,
    ProgramCost,
    collective_table,
    collectives,
    program_cost,
)
from toolkit.measure.provenance import (
    Record,
    environment,
    environment_rows,
    read_records,
    record,
    write_records,
)
from toolkit.measure.timing import (
    Timing,
    UncheckedRatioError,
    interquartile_range,
    speedup,
    time_contenders,
)
from toolkit.measure.words import in_words, short

__all__ = [
    "Collective", "Hardware", "Link", "Peak", "ProgramCost", "Record", "Timing",
    "UncheckedRatioError", "available_cores", "available_memory", "collective_table", "collectives",
    "cpu_name", "environment", "environment_rows", "hardware", "in_words", "interquartile_range",
    "matmul_rate", "memory_bandwidth", "program_cost", "published_peak", "read_records", "record",
    "short", "speedup", "time_contenders", "write_records",
]  # fmt: skip
