"""The configuration of a looped language model: sizes, pattern of layers, number of loops."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax

from toolkit.looped.config_checks import check_loops, check_norms, check_words
from toolkit.looped.feed_forward import FEED_FORWARDS, MIXTURES
from toolkit.looped.layers import NormKind
from toolkit.looped.loops.windows import parsed_windows
from toolkit.looped.mixing import LAYERS
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions, OptionsByWord, check_numbers
from toolkit.looped.recursion.routing import check_recursion
from toolkit.looped.residual.checks import check_connections

DTYPES = ("float32", "bfloat16", "float16", "float64")
POSITIVE = (
    "rope_theta", "norm_epsilon", "embedding_std", "embedding_scale", "residual_scale",
    "stream_scale",
    "head_scale", "head_soft_cap",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopedConfig(LayerConfig):
    """Sizes and switches of a looped language model; checked when made.

    `pattern` names the physical layers, which run `loops` times with the same parameters. Settings
    of one kind of layer are its options, grouped by its word and read as an attribute:

        config = LoopedConfig(pattern="gdn full", options={"gdn": {"key_size": 24}})
        config.gdn.key_size, config.full.head_size        24, None (width / heads)
        config.with_options(full={"output_gate": True})   the same, except one option

    Attributes:
        vocabulary: number of tokens; 256 means the model reads bytes.
        width: size of the residual stream.
        pattern: the physical layers in order, e.g. "gdn gdn gdn gdn full".
        loops: how often the stack of physical layers runs.
        heads: query heads of softmax layers, key heads of recurrent layers.
        options: options by word, each a mapping or the layer's own dataclass
            (`LAYERS[word].Options`).
        windows: windows of the "full" layers per loop: "full -> 512 -> 256 -> 128" for four loops,
            or one part for all loops. A part has one word for all "full" layers or one word for
            each: "full" or a number of tokens (None: no windows).
        feed_forwards: the feed-forward layers: one word for all ("swiglu"; "mlp", which has no
            gate; "moe", a mixture of experts; "hash_moe", one whose experts a
            table of tokens names; or "none", a block without one), or one
            per layer of prelude, pattern and coda, e.g. "swiglu moe moe moe".
        feed_forward: hidden size of the SwiGLU or the MLP (None: 8/3 width, up to a multiple of
            `feed_forward_multiple_of`).
        feed_forward_multiple_of: what the default hidden size is rounded up to.
        rope_theta: base of the rotary wavelengths.
        norm: what the norms of the stream are: "rms"; "layer", with a bias; "layer_without_bias".
        norm_epsilon: added to the mean square in every norm.
        residual_gate: learn rho, the per-loop gate on the previous loop's hidden state.
        prelude: layers that run once, before the loops; words as in `pattern`.
        coda: layers that run once, after the loops.
        input_injection: start every loop from adapter([h, e]), where e is the prelude's output; the
            adapter is a projection from 2 width to width.
        injection: what that adapter is: "linear", or "diagonal": a stable linear system over the
            loops, as in Parcae (see `DiagonalInjection`).
        prelude_norm: a norm of the prelude's output.
        coda_projection: a projection between the last loop and the coda.
        loop_embedding: add a learned vector to the input of each loop, zero-initialised.
        norm_every_loop: apply the final norm after every loop, not only after the last.
        exit_gate: learn after which loop to stop; see `exit_probabilities`.
        recursion: "expert" or "token": a router decides how many loops each token takes
            (Mixture-of-Recursions; see `recursion_loss`). None: all take all.
        pre_norm: a norm per sub-layer, on its input.
        sandwich_norm: a second norm per sub-layer, on its output; without `pre_norm` the only one,
            as in OLMo 2.
        norm_of_sum: with `sandwich_norm`, the second norm is of the stream with that output added.
        norm_before_coda: apply the final norm after the last loop too, before the coda.
        carry_norm: the stream to which a sub-layer adds is the normed one that it reads.
        parallel_residual: both sub-layers of a block read the stream before it (see `Block`).
        shared_norm: they also share the norm of their input.
        ladder_residual: each sub-layer reads the stream as it was before the preceding one, so that
            the all-reduce of that one overlaps with computation (see `Block`).
        residual_group: layers per group; a group's input, times a learned scalar that starts at
            zero, is added to its output (None: no groups).
        streams: residual streams that hyper-connections mix around every sub-layer, at least 2
            (None: one, to which sub-layers add); see `toolkit.looped.residual`.
        stream_mixing_steps: Sinkhorn's steps that make the mixing of streams doubly stochastic.
        attention_residual: layers per group in attention residuals: every sub-layer reads a softmax
            mean of the sums of all groups, in place of the stream (None: it reads the stream).
        raw_sources: these means are of the sums themselves, as in Kimi's report, not of their
            RMSNorms, as in Inkling-2; what weighs them is normalised in both.
        message_rank: with `attention_residual`, every loop starts from the prelude's output, and
            gates of this rank mix in messages of the loop before, as in Inkling-2 (None: a loop
            starts from the output of the one before).
        embedding_std: standard deviation of the initial embedding (None: width^-1/2, as LT2). At 1
            a token weighs as much in the residual stream as a layer's first outputs, and recall is
            learnt much sooner; the head should then be a separate table.
        tied_embedding: the output head is the embedding transposed, not a table of its own.
        embedding_scale: factor of the embedded tokens, width^1/2 in Gemma.
        embedding_norm: a norm of the embedded tokens, as in RWKV.
        residual_scale: factor of what a sub-layer adds to the stream, as in Granite.
        stream_scale: factor of the stream to which a sub-layer adds, as in MiniMax.
        head_scale: factor of the logits.
        head_bias: add a bias to the logits.
        head_soft_cap: bound c of the logits, which become c tanh(logits / c), as in Gemma 2.
        random_start: the loops start from noise and see the tokens only by input injection.
        backward_loops: number of last loops through which the gradient flows (None: all).
        dtype: compute type, "float32", "bfloat16", "float16" or, under `jax_enable_x64`, "float64";
            parameters are float32 in all.
        remat: recompute each loop in the backward pass, so memory does not grow with loops.

    Source: LT2, "Linear-Time Looped Transformers", architecture section and released recipes. For
        what LT2 does not use: Geiping et al., "Scaling up Test-Time Compute with Latent Reasoning"
        (Huginn), 2025, for prelude, coda, injection, random start and short gradient; Dehghani et
        al., "Universal Transformers", 2018, for loop embeddings (sinusoids there); Zhu et al.,
        "Scaling Latent Reasoning via Looped Language Models" (Ouro), 2025, for the norms, the head
        and the exit gate.

    Example:
        >>> config = LoopedConfig.tiny("gdn full", loops=2, options={"gdn": {"key_size": 24}})
        >>> config.gdn.key_size, config.gdn.convolution_size
        (24, 4)
        >>> config.with_options(full={"key_value_heads": 1}).full.key_value_heads
        1
    """

    vocabulary: int = 256
    pattern: str = "full full full full"
    loops: int = 1
    feed_forwards: str = "swiglu"
    windows: str | None = None
    feed_forward: int | None = None
    feed_forward_multiple_of: int = 256
    norm: NormKind = "rms"
    residual_gate: bool = True
    prelude: str = ""
    coda: str = ""
    input_injection: bool = False
    injection: Literal["linear", "diagonal"] = "linear"
    prelude_norm: bool = False
    coda_projection: bool = False
    loop_embedding: bool = False
    norm_every_loop: bool = False
    exit_gate: bool = False
    recursion: Literal["expert", "token"] | None = None
    pre_norm: bool = True
    sandwich_norm: bool = False
    norm_of_sum: bool = False
    norm_before_coda: bool = False
    carry_norm: bool = False
    parallel_residual: bool = False
    shared_norm: bool = False
    ladder_residual: bool = False
    residual_group: int | None = None
    streams: int | None = None
    stream_mixing_steps: int = 20
    attention_residual: int | None = None
    raw_sources: bool = False
    message_rank: int | None = None
    embedding_std: float | None = None
    tied_embedding: bool = True
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    residual_scale: float = 1.0
    stream_scale: float = 1.0
    head_scale: float = 1.0
    head_bias: bool = False
    head_soft_cap: float | None = None
    random_start: bool = False
    backward_loops: int | None = None
    remat: bool = False

    @classmethod
    def tiny(cls, pattern: str = "full", loops: int = 1, **overrides) -> "LoopedConfig":
        """A byte model of width 128 that learns something on two cores within a minute or so."""
        sizes: dict[str, Any] = {"width": 128, "heads": 4, "feed_forward_multiple_of": 32}
        options = overrides.pop("options", {})
        config = cls(pattern=pattern, loops=loops, **(sizes | overrides))
        small = {word: layer_of(word).Options.tiny() for word in config.options}
        return dataclasses.replace(config, options=_merged(small, options))

    def __post_init__(self):
        check_numbers(self)
        for name in POSITIVE:
            number = getattr(self, name)
            if number is not None and not number > 0:
                raise ValueError(f"{name} is {number!r}; it must be positive.")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}.")
        if jax.dtypes.canonicalize_dtype(self.dtype) != self.dtype:
            raise ValueError('dtype is "float64", which jax has under `jax_enable_x64` only.')
        check_words(self)
        used = {*self.layers, *self.prelude_layers, *self.coda_layers}
        fed, made = {*self.feed_forward_words}, _merged({}, self.options)
        used |= {"moe"} if fed & MIXTURES else set()
        for word in (made.keys() & FEED_FORWARDS.keys()) - fed - used:
            if made[word] != FEED_FORWARDS[word].Options():
                raise ValueError(
                    f"options name {word!r}, and feed_forwards {self.feed_forwards!r} has no such "
                    f"layer with options; feed_forwards={word!r} makes every layer one."
                )
        kept = {
            word: made.get(word, layer_of(word).Options())
            for word in sorted(used | made.keys())
            if word in used or made[word] != layer_of(word).Options()
        }
        object.__setattr__(self, "options", OptionsByWord(kept))
        for word in kept:
            layer_of(word).check(self)
        if self.windows is not None:
            parsed_windows(self.windows, self.loops, self.layers.count("full"))
        check_loops(self)
        check_norms(self)
        check_connections(self)
        check_recursion(self)

    def __getattr__(self, name: str) -> Any:
        if name in FEED_FORWARDS or name in LAYERS:
            return layer_of(name).options_of(self)
        raise AttributeError(
            f"{type(self).__name__} has no field {name!r} and there is no such layer."
        )

    def with_options(self, **options: Mapping[str, Any] | LayerOptions) -> "LoopedConfig":
        """The same configuration with some options replaced, by layer."""
        return dataclasses.replace(self, options=_merged(self.options, options))

    @property
    def layers(self) -> tuple[str, ...]:
        """The words of the pattern, one per physical layer."""
        return tuple(self.pattern.split())

    @property
    def prelude_layers(self) -> tuple[str, ...]:
        """The words of the prelude."""
        return tuple(self.prelude.split())

    @property
    def coda_layers(self) -> tuple[str, ...]:
        """The words of the coda."""
        return tuple(self.coda.split())

    @property
    def feed_forward_words(self) -> tuple[str, ...]:
        """The word of the feed-forward layer beside each layer of prelude, pattern and coda."""
        words = tuple(self.feed_forwards.split())
        layers = len(self.prelude_layers) + len(self.layers) + len(self.coda_layers)
        return words * layers if len(words) == 1 else words

    @property
    def loop_windows(self) -> tuple[tuple[int | None, ...], ...]:
        """Tokens each physical layer sees, loop by loop; None for no limit."""
        own = tuple(LAYERS[word].window_of(self) for word in self.layers)
        if self.windows is None:
            return (own,) * self.loops
        loops = []
        for narrowed in parsed_windows(self.windows, self.loops, self.layers.count("full")):
            left = iter(narrowed)
            pairs = zip(self.layers, own, strict=True)
            loops.append(tuple(next(left) if word == "full" else w for word, w in pairs))
        return tuple(loops)

    @property
    def loops_differ(self) -> bool:
        """Whether the windows differ between loops, so that no scan can run them."""
        return len(set(self.loop_windows)) > 1

    @property
    def per_loop_switches(self) -> tuple[str, ...]:
        """Fields with parameters per loop, which fix the number of loops."""
        names = ("residual_gate", "loop_embedding", "recursion")
        own = [name for name in names if getattr(self, name)]
        return (*own, "windows") if self.loops_differ else tuple(own)

    @property
    def feed_forward_size(self) -> int:
        """Hidden size of the SwiGLU: given, or 2/3 of 4 x width rounded up."""
        if self.feed_forward is not None:
            return self.feed_forward
        multiple = self.feed_forward_multiple_of
        return -(-int(2 * 4 * self.width / 3) // multiple) * multiple


def layer_of(word: str) -> Any:
    """The class of a word of `pattern` or of `feed_forwards`."""
    return FEED_FORWARDS[word] if word in FEED_FORWARDS else LAYERS[word]


def _merged(
    old: Mapping[str, LayerOptions], new: Mapping[str, Mapping[str, Any] | LayerOptions]
) -> dict[str, LayerOptions]:
    """The old options by word, overridden by the new ones."""
    merged = dict(old)
    for word, options in new.items():
        if word not in FEED_FORWARDS and word not in LAYERS:
            known = ", ".join([*LAYERS, *FEED_FORWARDS])
            raise ValueError(f"options name the unknown layer {word!r}; known: {known}.")
        kind = layer_of(word).Options
        if isinstance(options, Mapping):
            known = [field.name for field in dataclasses.fields(kind)]
            if unknown := sorted(set(options) - set(known)):
                raise ValueError(
                    f"{word}.{unknown[0]} is no option; {word!r} has {', '.join(known) or 'none'}."
                )
            options = dataclasses.replace(merged.get(word) or kind(), **options)
        if type(options) is not kind:
            raise ValueError(
                f"options of {word!r} are {options!r}; they must be a mapping or {kind.__name__}."
            )
        merged[word] = options
    return merged
