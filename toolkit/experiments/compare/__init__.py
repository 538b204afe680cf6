"""`toolkit compare`: which of several language models is better on a text, matched and tuned.

* `run_comparison`: match contenders, tune their rates, train all seeds, judge, write the page
* `load_comparison`: the comparison in a folder, with what has been run of it
* `show_comparison`: its page anew, without running anything
* `Comparison`: contenders, text and rule
* `MATCHES`: what may be made equal
"""

from toolkit.experiments.compare.comparison import Comparison
from toolkit.experiments.compare.matching import MATCHES
from toolkit.experiments.compare.page import show_comparison
from toolkit.experiments.compare.running import load_comparison, run_comparison

__all__ = ["MATCHES", "Comparison", "load_comparison", "run_comparison", "show_comparison"]
