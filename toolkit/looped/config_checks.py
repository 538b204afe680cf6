"""What a `LoopedConfig` refuses, before anything is allocated or compiled."""

import dataclasses
from typing import Any

from toolkit.attention import MIXERS

CHOICES = {"dtype": ("float32", "bfloat16"), "indexer": ("lightning", "lt2")}


def check_config(config: Any) -> None:
    """Refuse sizes and switches that no model can have.

    Args:
        config: a `LoopedConfig`, not yet checked.

    Raises:
        ValueError: naming the field, what came and what was wanted.
    """
    _check_numbers(config)
    _check_words(config)
    _check_heads(config)
    _check_sparse(config)
    if config.windows is not None:
        _check_windows(config)
    _check_loops(config)


def _check_numbers(config):
    for field in dataclasses.fields(config):
        number, optional = getattr(config, field.name), field.default is None
        if field.type not in (int, int | None) or (number is None and optional):
            continue
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            wanted = "None or a whole number" if optional else "a whole number"
            raise ValueError(f"{field.name} is {number!r}; it must be {wanted} of at least 1.")
    for name in ("rope_theta", "norm_epsilon", "embedding_std"):
        number = getattr(config, name)
        if number is not None and not number > 0:
            raise ValueError(f"{name} is {getattr(config, name)!r}; it must be positive.")
    for name, choices in CHOICES.items():
        if getattr(config, name) not in choices:
            raise ValueError(
                f"{name} {getattr(config, name)!r} is not one of {', '.join(choices)}."
            )


def _check_words(config):
    for name in ("pattern", "prelude", "coda"):
        if not isinstance(getattr(config, name), str):
            raise ValueError(
                f'{name} is {getattr(config, name)!r}; it must be one text, e.g. "gdn gdn full".'
            )
    for name in ("pattern", "prelude", "coda"):
        words = getattr(config, name).split()
        unknown = [word for word in words if word not in MIXERS]
        if unknown or (name == "pattern" and not words):
            what = f"the unknown layer {unknown[0]!r}" if unknown else "no layer"
            raise ValueError(
                f"{name} {getattr(config, name)!r} names {what}; write words out of "
                f"{', '.join(MIXERS)} separated by spaces."
            )


def _check_heads(config):
    if config.head_size is None and config.width % config.heads:
        raise ValueError(
            f"width {config.width} is not divisible by heads {config.heads}; "
            "change one of them or give head_size."
        )
    heads, key_value_heads, head_size = config.attention_sizes
    if heads % key_value_heads:
        raise ValueError(f"heads {heads} is not a multiple of key_value_heads {key_value_heads}.")
    if head_size % 2:
        raise ValueError(
            f"the attention head size {head_size} is odd; rotary embeddings rotate pairs, "
            "so it must be even."
        )
    if not 0 < config.rotary_fraction <= 1 or (config.rotary_fraction * head_size) % 2:
        raise ValueError(
            f"rotary_fraction is {config.rotary_fraction!r}; it must lie in (0, 1] and turn an "
            f"even number of the {head_size} channels of a head."
        )
    for name in ("value_heads", "gdn_value_heads"):
        keys = config.gdn_heads or heads if name == "gdn_value_heads" else heads
        if (getattr(config, name) or keys) % keys:
            raise ValueError(f"{name} {getattr(config, name)} is not a multiple of heads {keys}.")


def _check_sparse(config):
    if config.sparse_blocks < 3:
        raise ValueError(
            f"sparse_blocks is {config.sparse_blocks}; it must be at least 3, for the first "
            "block, the previous and the query's own."
        )
    if config.index_size % 4:
        raise ValueError(
            f"index_size is {config.index_size}; it must be a multiple of 4: half of it rotates, "
            "in pairs."
        )
    if config.shared_value_size > config.shared_key_size:
        raise ValueError(
            f"shared_value_size {config.shared_value_size} is more than shared_key_size "
            f"{config.shared_key_size}, of which the value is a part."
        )


def _check_windows(config):
    parts = [part.split() for part in (config.windows or "").split("->")]
    full = config.layers.count("full")
    if not full:
        raise ValueError(
            f'windows is {config.windows!r}; pattern {config.pattern!r} has no "full" layer.'
        )
    if len(parts) not in (1, config.loops) or any(len(words) not in (1, full) for words in parts):
        raise ValueError(
            f'windows {config.windows!r} must have 1 or {config.loops} parts joined by "->", one a '
            f'loop, each of 1 or {full} words, one a "full" layer.'
        )
    for word in (word for words in parts for word in words):
        if word != "full" and (not word.isdecimal() or int(word) < 1):
            raise ValueError(
                f'windows {config.windows!r} names {word!r}; write "full" or a number of tokens.'
            )


def _check_loops(config):
    for name in ("norm_every_loop", "exit_gate"):
        if config.coda and getattr(config, name):
            raise ValueError(
                f"{name} reads logits after every loop, and coda {config.coda!r} follows the "
                "last; turn one of them off."
            )
    if config.random_start and not config.input_injection:
        raise ValueError(
            "random_start without input_injection: the loops would never see the tokens."
        )
    if config.backward_loops is not None and config.per_loop_switches:
        raise ValueError(
            f"backward_loops is {config.backward_loops}, and all loops must then be alike; turn "
            f"{' and '.join(config.per_loop_switches)} off."
        )
