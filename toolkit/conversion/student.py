"""The student: the teacher with other token mixers."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from toolkit._checks import checked
from toolkit._compat import set_value
from toolkit.looped.config import LoopedConfig
from toolkit.looped.mixing import LAYERS
from toolkit.looped.mixing.attention import AttentionLayer, AttentionOptions
from toolkit.looped.mixing.linear.delta import DeltaLayer
from toolkit.looped.model import LoopedLM
from toolkit.looped.patterns import by_loop


@checked
def student_from(teacher: LoopedLM, pattern: str, *, rngs: nnx.Rngs) -> LoopedLM:
    """Replace a teacher's token mixers by new ones, each initialised from the attention it
    replaces.

    Embedding, norms, feed-forwards and gates of the loops are the teacher's arrays themselves, and
    so are the attention layers whose word does not change. A new recurrent layer takes over the
    projections W_q, W_k, W_v, W_o with head sizes and head counts: grouped keys and values are
    repeated per query head, rotary positions are dropped (except by "retention"), and a short
    convolution starts as the identity. Decays, write strengths and the output gate are initialised
    as in a new model.

    Args:
        teacher: a looped model whose layers are all softmax attention.
        pattern: the student's words, as many as the teacher's: the teacher's own to keep a layer,
            or one of `STARTABLE`.
        rngs: random streams for the new layers.

    Returns:
        The student; later changes of one model do not affect the other.

    Source: LT2, "Linear-Time Looped Transformers", distillation section, for what is kept; that new
        layers start from the attention's projections is common practice, for instance Wang et al.,
        "The Mamba in the Llama", 2024, section 2.

    Example:
        >>> from flax import nnx
        >>> from toolkit.looped import LoopedConfig, LoopedLM
        >>> teacher = LoopedLM(LoopedConfig.tiny("full full", width=16, heads=2), rngs=nnx.Rngs(0))
        >>> student_from(teacher, "gdn full", rngs=nnx.Rngs(1)).config.pattern
        'gdn full'
    """
    config = _student_config(teacher.config, pattern)
    words = zip(teacher.config.layers, config.layers, strict=True)
    new = [layer for layer, (old, word) in enumerate(words) if old != word]
    return with_mixers(
        teacher,
        {
            layer: _started(
                LAYERS[config.layers[layer]](config, rngs=rngs), teacher.blocks[layer].mixer
            )
            for layer in new
        },
        config,
    )


def restore(student: LoopedLM, teacher: LoopedLM, layers: Iterable[int]) -> LoopedLM:
    """The student with the teacher's attention back in some layers."""
    layers = set(layers)
    if outside := layers - set(range(len(teacher.config.layers))):
        raise ValueError(
            f"layers {sorted(outside)} are not among the teacher's 0 to "
            f"{len(teacher.config.layers) - 1}."
        )
    words = zip(teacher.config.layers, student.config.layers, strict=True)
    pattern = " ".join(old if layer in layers else word for layer, (old, word) in enumerate(words))
    config = _student_config(teacher.config, pattern)
    return with_mixers(student, {layer: teacher.blocks[layer].mixer for layer in layers}, config)


def new_layers(student: LoopedLM, teacher: LoopedLM) -> tuple[int, ...]:
    """Indices of the layers whose mixer is not the teacher's."""
    words = zip(teacher.config.layers, student.config.layers, strict=True)
    return tuple(layer for layer, (old, word) in enumerate(words) if old != word)


def with_mixers(
    model: LoopedLM, mixers: Mapping[int, Any], config: LoopedConfig | None = None
) -> LoopedLM:
    """The same model with other mixers in some layers."""
    other = nnx.clone(model)
    for layer, mixer in mixers.items():
        other.blocks[layer].mixer = nnx.clone(mixer)
    other.config = config or model.config
    return other


def _student_config(config: LoopedConfig, pattern: str) -> LoopedConfig:
    others = [word for word in config.layers if word not in ("full", "window")]
    if others:
        raise ValueError(
            f"the teacher's pattern {config.pattern!r} has the layer {others[0]!r}; "
            'every layer of a teacher must be "full" or "window".'
        )
    if len({LAYERS[word].sizes_of(config) for word in config.layers}) > 1:
        raise ValueError(
            'the teacher\'s "full" and "window" layers differ in heads or head_size; they must '
            "be equal for a student to start from."
        )
    words = pattern.split()
    if len(words) != len(config.layers):
        raise ValueError(
            f"pattern {pattern!r} has {len(words)} layers, the teacher {len(config.layers)}; "
            "they must be equal."
        )
    for old, word in zip(config.layers, words, strict=True):
        if word not in (old, *STARTABLE):
            raise ValueError(
                f"pattern {pattern!r} asks for {word!r}, which has no queries, keys and values to "
                f"start from attention's; convert to {', '.join(STARTABLE)}."
            )
    replaced = dict(zip(words, config.layers, strict=True))
    converted = dataclasses.replace(config, pattern=pattern, windows=_kept_windows(config, words))
    return converted.with_options(
        **{
            word: _options_of_attention(config, old, word)
            for word, old in replaced.items()
            if word not in config.layers
        }
    )


def _options_of_attention(config: LoopedConfig, old: str, word: str) -> dict[str, Any]:
    """The options that give layers called `word` the sizes of the attention they replace."""
    if issubclass(LAYERS[word], AttentionLayer):
        shared = [field.name for field in dataclasses.fields(AttentionOptions)]
        return {name: getattr(getattr(config, old), name) for name in shared}
    replaced = LAYERS[old]
    assert issubclass(replaced, AttentionLayer)  # nothing else is replaced
    if replaced.options_of(config).projection_biases:
        raise ValueError(
            f"the teacher's queries, keys and values have biases, and a {word!r} layer has none to "
            "start from them."
        )
    if replaced.options_of(config).sinks or replaced.options_of(config).output_bias:
        raise ValueError(
            f"the teacher's attention has sinks or an output bias, and a {word!r} layer has none "
            "to start from them."
        )
    size = replaced.sizes_of(config).head_size
    return {"heads": None, "value_heads": None, "key_size": size, "value_size": size}


def _kept_windows(config: LoopedConfig, words: list[str]) -> str | None:
    """The teacher's windows by loop, for those of its "full" layers that the student keeps."""
    kept = [layer for layer, word in enumerate(words) if word == config.layers[layer] == "full"]
    if config.windows is None or not kept:
        return None
    loops = ([windows[layer] or "full" for layer in kept] for windows in config.loop_windows)
    return by_loop([" ".join(map(str, loop)) for loop in loops])


def _started(mixer: Any, attention: Any) -> Any:
    """A new layer with the projections of attention and otherwise its initial parameters."""
    if isinstance(mixer, AttentionLayer):
        nnx.update(mixer, nnx.state(attention))
        return mixer
    size = attention.head_size
    query = attention.query.kernel[...]
    queries = query.shape[-1] // size
    key, value = (
        _one_head_a_query(projection.kernel[...], size, queries)
        for projection in (attention.key, attention.value)
    )
    if isinstance(mixer, DeltaLayer):
        joined = jnp.concatenate([query, key, value], axis=-1)
        set_value(mixer.query_key_value.kernel, joined)
        taps = mixer.convolution.kernel
        set_value(taps, jnp.zeros_like(taps[...]).at[-1].set(1.0))
    else:
        for projection, kernel in ((mixer.query, query), (mixer.key, key), (mixer.value, value)):
            set_value(projection.kernel, kernel)
    set_value(mixer.output.kernel, attention.output.kernel[...])
    return mixer


def _one_head_a_query(
    kernel: Float[Array, "width channels"], size: int, queries: int
) -> Float[Array, "width repeated"]:
    """Repeat each key or value head for every query head of its group."""
    heads = kernel.reshape(kernel.shape[0], -1, size)
    return jnp.repeat(heads, queries // heads.shape[1], axis=1).reshape(kernel.shape[0], -1)


STARTABLE = tuple(word for word, layer in LAYERS.items() if layer.starts_from_attention)
"""Words of layers that can be initialised from attention, because they have queries, keys and
values."""
