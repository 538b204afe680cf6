"""Parameters and FLOPs of a configuration, counted on shapes; models of equal size or cost."""

import dataclasses
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx

from toolkit._checks import checked
from toolkit.attention import mixer
from toolkit.attention.latent import LatentConfig
from toolkit.looped.config import LoopedConfig
from toolkit.looped.feed_forward import FEED_FORWARDS
from toolkit.looped.loops.injection import injection_parameters
from toolkit.looped.mixing import LAYERS
from toolkit.looped.mixing.attention import AttentionSizes


@checked
def parameter_count(config: LoopedConfig) -> int:
    """Number of trained parameters, from the sizes alone.

    The loops share all layers: only rho and the loop embeddings, `loops x width` each, grow with
    `loops`.

    Args:
        config: the model.

    Returns:
        The number of parameters, including the embedding and an untied head.

    Source: LT2, architecture section.

    Example:
        >>> parameter_count(LoopedConfig.tiny("full", width=16, heads=2))
        8256
    """
    width = config.width
    each = (2 if config.norm == "layer" else 1) * width  # of a norm
    norms = 2 * config.pre_norm - config.shared_norm + 2 * config.sandwich_norm
    stacks = (config.prelude_layers, config.layers, config.coda_layers)
    places = Counter((word, place > 0) for stack in stacks for place, word in enumerate(stack))
    blocks = sum(
        count * (layer_parameters(word, config, is_first=not later) + norms * each)
        for (word, later), count in places.items()
    )
    blocks += sum(_fed(config, config.feed_forward_words, is_active=False))
    separate = sum(LAYERS[word].reads_separately for own in stacks for word in own)
    blocks += 2 * each * config.pre_norm * separate
    without = config.pre_norm - config.shared_norm + config.sandwich_norm
    blocks -= config.feed_forward_words.count("none") * without * each
    per_loop = config.residual_gate + config.loop_embedding + (config.recursion is not None)
    per_loop *= config.loops * width
    adapter = injection_parameters(config) + width * width * config.coda_projection
    adapter += config.prelude_norm * each
    exit_gate = width + 1 if config.exit_gate else 0
    groups = -(-len(config.layers) // config.residual_group) if config.residual_group else 0
    tables = (1 if config.tied_embedding else 2) * config.vocabulary * width
    tables += config.head_bias * config.vocabulary + config.embedding_norm * each
    return tables + blocks + each + per_loop + adapter + exit_gate + groups + _connections(config)


def _connections(config: LoopedConfig) -> int:
    """The parameters of what stands in place of residual additions, all blocks together."""
    width, streams = config.width, config.streams
    if streams is None and config.attention_residual is None:
        return 0
    fed = sum(word != "none" for word in config.feed_forward_words)
    layers = len(config.feed_forward_words)
    if streams is not None:
        stacks = 1 + bool(config.prelude) + bool(config.coda)
        mixed = (2 + streams) * streams
        each = (streams * width + 1) * mixed + 3
        return (layers + fed) * each + stacks * ((streams * width + 1) * streams + 1)
    stacks = [config.prelude_layers, config.layers, config.coda_layers]
    reading = [
        own if stack and config.message_rank else own[1:] for stack, own in enumerate(stacks)
    ]
    width_of_three = 2 * width * sum(LAYERS[w].reads_separately for own in reading for w in own)
    if config.message_rank is None:
        stacks = 1 + bool(config.prelude) + bool(config.coda)
        total = (layers + fed) * width + width_of_three
        return total  # the first layer of a stack reads it, its end has a query
    gates = 4 * len(config.layers) * (4 * width * config.message_rank + width)
    return (layers + fed) * width + width_of_three + gates


def layer_parameters(word: str, config: LoopedConfig, *, is_first: bool = True) -> int:
    """Number of trained parameters of one token-mixing layer, the first of its stack or not."""
    # The layer does not depend on these, so one trace serves all their values.
    sizes = {"pattern": word, "loops": 1, "feed_forward": 1}
    sizes |= {} if LAYERS[word].reads_tokens else {"vocabulary": 1}
    elsewhere: dict[str, Any] = {
        "windows": None,
        "prelude": "",
        "coda": "",
        "feed_forwards": "swiglu",
    }
    for name in (
        "norm_before_coda", "coda_projection", "prelude_norm", "raw_sources", "embedding_norm"
    ):  # fmt: skip
        elsewhere[name] = False
    elsewhere |= {"streams": None, "attention_residual": None, "message_rank": None}
    elsewhere["recursion"] = None
    options = {name: own for name, own in config.options.items() if name not in FEED_FORWARDS}
    config = dataclasses.replace(config, **sizes, **elsewhere, options=options)
    return _traced_parameters(config, is_first or not LAYERS[word].has_depth)


def token_flops(config: LoopedConfig, context: int) -> int:
    """FLOPs of one more token after `context` others (modelled).

    2 vocabulary width + sum over layers runs (2 parameters + mixing one token)
    """
    return _forward_flops(config, lambda word: mixing_flops(word, config, context))


@checked
def flops_per_token(config: LoopedConfig, time: int) -> float:
    """FLOPs that training asks for per token (modelled): the backward pass is twice the forward.

        3 (2 vocabulary width + sum over layers runs (2 active parameters + mixing / time))

    Layers of the loops run `loops` times. Mixing is `forward_flops` of the row of `MIXERS`: of
    pairs that a query may see, and of the chunks in which a recurrent mixer is trained. What
    `remat` computes twice does not count.

    Args:
        config: the model.
        time: tokens of a sequence, on which attention depends.

    Returns:
        FLOPs per token, without the optimiser's.

    Cost: Formulas alone; a layer's parameters are counted once per process.

    Source: Chowdhery et al., "PaLM", 2022, appendix B, for softmax layers that run once.

    Example:
        >>> once, twice = (LoopedConfig.tiny("full", loops=n, width=16, heads=2) for n in (1, 2))
        >>> head = 6 * once.vocabulary * once.width
        >>> (flops_per_token(twice, 8) - head) / (flops_per_token(once, 8) - head)
        2.0
    """
    if time < 1:
        raise ValueError(f"time: got {time}, wanted at least 1")
    return 3 * _forward_flops(config, lambda word: mixing_flops(word, config, time, whole=True))


def _forward_flops(config: LoopedConfig, mixing: Callable[[str], float]) -> Any:
    """Of one token through all layers and loops, its mixing as given for each word."""
    width, words = config.width, iter(config.feed_forward_words)
    total: Any = 2 * config.vocabulary * width + 2 * config.coda_projection * width**2
    total += 2 * config.loops * injection_parameters(config)
    stacks = (config.prelude_layers, config.layers, config.coda_layers)
    for layers, runs in zip(stacks, (1, config.loops, 1), strict=True):
        for place, word in enumerate(layers):
            (fed,) = _fed(config, [next(words)], is_active=True)
            matrices = layer_parameters(word, config, is_first=not place) + fed
            total += runs * (2 * matrices + mixing(word))
    return total


@checked
def active_parameter_count(config: LoopedConfig) -> int:
    """Number of trained parameters that a token passes: of a mixture the chosen experts alone.

    Args:
        config: the model.

    Returns:
        `parameter_count` without the experts that a token does not choose.

    Example:
        >>> config = LoopedConfig.tiny("full full", width=16, heads=2, feed_forwards="swiglu moe")
        >>> parameter_count(config) - active_parameter_count(config) == 6 * 3 * 16 * 176
        True
    """
    words = config.feed_forward_words
    total, active = (sum(_fed(config, words, is_active=is_active)) for is_active in (False, True))
    return parameter_count(config) - total + active


def _fed(config: LoopedConfig, words: Iterable[str], *, is_active: bool) -> list[int]:
    """The parameters of feed-forward layers."""
    return [FEED_FORWARDS[word].parameters(config)[is_active] for word in words]


def mixing_flops(word: str, config: LoopedConfig, context: int, *, whole: bool = False) -> Any:
    """FLOPs of mixing one token after `context` others, or the mean over a whole sequence of that
    length."""
    own: Any = LAYERS[word].sizes_of(config)
    chosen = vars(LAYERS[word].options_of(config))
    if isinstance(own, LatentConfig):
        softmaxes, read = LAYERS[word].softmaxes(config)
        if whole:  # per head: a key of its own and a shared one, and a value
            return softmaxes * (own.key_size + own.rope_size + own.value_size) * (context + 1)
        # Absorbed: heads attend to latents, and the up-projections are matrices.
        return 2 * softmaxes * (2 * read + own.rope_size) * context
    if word == "hybrid":
        parts = ("full", "mamba2")
        return sum(mixing_flops(part, config, context, whole=whole) for part in parts)
    if word in ("conv", "channel_mix"):
        return 2 * (own.key_size + 1) * config.width
    if isinstance(own, AttentionSizes):
        heads, _, size = own
        window = LAYERS[word].window_of(config)
        word = LAYERS[word].mixer or word
        row, sizes = mixer(word, sliding_window=window) if window else mixer(word), (size, size)
    else:
        (_, heads, *sizes), row = own, mixer(LAYERS[word].mixer or word)
    count = row.forward_flops if whole else row.step_flops
    # After batch, time, heads, key and value.
    names = {*row.options, *_arguments_of(count)[5:]}
    options = {**row.options, **{name: chosen[name] for name in names if name in chosen}}
    return count(1, context, heads, *sizes, **options) / (context if whole else 1)


@functools.cache
def _arguments_of(count: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(count).parameters)


@functools.lru_cache(maxsize=1024)
def _traced_parameters(config, is_first):
    how = {} if is_first else {"depth": (1, 2)}
    layer = nnx.eval_shape(lambda: LAYERS[config.pattern](config, rngs=nnx.Rngs(0), **how))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param)))


@checked
def match_parameters(
    config: LoopedConfig, target: LoopedConfig | int, *, tolerance: float = 0.01
) -> LoopedConfig:
    """Change the feed-forward size so that a model has as many parameters as another.

    A fair comparison of mixers needs equal parameters. A Gated DeltaNet layer has more than a
    softmax layer, which a smaller SwiGLU compensates.

    Args:
        config: the model to change.
        target: a number of parameters, or the model that has it.
        tolerance: largest accepted |parameters / target - 1|.

    Returns:
        `config` with `feed_forward` set, to a multiple of 8 where that is close enough.

    Source: LT2, whose gated delta net recipes scale the feed-forward layer for the same reason.

    Example:
        >>> plain, hybrid = (LoopedConfig.tiny(p) for p in ("full full", "gdn full"))
        >>> matched = match_parameters(hybrid, plain)
        >>> abs(parameter_count(matched) / parameter_count(plain) - 1) < 0.01
        True
    """
    _require_swiglu(config)
    wanted = parameter_count(target) if isinstance(target, LoopedConfig) else int(target)
    layers = len(config.prelude_layers) + len(config.layers) + len(config.coda_layers)
    per_unit = (3 * config.width + 2 * config.swiglu.biases) * layers
    fixed = parameter_count(config) - per_unit * config.feed_forward_size
    return _matched(config, wanted, parameter_count, (fixed, per_unit), tolerance, "parameters")


@checked
def match_compute(
    config: LoopedConfig, target: LoopedConfig | float, time: int, *, tolerance: float = 0.01
) -> LoopedConfig:
    """Change the feed-forward size so that training a token costs as much as in another model.

        flops_per_token(result, time) = flops_per_token(target, time)

    A looped model runs its layers several times: at equal parameters it computes more.

    Args:
        config: the model to change.
        target: FLOPs per token, or the model that takes them.
        time: tokens of a sequence.
        tolerance: largest accepted |FLOPs / target - 1|.

    Returns:
        `config` with `feed_forward` set, to a multiple of 8 where that is close enough.

    Raises:
        ValueError: its feed-forward layers are not SwiGLU, or none of their sizes is close enough.

    Example:
        >>> plain, looped = LoopedConfig.tiny("full full"), LoopedConfig.tiny("full full", loops=2)
        >>> matched = match_compute(looped, plain, time=16)
        >>> abs(flops_per_token(matched, 16) / flops_per_token(plain, 16) - 1) < 0.01
        True
    """
    _require_swiglu(config)
    wanted = flops_per_token(target, time) if isinstance(target, LoopedConfig) else float(target)
    size, count = config.feed_forward_size, functools.partial(flops_per_token, time=time)
    now, twice = (count(dataclasses.replace(config, feed_forward=n * size)) for n in (1, 2))
    line = 2 * now - twice, (twice - now) / size
    return _matched(config, wanted, count, line, tolerance, "FLOPs per token")


def _require_swiglu(config: LoopedConfig) -> None:
    if set(config.feed_forward_words) != {"swiglu"}:
        raise ValueError(
            f"feed_forwards is {config.feed_forwards!r}; models are matched by the size of "
            'SwiGLU layers: configure feed_forwards="swiglu".'
        )


def _matched(
    config: LoopedConfig, wanted: float, count: Callable[[LoopedConfig], float],
    line: tuple[float, float], tolerance: float, unit: str,
) -> LoopedConfig:  # fmt: skip
    """The feed-forward size whose count is the wanted one, on a line of (fixed, per unit)."""
    fixed, per_unit = line
    exact = (wanted - fixed) / per_unit
    for multiple in (8, 1):
        feed_forward = max(multiple, multiple * round(exact / multiple))
        matched = dataclasses.replace(config, feed_forward=feed_forward)
        if abs(count(matched) / wanted - 1) <= tolerance:
            return matched
    raise ValueError(
        f"no feed_forward size brings {count(config):,.0f} {unit} within {tolerance:.1%} of "
        f"{wanted:,.0f}: the rest of the model has {fixed:,.0f}; change width or pattern."
    )
