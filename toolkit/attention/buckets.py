"""Buckets of lengths: a program is compiled once per bucket instead of once per length."""

from typing import Annotated

from toolkit._annotations import AtLeast
from toolkit._checks import checked
from toolkit.attention._shapes import TokenCount


@checked
def bucket_length(length: TokenCount, *, least: Annotated[int, AtLeast(1)] = 16) -> int:
    """The length to which to pad a sequence where lengths change from call to call.

        least 2^n >= length, of the smallest n

    Every new shape compiles a program. Pad sequences on the host (`np.pad`) with zeros at their
    end. A causal mixer gives the earlier tokens the same outputs, and zeros leave the state of a
    recurrent mixer unchanged: they write nothing, and a log-decay of 0 forgets nothing (only
    `retention` forgets, as its decay is no input). Pad segment_ids with the last document
    (`mode="edge"`). A cache of softmax or sparse attention counts the padding as tokens:
    `truncate` it. Prompts of language models are padded in front instead, see
    `toolkit.looped.pad_prompts`.

    Args:
        length: tokens of the sequence.
        least: the smallest bucket.

    Returns:
        The length of the bucket. Lengths up to 2,048 share 8 buckets.

    Cost: at most twice the tokens are computed, on average 1.4 times as many.

    Example:
        >>> [bucket_length(length) for length in (1, 16, 17, 100)]
        [16, 16, 32, 128]
    """
    return least << max(0, -(-length // least) - 1).bit_length()
