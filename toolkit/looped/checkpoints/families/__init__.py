"""The families of published models, and what their config.json says.

table.py       FAMILIES, one row per `model_type`; NOT_READ, why others are not
family.py      Family, the columns of the table
attention.py   the rows of families of attention alone
recurrent.py   the rows of families with recurrent layers
huginn.py      the row of Huginn, which loops
scalars.py     settings that are fields of ours
rope.py        rotary positions
"""

from toolkit.looped.checkpoints.families.family import WORDS, Family
from toolkit.looped.checkpoints.families.table import FAMILIES, NOT_READ, PREFIXES, SOFTMAX

__all__ = ["FAMILIES", "NOT_READ", "PREFIXES", "SOFTMAX", "WORDS", "Family"]
