"""The families of published models, and what their config.json says.

table.py       FAMILIES, one row per `model_type`; NOT_READ, why others are not
family.py      Family, the columns of the table
attention.py   the rows of families of attention alone
recurrent.py   the rows of families with recurrent layers
hybrids.py     those of them with attention and Mamba-2 in turn or side by side
huginn.py      the row of Huginn, which loops
parcae.py      the row of Parcae, which loops
rwkv7.py       the row of RWKV-7
deepseek_v4.py the row of DeepSeek-V4
scalars.py     settings that are fields of ours
rope.py        rotary positions
"""

from toolkit.looped.checkpoints.families.family import PARTS, WORDS, Family
from toolkit.looped.checkpoints.families.table import FAMILIES, NOT_READ, PREFIXES, SOFTMAX

__all__ = ["FAMILIES", "NOT_READ", "PARTS", "PREFIXES", "SOFTMAX", "WORDS", "Family"]
