"""What is asked of the engine, what it answers, and a trace of requests as plain numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from toolkit._checks import check_fields, checked
from toolkit.looped.decoding.sampling import check_sampling

Reason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it; the options are those of `toolkit.looped.generate`.

    The engine writes what `generate(model, [prompt], length, key=jax.random.key(seed), ...)` writes
    alone, up to and including the first stop token.

    Attributes:
        prompt: tokens, at least one.
        length: most tokens to write, at least one.
        temperature: 0 takes the most likely token.
        top_k, top_p, min_p, repetition_penalty: see `generate`.
        seed: of the request's own random key; token j uses `fold_in(key, j)`.
        stop_tokens: the text ends with the first of these.

    Example:
        >>> Request(prompt=(5, 3), length=4).temperature
        0.0
    """

    prompt: tuple[int, ...]
    length: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self):
        check_fields(self)
        if not self.prompt:
            raise ValueError("prompt: got no token, wanted at least one")
        if self.length < 1:
            raise ValueError(f"length: got {self.length}, wanted at least 1")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed: got {self.seed}, wanted a whole number of 64 bits")
        penalty = self.repetition_penalty
        # 0 is greedy; NaN is not, and is refused.
        warmth = None if self.temperature == 0 else self.temperature
        check_sampling(warmth, self.top_k, self.top_p, self.min_p, penalty)

    def check_tokens(self, vocabulary: int) -> None:
        """Refuse tokens outside the vocabulary."""
        for name in ("prompt", "stop_tokens"):
            tokens = getattr(self, name)
            if tokens and (min(tokens) < 0 or max(tokens) >= vocabulary):
                wrong = next(token for token in tokens if not 0 <= token < vocabulary)
                raise ValueError(f"{name}: got token {wrong}, wanted some in [0, {vocabulary})")


class Timed:
    """A request with the times of its tokens, in seconds of one clock.

    Attributes:
        arrival: when it was submitted.
        times: when each of its tokens was there.

    Example:
        >>> Progress(Request((5,), 3), 0.0, times=[0.5, 0.75, 1.5]).largest_gap
        0.75
    """

    arrival: float
    times: list[float]

    @property
    def first_token(self) -> float:
        """Seconds from arrival to the first token (TTFT)."""
        return self.times[0] - self.arrival

    @property
    def per_token(self) -> float:
        """Mean seconds between tokens (TPOT); NaN for a single token."""
        gaps = np.diff(self.times)
        return float(gaps.mean()) if len(gaps) else float("nan")

    @property
    def largest_gap(self) -> float:
        """Most seconds between two tokens, which the mean hides; NaN for a single token."""
        gaps = np.diff(self.times)
        return float(gaps.max()) if len(gaps) else float("nan")

    @property
    def completion(self) -> float:
        """Seconds from arrival to the last token (JCT)."""
        return self.times[-1] - self.arrival


@dataclass
class Progress(Timed):
    """How far a request has come; times in seconds of the engine's clock.

    Attributes:
        request: what was asked.
        arrival: when it was submitted.
        tokens: written so far.
        times: when each of them was there.
        shared: prompt tokens that were found in the cache and not read again.
        reason: why it ended, or None.

    Example:
        >>> Progress(Request((5,), 2), arrival=0.0, tokens=[7, 1], times=[0.5, 0.75]).first_token
        0.5
    """

    request: Request
    arrival: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    shared: int = 0
    reason: Reason | None = None


class Written(NamedTuple):
    """A token of a request.

    Attributes:
        number: of the request.
        token: what it wrote.
        reason: why it has ended with this token, or None if it goes on.

    Example:
        >>> Written(number=0, token=7, reason=None).token
        7
    """

    number: int
    token: int
    reason: Reason | None


class TracedRequest(NamedTuple):
    """A request of a trace: numbers only, so that a simulator and an engine can be given the same.

    Attributes:
        arrival: seconds.
        prompt: tokens to read.
        output: tokens to write.

    Example:
        >>> TracedRequest(arrival=0.5, prompt=100, output=3).output
        3
    """

    arrival: float
    prompt: int
    output: int


@checked
def requests_of(trace: Sequence[TracedRequest], vocabulary: int, seed: int = 0) -> list[Request]:
    """Requests with random prompts of a trace's lengths, written greedily, without stop tokens.

    Args:
        trace: the lengths; arrivals are not used.
        vocabulary: tokens to draw from.
        seed: of the prompts.

    Returns:
        One request per entry.

    Example:
        >>> [request] = requests_of([TracedRequest(0.0, 3, 2)], vocabulary=50)
        >>> len(request.prompt), request.length
        (3, 2)
    """
    draw = np.random.default_rng(seed)
    return [
        Request(tuple(draw.integers(0, vocabulary, entry.prompt).tolist()), entry.output)
        for entry in trace
    ]
