"""Which words and switches of a configuration go together; the others are refused."""

from typing import Any

from toolkit._checks import check_choice
from toolkit.looped.feed_forward import FEED_FORWARDS
from toolkit.looped.mixing import LAYERS


def check_words(config: Any) -> None:
    """Refuse unknown words, and feed-forward words that are neither one nor one for each layer."""
    for name in ("pattern", "prelude", "coda"):
        text = getattr(config, name)
        if not isinstance(text, str):
            raise ValueError(f'{name} is {text!r}; it must be one string, e.g. "gdn gdn full".')
        unknown = [word for word in text.split() if word not in LAYERS]
        if unknown or (name == "pattern" and not text.split()):
            what = f"the unknown layer {unknown[0]!r}" if unknown else "no layer"
            raise ValueError(
                f"{name} {text!r} names {what}; write words out of {', '.join(LAYERS)} "
                "separated by spaces."
            )

    text = config.feed_forwards
    if unknown := [word for word in text.split() if word not in FEED_FORWARDS]:
        raise ValueError(
            f"feed_forwards {text!r} names the unknown layer {unknown[0]!r}; write words out "
            f"of {', '.join(FEED_FORWARDS)} separated by spaces."
        )
    layers = len((*config.prelude_layers, *config.layers, *config.coda_layers))
    if len(text.split()) not in (1, layers):
        raise ValueError(
            f"feed_forwards {text!r} has {len(text.split())} words; write one for all layers, "
            f"or {layers}: one per layer of prelude, pattern and coda."
        )


def check_loops(config: Any) -> None:
    """Refuse switches of loops, prelude and coda that exclude or need each other."""
    for name in ("norm_every_loop", "exit_gate"):
        if config.coda and getattr(config, name):
            raise ValueError(
                f"{name} reads logits after every loop, and coda {config.coda!r} follows the "
                "last; turn one of them off."
            )
    needs = {
        "norm_of_sum": "sandwich_norm",
        "norm_before_coda": "coda",
        "coda_projection": "coda",
        "prelude_norm": "prelude",
    }
    for name, needed in needs.items():
        if getattr(config, name) and not getattr(config, needed):
            raise ValueError(f"{name} without {needed}: turn it off, or {needed} on.")
    check_choice("injection", config.injection, ("linear", "diagonal"))
    if config.injection != "linear" and not config.input_injection:
        raise ValueError(f"injection {config.injection!r} without input_injection: turn it on.")
    if config.random_start and not config.input_injection:
        raise ValueError(
            "random_start without input_injection: the loops would never see the tokens."
        )
    if config.backward_loops is not None and config.per_loop_switches:
        raise ValueError(
            f"backward_loops is {config.backward_loops}, and all loops must then be alike; turn "
            f"{' and '.join(config.per_loop_switches)} off."
        )


def check_norms(config: Any) -> None:
    """Refuse norms that leave the stream unbounded, or that a connection cannot have."""
    if not (config.pre_norm or config.sandwich_norm):
        raise ValueError(
            "pre_norm is off, and so is sandwich_norm: nothing would bound the stream; turn "
            "one of them on."
        )
    if config.carry_norm and not config.pre_norm:
        raise ValueError("carry_norm without pre_norm: turn one off, or the other on.")
    for name in ("parallel_residual", "ladder_residual", "streams", "attention_residual"):
        if getattr(config, name) and (config.carry_norm or config.stream_scale != 1):
            raise ValueError(
                f"{name} keeps the stream as it is; turn it off, or carry_norm off and "
                "stream_scale to 1."
            )
    if config.parallel_residual and config.ladder_residual:
        raise ValueError(
            "parallel_residual and ladder_residual exclude each other; turn one of them off."
        )
    if config.shared_norm and not (config.parallel_residual and config.pre_norm):
        raise ValueError("shared_norm wants parallel_residual and pre_norm; turn both on.")
