"""Synthetic tasks, each a dataclass that draws batches from a key, inside a compiled program.

* `Batch`: tokens, targets and which positions are scored
* `Task`: what all of them have
* `Needle`: one value to be found at a distance
* `MultiQueryRecall`: key-value pairs, asked for again later (MQAR)
* `Retrieval`: needles in a haystack of noise, asked for at the end
* `StateBasedRecall`: memory bits addressed by pointers that are swapped
* `WordProblem`: running products in a finite group, parity being that of Z2
* `Group`, `GROUPS`: finite groups by name, as multiplication tables
"""

from toolkit.experiments.tasks.batch import Batch, Task
from toolkit.experiments.tasks.groups import GROUPS, Group
from toolkit.experiments.tasks.needle import Needle
from toolkit.experiments.tasks.pointers import StateBasedRecall
from toolkit.experiments.tasks.recall import MultiQueryRecall
from toolkit.experiments.tasks.retrieval import Retrieval
from toolkit.experiments.tasks.words import WordProblem

__all__ = [
    "GROUPS", "Batch", "Group", "MultiQueryRecall", "Needle", "Retrieval", "StateBasedRecall",
    "Task", "WordProblem",
]  # fmt: skip
