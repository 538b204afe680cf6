"""Few lengths for many: what is compiled for a length is compiled for a bucket instead."""

from typing import Annotated

from toolkit._annotations import AtLeast
from toolkit._checks import checked
from toolkit.attention._shapes import TokenCount


@checked
def bucket_length(length: TokenCount, *, least: Annotated[int, AtLeast(1)] = 16) -> int:
    """The length to which a sequence is filled up where lengths change from call to call.

        least 2^n >= length, of the smallest n

    Every new shape compiles a program. Fill sequences up on the host (`np.pad`), with zeros at
    their end: a causal mixer gives the tokens before the same outputs, and zeros leave the state of
    a recurrent one as it is (they write nothing, and a log-decay of 0 forgets nothing; only
    `retention`, whose decay is no input, forgets all the same). The numbers of documents go on with
    the last one (`mode="edge"`). A cache of softmax or sparse attention
    counts what fills up as tokens: `truncate` it. Prompts of language models are filled up in front
    instead, see `toolkit.looped.pad_prompts`.

    Args:
        length: tokens of the sequence.
        least: the smallest bucket.

    Returns:
        Tokens of its bucket. Lengths up to 2,048 share 8 of them.

    Cost: at most twice the tokens are computed, on average 1.4 times as many.

    Example:
        >>> [bucket_length(length) for length in (1, 16, 17, 100)]
        [16, 16, 32, 128]
    """
    return least << max(0, -(-length // least) - 1).bit_length()
