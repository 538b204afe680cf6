"""Options of softmax layers."""

import dataclasses
from typing import Literal

from toolkit.attention.latent import Yarn
from toolkit.looped.layers import Scaling
from toolkit.looped.mixing.layer import LayerOptions
from toolkit.looped.mixing.rotary import DividedFrequencies, RotaryScaling, YarnScaling


@dataclasses.dataclass(frozen=True)
class AttentionOptions(LayerOptions):
    """Options of softmax layers.

    Attributes:
        key_value_heads: heads of keys and values (None: as many as the model's `heads`).
        head_size: size of a head (None: width / heads).
        query_key_norm: RMSNorm of every query and key head before the rotary embedding.
        plain_norm_epsilon: the same without a scale, with this number added to the mean square, as
            in Parcae (None: no such norm).
        projection_norm: the same RMSNorm over all heads at once, as in OLMoE.
        projection_biases: biases of the projections to queries, keys and values, as in Qwen2.
        rotary_fraction: share of a head's channels, the first ones, that the rotary embedding
            turns.
        rotary_factor: the divisor of slow rotary frequencies, see `RotaryScaling`; None: no
            scaling.
        rotary_low, rotary_high: likewise, `low` and `high`.
        rotary_original_length: likewise, `original_length`.
        rotary_rule: what these four numbers mean: "llama3"; "yarn", where `rotary_low` and
            `rotary_high` are its beta_slow and beta_fast; "linear", where all frequencies are
            divided by `rotary_factor`.
        rotary_truncate: see `toolkit.attention.latent.Yarn`.
        rotary_divisors: a divisor per pair of turned channels, as in LongRoPE, in place of a
            `rotary_factor`.
        rotary_amplitude: factor of turned queries and keys (None: the rule's own).
        rope_theta: base of the rotary wavelengths of these layers (None: the model's).
        longest: tokens beyond which a text is refused, where positions would turn otherwise in a
            longer one (None: no limit).
        score_scale: factor of the scores (None: head_size^-1/2).
        logits_soft_cap: bound c of the scores s, which become c tanh(s / c), as in Gemma 2.
        sinks: learn a score per head of a key without a value, as in gpt-oss.
        output_bias: add a bias to the projection back.
        output_gate: gate the heads' outputs by sigmoid(x W_g), zero-initialised.
        quantised_cache: store keys and values in int8, as a quantised `KVCache` does;
            `attention.quantisation_error` measures the error.
    """

    key_value_heads: int | None = None
    head_size: int | None = None
    query_key_norm: bool = False
    plain_norm_epsilon: float | None = None
    projection_norm: bool = False
    projection_biases: bool = False
    rotary_fraction: float = 1.0
    rotary_factor: float | None = None
    rotary_low: float = 1.0
    rotary_high: float = 4.0
    rotary_original_length: int = 8192
    rotary_rule: Literal["llama3", "yarn", "linear"] = "llama3"
    rotary_truncate: bool = True
    rotary_divisors: tuple[float, ...] | None = None
    rotary_amplitude: float | None = None
    rope_theta: float | None = None
    longest: int | None = None
    score_scale: float | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False
    output_bias: bool = False
    output_gate: bool = False
    quantised_cache: bool = False

    def __post_init__(self):
        if isinstance(self.rotary_divisors, list):  # as JSON has it
            object.__setattr__(self, "rotary_divisors", tuple(map(float, self.rotary_divisors)))

    @property
    def yarn(self) -> Yarn | None:
        """YaRN, or None where rotary wavelengths are not stretched by it."""
        if self.rotary_factor is None or self.rotary_rule != "yarn":
            return None
        return Yarn(
            factor=self.rotary_factor,
            original_length=self.rotary_original_length,
            beta_fast=self.rotary_high,
            beta_slow=self.rotary_low,
            truncate=self.rotary_truncate,
        )

    def rotary_scaling(self, theta: float) -> Scaling | None:
        """The stretch of rotary wavelengths of base `theta`, or None."""
        amplitude = self.rotary_amplitude
        if self.rotary_divisors is not None:
            if self.rotary_factor is not None:
                raise ValueError(
                    "rotary_divisors and rotary_factor exclude each other; give one of them."
                )
            return DividedFrequencies(self.rotary_divisors, amplitude or 1.0)
        if self.yarn is not None:
            return YarnScaling(self.yarn, theta, amplitude)
        if amplitude is not None:
            raise ValueError('rotary_amplitude wants rotary_divisors, or the rotary_rule "yarn".')
        if self.rotary_factor is None:
            return None
        if self.rotary_rule == "linear":
            return DividedFrequencies((self.rotary_factor,))
        turns = self.rotary_low, self.rotary_high
        return RotaryScaling(self.rotary_factor, *turns, self.rotary_original_length)


@dataclasses.dataclass(frozen=True)
class WindowOptions(AttentionOptions):
    """Options of "window" layers: `AttentionOptions` and `sliding_window`, the tokens a query sees,
    its own included."""

    sliding_window: int = 64
