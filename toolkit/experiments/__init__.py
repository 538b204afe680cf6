"""Claims about small models, each tested by one command: `toolkit experiment NAME`.

Running
* `EXPERIMENTS`: name -> summary of every experiment
* `load_experiment`: the experiment of a name
* `run_experiment`: run unfinished runs, print table and verdicts, write records and figure
* `show_recorded`: the same from a record, without running anything

Comparing models: `toolkit compare`
* `run_comparison`: match contenders, tune their rates, train all seeds, judge, write the page
* `load_comparison`: the comparison in a folder, with what has been run of it
* `show_comparison`: its page anew, without running anything
* `Comparison`: contenders, text and rule

Describing
* `Experiment`: settings, a function that runs one, claims, a figure
* `Run`: one setting with one seed
* `Workspace`: a run's folder and its progress callback
* `Stopped`: raised by a run that is asked to stop
* `Column`: a number of the table
* `Claim`: a sentence with its judge
* `above`, `below`: judges of a number against a bound, or of settings against each other
* `Verdict`: seen, contradicted, no difference that matters, not shown or void, by the rule of
  `toolkit.experiments.kit.verdicts`
* `power`: how often a true effect is seen with so many seeds
* `Results`: outcomes by setting and seed
* `MissingResultError`: a missing result
* `result_table`: mean and spread as text
"""

from toolkit.experiments.compare.comparison import Comparison
from toolkit.experiments.compare.page import show_comparison
from toolkit.experiments.compare.running import load_comparison, run_comparison
from toolkit.experiments.kit.catalogue import EXPERIMENTS, load_experiment
from toolkit.experiments.kit.experiment import (
    Column,
    Experiment,
    Run,
    Stopped,
    Workspace,
    result_table,
)
from toolkit.experiments.kit.results import MissingResultError, Results
from toolkit.experiments.kit.runner import run_experiment, show_recorded
from toolkit.experiments.kit.verdicts import Claim, Verdict, above, below, power

__all__ = [
    "EXPERIMENTS", "Claim", "Column", "Comparison", "Experiment", "MissingResultError", "Results",
    "Run", "Stopped", "Verdict", "Workspace", "above", "below", "load_comparison",
    "load_experiment", "power", "result_table", "run_comparison", "run_experiment",
    "show_comparison", "show_recorded",
]  # fmt: skip
