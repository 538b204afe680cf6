"""One option given to every layer that has it."""

import dataclasses

from toolkit.looped import LAYERS


def everywhere(**options):
    """What `LoopedConfig(options=...)` takes: each option, for every layer with one of its name."""
    by_word = {}
    for word, layer in LAYERS.items():
        own = {field.name for field in dataclasses.fields(layer.Options)} & set(options)
        by_word |= {word: {name: options[name] for name in own}} if own else {}
    return by_word
