"""The check of whole sequences, before a model runs them."""

from jaxtyping import Array, Int

from toolkit.looped.config import LoopedConfig
from toolkit.looped.feed_forward import FEED_FORWARDS
from toolkit.looped.loops.rows import check_tokens
from toolkit.looped.mixing import LAYERS
from toolkit.parallel.context.along import check_word, cuts_time


def check_sequences(
    config: LoopedConfig,
    tokens: Int[Array, "batch time"],
    segment_ids: Int[Array, "batch time"] | None,
) -> None:
    """Refuse tokens, documents or a layout of time that the model's layers cannot take."""
    check_tokens(tokens, config.vocabulary)
    for word in config.feed_forward_words:
        if cuts_time() and not FEED_FORWARDS[word].can_cut_time:
            raise ValueError(
                f"feed_forwards: {word!r} layers sort the tokens of whole sequences, and the "
                'layout shards time; wanted a layout such as "data", or "swiglu"'
            )
    if cuts_time() and config.recursion is not None:
        raise ValueError(
            "recursion sorts the tokens of whole sequences, and the layout shards time"
        )
    for word in (*config.prelude_layers, *config.layers, *config.coda_layers):
        check_word(word, LAYERS[word].can_cut_time)
    if segment_ids is not None and segment_ids.shape != tokens.shape:
        raise ValueError(
            f"segment_ids have shape {segment_ids.shape}, tokens {tokens.shape}; "
            "they must be equal."
        )
