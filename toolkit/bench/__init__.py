"""Contenders side by side: what `toolkit bench` runs.

* `SUITES`: every suite by name
* `Suite`: a list of cases and the numbers of cores it is run on
* `Case`: contenders that compute the same thing, with the check that they do
* `PlannedCase`: a case that is built when its turn comes
* `Yardstick`: the machine at its best, to which our rate is compared
* `run_suites`: run suites, each in a process of its own, and write one record file a suite
* `run_suite_here`: run one suite in this process
* `run_case`: check, time, print and record one case
* `agree`: the usual check, that all contenders return the same arrays
"""

from toolkit.bench.agreement import agree
from toolkit.bench.harness import Case, PlannedCase, Suite, Yardstick, run_case
from toolkit.bench.suites import SUITES, run_suite_here, run_suites

__all__ = [
    "SUITES", "Case", "PlannedCase", "Suite", "Yardstick", "agree", "run_case", "run_suite_here",
    "run_suites",
]  # fmt: skip
