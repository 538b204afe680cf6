"""The one dial board of a looped language model: sizes, pattern of layers, number of loops.

Everything else in the room is derived from a `LoopedConfig`, so a configuration can be compared,
costed and matched with another before a single parameter is allocated.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from toolkit.looped.config_checks import check_config


class AttentionSizes(NamedTuple):
    """Head counts and head size of a softmax layer."""

    heads: int
    key_value_heads: int
    head_size: int


@dataclasses.dataclass(frozen=True)
class LoopedConfig:
    """Sizes and switches of a looped language model; checked when made.

    The physical layers are named by `pattern` and run `loops` times with the same parameters.
    Sizes left at None follow the papers' rules: see `attention_sizes`, `feed_forward_size` and the
    `sizes_of` of each recurrent layer.

    Attributes:
        vocabulary: number of tokens; 256 means the model reads bytes.
        width: size of the residual stream.
        pattern: the physical layers in order, e.g. "gdn gdn gdn gdn full".
        loops: how often the stack of physical layers runs.
        heads: query heads of softmax layers, key heads of recurrent layers.
        key_value_heads: key/value heads of softmax layers (None: as many as `heads`).
        head_size: size of a softmax head (None: width / heads).
        value_heads: value heads of recurrent layers, a multiple of `heads` (None: `heads`);
            "hgrn2" and "rwkv7" always have `heads`.
        key_size: key size of a recurrent head (None: the paper's share of width / heads).
        value_size: value size of a recurrent head (None: likewise).
        gdn_value_heads: `value_heads` of "gdn" layers alone.
        gdn_key_size: `key_size` of "gdn" layers alone (None: 0.75 width / heads).
        gdn_value_size: `value_size` of "gdn" layers alone (None: twice the key size).
        negative_eigenvalues: let beta reach 2, so that a delta-rule step can reflect (it always
            does in "delta_product").
        delta_steps: corrections a token of a "delta_product" layer.
        sparse_block: tokens of a block of "nsa" layers.
        sparse_blocks: blocks a query of theirs reads whole.
        sparse_window: tokens of their window.
        selected_tokens: tokens a query of "dsa" layers attends to.
        indexer: what picks them: "lightning", which `indexer_losses` trains, before grouped-query
            attention; or "lt2", random projections as released, before attention to one key of
            `shared_key_size` without positions, whose first `shared_value_size` channels are the
            value.
        index_heads: heads of the indexer (None: `heads`).
        index_size: size of each.
        shared_key_size: see `indexer`.
        shared_value_size: see `indexer`.
        sliding_window: tokens a "window" layer sees, the current one included.
        windows: narrows the "full" layers, loop by loop: "full -> 512 -> 256 -> 128" for four
            loops, or one part for all of them. A part is one word for all "full" layers or a word
            for each: "full" or a number of tokens (None: they see everything).
        feed_forward: hidden size of the SwiGLU (None: 8/3 width, up to a multiple of
            `feed_forward_multiple_of`).
        feed_forward_multiple_of: what the default hidden size is rounded up to.
        rope_theta: base of the rotary wavelengths.
        norm_epsilon: added to the mean square in every RMSNorm.
        residual_gate: learn rho, the per-loop gate on the previous loop's hidden state.
        prelude: layers that run once, before the loops; words as in `pattern`.
        coda: layers that run once, after the loops.
        input_injection: start every loop from adapter([h, e]), e being what the prelude made of
            the tokens; the adapter is a projection from 2 width to width.
        loop_embedding: add a learned vector to the input of each loop, zero-initialised.
        norm_every_loop: the final norm closes every loop, not the last alone.
        exit_gate: learn after which loop to stop; see `exit_probabilities`.
        sandwich_norm: a second RMSNorm a sub-layer, on what it adds to the stream.
        residual_group: layers to a group whose input, times a learned scalar that starts at zero,
            is added to the group's output (None: no groups).
        tied_embedding: the output head is the embedding transposed, not a table of its own.
        query_key_norm: RMSNorm of every query and key head of softmax layers, before they turn.
        rotary_fraction: share of a softmax head's channels, the first ones, that turn with the
            position.
        gdn_heads: `heads` of "gdn" layers alone.
        random_start: the loops start from noise, and know the tokens by injection alone.
        backward_loops: the gradient goes through this many last loops (None: through all).
        attention_output_gate: gate softmax outputs by sigmoid(x W_g), zero-initialised.
        convolution_size: taps of the short causal convolution, in the layers that have one.
        dtype: compute type, "float32" or "bfloat16"; parameters are float32 in both.
        remat: recompute each loop in the backward pass, so memory does not grow with loops.

    Source: LT2, "Linear-Time Looped Transformers", architecture section and released recipes. What
        LT2 does not use: Geiping et al., "Scaling up Test-Time Compute with Latent Reasoning"
        (Huginn), 2025, for prelude, coda, injection, random start and short gradient; Dehghani et
        al., "Universal Transformers", 2018, for loop embeddings (sinusoids there); Zhu et al.,
        "Scaling Latent Reasoning via Looped Language Models" (Ouro), 2025, for the norms, the head
        and the exit gate; Qwen3-Next for the norm of queries and keys and the part that turns.
    """

    vocabulary: int = 256
    width: int = 256
    pattern: str = "full full full full"
    loops: int = 1
    heads: int = 4
    key_value_heads: int | None = None
    head_size: int | None = None
    value_heads: int | None = None
    key_size: int | None = None
    value_size: int | None = None
    gdn_value_heads: int | None = None
    gdn_key_size: int | None = None
    gdn_value_size: int | None = None
    negative_eigenvalues: bool = False
    delta_steps: int = 2
    sparse_block: int = 64
    sparse_blocks: int = 16
    sparse_window: int = 512
    selected_tokens: int = 2048
    indexer: str = "lightning"
    index_heads: int | None = None
    index_size: int = 64
    shared_key_size: int = 576
    shared_value_size: int = 512
    sliding_window: int = 64
    windows: str | None = None
    feed_forward: int | None = None
    feed_forward_multiple_of: int = 256
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    residual_gate: bool = True
    prelude: str = ""
    coda: str = ""
    input_injection: bool = False
    loop_embedding: bool = False
    norm_every_loop: bool = False
    exit_gate: bool = False
    sandwich_norm: bool = False
    residual_group: int | None = None
    tied_embedding: bool = True
    query_key_norm: bool = False
    rotary_fraction: float = 1.0
    gdn_heads: int | None = None
    random_start: bool = False
    backward_loops: int | None = None
    attention_output_gate: bool = False
    convolution_size: int = 4
    dtype: str = "float32"
    remat: bool = False

    @classmethod
    def tiny(cls, pattern: str = "full", loops: int = 1, **overrides) -> "LoopedConfig":
        """A byte model that learns something on two cores within a minute or so.

        Args:
            pattern: the physical layers, e.g. "gdn gdn gdn gdn full".
            loops: how often they run.
            **overrides: any other field of the configuration.

        Returns:
            A configuration of width 128 with 4 heads.

        Raises:
            ValueError: if a field is out of range.
        """
        sizes: dict[str, Any] = {"width": 128, "heads": 4, "feed_forward_multiple_of": 32}
        # Fewer tokens than a text of 64 to 256 bytes has, so that selecting makes a difference.
        sizes |= {"sparse_block": 8, "sparse_blocks": 4, "sparse_window": 16}
        sizes |= {"selected_tokens": 32, "index_size": 16}
        sizes |= {"shared_key_size": 72, "shared_value_size": 64}
        return cls(pattern=pattern, loops=loops, **(sizes | overrides))

    @classmethod
    def lt2_1b(cls, pattern: str = "gdn gdn gdn gdn full", loops: int = 4) -> "LoopedConfig":
        """LT2's 1B hybrid (20 layers of width 2048): for costing, not for a laptop.

        Args:
            pattern: five layers, repeated four times.
            loops: how often the 20 layers run.

        Returns:
            The configuration; the number of heads is not published and taken as 16.

        Source: LT2, 1B recipe.
        """
        return cls(
            vocabulary=128_256,
            width=2048,
            pattern=" ".join([pattern] * 4),
            loops=loops,
            heads=16,
            sliding_window=2048,
            attention_output_gate=True,
            dtype="bfloat16",
        )

    def __post_init__(self):
        check_config(self)

    @property
    def layers(self) -> tuple[str, ...]:
        """The words of the pattern, one a physical layer."""
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
    def loop_windows(self) -> tuple[tuple[int | None, ...], ...]:
        """Tokens each physical layer sees, loop by loop; None for no limit."""
        own = tuple(self.sliding_window if word == "window" else None for word in self.layers)
        if self.windows is None:
            return (own,) * self.loops
        full = self.layers.count("full")
        loops = []
        for part in self.windows.split("->"):
            words = part.split()
            narrowed = iter(words * full if len(words) == 1 else words)
            loops.append(
                tuple(
                    _window(next(narrowed)) if word == "full" else window
                    for word, window in zip(self.layers, own, strict=True)
                )
            )
        return tuple(loops) * (self.loops if len(loops) == 1 else 1)

    @property
    def loops_differ(self) -> bool:
        """Whether some loop has other windows than another, so that no scan can run them."""
        return len(set(self.loop_windows)) > 1

    @property
    def per_loop_switches(self) -> tuple[str, ...]:
        """Fields that give each loop something of its own, and so fix the number of loops."""
        own = [name for name in ("residual_gate", "loop_embedding") if getattr(self, name)]
        return (*own, "windows") if self.loops_differ else tuple(own)

    @property
    def compute_dtype(self) -> jnp.dtype:
        """`dtype` as a NumPy type."""
        return jnp.dtype(self.dtype)

    @property
    def attention_sizes(self) -> AttentionSizes:
        """Heads, key/value heads and head size of "full" and "window" layers."""
        return AttentionSizes(
            self.heads,
            self.key_value_heads or self.heads,
            self.head_size or self.width // self.heads,
        )

    @property
    def feed_forward_size(self) -> int:
        """Hidden size of the SwiGLU: given, or 2/3 of 4 x width rounded up."""
        if self.feed_forward is not None:
            return self.feed_forward
        multiple = self.feed_forward_multiple_of
        return -(-int(2 * 4 * self.width / 3) // multiple) * multiple


def _window(word):
    return None if word == "full" else int(word)
