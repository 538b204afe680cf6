"""Inputs of mixers from words: queries, keys, values and gates. Pure functions of arrays.

Nothing is trained. A word's features are a fixed random projection of its letters, every input is a
fixed random projection of the features, and gates have the papers' initial values. Inputs are made
by their name (`q`, `g`, ...) or by the range in the mixer's row, so that a new row of `MIXERS`
needs no code here. With one seed all mixers get the same queries, keys, values and rates, so that
they differ only in their rule.
"""

import functools
import inspect
import zlib
from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from toolkit.attention import MIXERS, Input, Mixer, retention_log_decay
from toolkit.attention.costs import LEVELS
from toolkit.lab.attention.reading import word_keys

# Shapes of the programs that are compiled: shorter texts are padded, longer ones cut.
MAX_TOKENS = 32
HEADS = 4
KEY_SIZE = 16
VALUE_SIZE = 16
# Writes per token of the rules that correct their state several times.
CORRECTIONS = 2
# GLA divides the logarithm of its gate by this, which keeps the decay near 1.
_GLA_TEMPERATURE = 16.0
_KNOWN = ("q", "k", "v", "g", "dt", "removal_key")
_SIZES = {
    "heads": HEADS, "key": KEY_SIZE, "value": VALUE_SIZE, "levels": LEVELS, "pairs": KEY_SIZE // 2,
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Settings of the inputs."""

    decay_strength: float = 1.0  # multiplies every log-decay; 1 as the papers start, 0 for none
    write_strength: float = 0.5  # typical beta of a delta rule, in [0, 2]; 0.5 as they start
    seed: int = 0  # which random projections


def recurrent_mixers() -> dict[str, Mixer]:
    """The rows of `MIXERS` that carry a state of fixed size from token to token.

    A cache is empty before the first token and a state is not, which distinguishes them.
    """
    return {name: row for name, row in MIXERS.items() if row.is_recurrent}


def features_of(words: tuple[str, ...]) -> np.ndarray:
    """A vector of unit variance per word, [MAX_TOKENS, KEY_SIZE]; zero after the last one.

    Equal words have equal ones, similar words similar ones.
    """
    return word_keys(words, MAX_TOKENS) * np.sqrt(KEY_SIZE)


@dataclass(frozen=True)
class Inputs:
    """The inputs of one mixer."""

    arrays: tuple[np.ndarray, ...]  # as the row's functions take them, [1, MAX_TOKENS, HEADS, ...]
    constants: dict[str, np.ndarray]  # keyword arguments, the same for every token
    log_decay: np.ndarray  # mean over the key channels, [MAX_TOKENS, HEADS]


def inputs_of(row: Mixer, features: np.ndarray, settings: Settings) -> Inputs:
    r"""All inputs of a mixer, from the features of the words.

        k = unit(x W_k),  q = unit(x (W_k + W_q)),  v = x W_v    (a word asks for its like)
        beta = 2 sigmoid(x w + b),  2 sigmoid(b) = write strength
        g = -decay strength * A softplus(x w + dt_bias)          and the other papers' decays

    Source: The initialisations of the rows' papers: A and dt of Mamba-2 (arXiv:2405.21060), Gated
        DeltaNet and Kimi Delta Attention; gates of GLA (arXiv:2312.06635), HGRN2 (arXiv:2404.07904)
        and RWKV-7 (arXiv:2503.14456).
    """
    corrections = [_Maker(row, features, settings, i) for i in range(CORRECTIONS)]
    made: dict[str, np.ndarray] = {}
    for array in row.inputs:
        makers = corrections if "steps" in array.axes else corrections[:1]
        method = array.name if array.name in _KNOWN else "gate"
        arrays = [getattr(maker, method)(array) for maker in makers]
        made[array.name] = np.stack(arrays, axis=2) if "steps" in array.axes else arrays[0]
    constants = {}
    log_decay = np.zeros((MAX_TOKENS, HEADS))
    # Retention's decay is no gate but a constant of each head, given by name.
    if "log_decay" in inspect.signature(row.function).parameters:
        rates = settings.decay_strength * np.asarray(retention_log_decay(HEADS), np.float32)
        constants["log_decay"] = rates
        log_decay = log_decay + rates
    if "g" in made:
        log_decay = made["g"].mean(-1) if made["g"].ndim > 2 else made["g"]
    arrays = tuple(x[None].astype(np.float32) for x in made.values())
    return Inputs(arrays, constants, log_decay)


@dataclass(frozen=True)
class _Maker:
    """Makes the inputs of a row from the features: one method per name of `_KNOWN`."""

    mixer: Mixer
    features: np.ndarray
    settings: Settings
    correction: int

    def project(self, name: str, *axes: int) -> np.ndarray:
        """Features times a fixed random matrix: [MAX_TOKENS, *axes], entries of unit variance."""
        # The first correction of a token gets what the mixers with a single one get.
        weights = _projection(f"{name}{self.correction or ''}", self.settings.seed, axes)
        return np.tensordot(self.features, weights, axes=1)

    def logit(self, array: Input) -> np.ndarray:
        """Of a gate: one per number it has."""
        return self.project(array.name, *(_SIZES[axis] for axis in array.axes if axis in _SIZES))

    def q(self, array: Input) -> np.ndarray:
        return _unit(self.project("k", HEADS, KEY_SIZE) + self.project("q", HEADS, KEY_SIZE))

    def removal_key(self, array: Input) -> np.ndarray:
        return _unit(self.project("k", HEADS, KEY_SIZE))

    def k(self, array: Input) -> np.ndarray:
        keys = self.removal_key(array)
        # RWKV-7 writes its key as strongly as it removes the old one.
        has_rate = "rate" in self.mixer.names
        return keys * self.gate(self.mixer.input("rate")) if has_rate else keys

    def v(self, array: Input) -> np.ndarray:
        return self.project("v", HEADS, VALUE_SIZE) / np.sqrt(VALUE_SIZE)

    def dt(self, array: Input) -> np.ndarray:
        """Time steps: softplus of the logit and a bias that spreads them over 0.001 to 0.1."""
        channels = self._channels()
        place = _uniform("dt", self.settings.seed, (HEADS, *channels))
        # One head in each quarter of the range, head 0 the quickest to forget.
        heads = np.arange(HEADS).reshape(HEADS, *(1 for _ in channels))
        step = np.exp(np.log(0.1) + (heads + place) / HEADS * np.log(1e-3 / 0.1))
        bias = step + np.log(-np.expm1(-step))
        return np.logaddexp(0, self.project("g", HEADS, *channels) + bias)

    def g(self, array: Input) -> np.ndarray:
        """The log-decay of the paper whose gates these are, told by what else the mixer takes."""
        row, strength, channels = self.mixer, self.settings.decay_strength, self._channels()
        if np.isfinite(array.values.low):  # RWKV-7: from slow to quick channels
            slowness = -6.5 + 5 * (np.arange(KEY_SIZE) / (KEY_SIZE - 1)) ** 0.85
            return strength * array.values.low * expit(self.logit(array) + slowness)
        if row.gates != ("g",) or not channels:  # Mamba-2, Gated DeltaNet, Kimi
            # A, uniform between 1 and 16, one per head.
            rates = 1 + 15 * _uniform("A", self.settings.seed, (HEADS,))
            return -strength * (rates[:, None] if channels else rates) * self.dt(array)
        divisor = _GLA_TEMPERATURE if "k" in row.names else 1.0  # HGRN2 makes its keys of g
        return -strength * np.logaddexp(0, -self.logit(array)) / divisor

    def gate(self, array: Input) -> np.ndarray:
        """Strengths and rates start at the write strength, any other input where its row says."""
        logit, high = self.logit(array), array.values.high
        if array.values.low != 0:
            return array.values.of(logit)
        part = min(self.settings.write_strength / high, 1.0)
        with np.errstate(divide="ignore"):  # at 0 and 1 the gate is closed and open for good
            return high * expit(logit + float(np.log(part) - np.log1p(-part)))

    def _channels(self) -> tuple[int, ...]:
        """`(KEY_SIZE,)` if every channel decays on its own."""
        return (KEY_SIZE,) if "key" in self.mixer.input("g").axes else ()


def _generator(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng((seed, zlib.crc32(name.encode())))


@functools.lru_cache(maxsize=256)
def _projection(name: str, seed: int, axes: tuple[int, ...]) -> np.ndarray:
    weights = _generator(name, seed).standard_normal((KEY_SIZE, *axes))
    return weights / np.sqrt(KEY_SIZE)


def _uniform(name: str, seed: int, axes: tuple[int, ...]) -> np.ndarray:
    return _generator(name, seed).uniform(size=axes)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)
