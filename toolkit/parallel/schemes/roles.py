"""The role of a parameter in tensor parallelism, by its path: a table.

A block has two pairs of products. The first of a pair is cut by columns, so that each device
computes its own heads or hidden units; the second is cut by rows and contracts these, so that one
all-reduce ends the pair (Shoeybi et al., "Megatron-LM", 2019, section 3).
"""

import re
from typing import Any, NamedTuple


class Role(NamedTuple):
    """A row of the table: parameters whose paths match `pattern` are cut along `dimension` (None:
    never)."""

    pattern: str
    dimension: int | None
    reason: str


_OF_HEADS = "query|key|value|value_mix|gate|decay|write|erase|forget|rate"
_PER_HEAD = "log_rate|step_bias|skip|correction|feedback|bonus|removal_scale|replacement"

_MIXER = r"mixer/(?:(?:attention|mamba)/)?"
"""A mixer, or one of the two parts of a "hybrid" layer."""

# The first match counts; parameters without a match are replicated.
ROLES = (
    Role(
        r"(^|/)(embedding/embedding|unembedding|head_bias)$",
        0,
        "rows: a part of the vocabulary each",
    ),
    Role(
        rf"{_MIXER}(query_key_value|input)/kernel$",
        None,
        "fused: its columns are not in heads' order",
    ),
    Role(rf"{_MIXER}convolution/", None, "its channels are those of a fused projection"),
    Role(r"mixer/(indexer|branch_gate)/", None, "chooses for all heads"),
    Role(rf"{_MIXER}\w+/down/kernel$", None, "low rank: what every head reads"),
    Role(
        rf"{_MIXER}((query|latent)_down|rope_key)/kernel$", None, "a latent: what every head reads"
    ),
    Role(rf"{_MIXER}(query|key|value)_up/kernel$", 1, "columns: its own heads each"),
    Role(rf"{_MIXER}({_OF_HEADS})(/(up|projection))?/kernel$", 1, "columns: its own heads each"),
    Role(rf"{_MIXER}((query|key|value)/bias|sinks)$", 0, "its own heads each"),
    Role(r"mixer/table/embedding$", 1, "columns: the values of its own heads each"),
    Role(rf"{_MIXER}output/kernel$", 0, "rows: contracts the heads, one all-reduce"),
    Role(rf"{_MIXER}({_PER_HEAD}|(decay|rate|value_mix)/bias)$", 0, "its own heads each"),
    Role(
        r"feed_forward/(gate|up)/kernel$|mixer/up/kernel$",
        1,
        "columns: a part of the hidden size each",
    ),
    Role(r"feed_forward/(gate|up)/bias$", 0, "a part of the hidden size each"),
    Role(
        r"(feed_forward|mixer)/down/kernel$", 0, "rows: contracts the hidden size, one all-reduce"
    ),
)


def role_of(path: str) -> Role | None:
    """The row of the table for a parameter, or None."""
    return next((role for role in ROLES if re.search(role.pattern, path)), None)


def heads_of(path: str, channels: int, model: Any, head_size: int | None) -> int | None:
    """The number of heads that share the `channels` of a mixer's parameter; None if unknown.

    It follows from the mixer's `head_size`, or from its `sizes` with `heads` (queries and keys) and
    `value_heads` (all others). For a tree of arrays the argument `head_size` provides it.
    """
    inside = re.search(r"^(?P<mixer>.*\bmixer(?:/(?:attention|mamba))?)/(?P<name>\w+)", path)
    if inside is None:
        return None
    mixer = _module_at(model, inside["mixer"])
    sizes = getattr(mixer, "sizes", None)
    if sizes is not None:
        is_shared = inside["name"] in ("query", "key")
        return sizes.heads if is_shared else getattr(sizes, "value_heads", sizes.heads)
    head_size = getattr(mixer, "head_size", head_size)
    return None if not head_size else channels // head_size


def _module_at(model: Any, path: str) -> Any:
    for name in path.split("/"):
        try:
            model = model[int(name)] if name.isdigit() else getattr(model, name)
        except (AttributeError, KeyError, IndexError, TypeError):
            return None
    return model
