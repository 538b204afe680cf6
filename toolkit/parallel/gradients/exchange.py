"""How replicas agree on a gradient, as one value: a compressor, a pattern and a feedback."""

from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from toolkit._checks import check_choice
from toolkit.parallel.gradients.compression.compressor import Compressor
from toolkit.parallel.gradients.compression.compressors import compressor_of
from toolkit.parallel.gradients.compression.feedback import FEEDBACKS, Feedback
from toolkit.parallel.gradients.patterns import PATTERNS, Pattern

DENSE_BELOW = 2**14
ONE_HOP = ("all_reduce", "gather")


@dataclass(frozen=True)
class Exchange:
    """What replicas send each other in place of a dense all-reduce.

    Attributes:
        compressor: a row of `COMPRESSORS`, by name ("int4", "top_k=0.001") or made by a call.
        pattern: a row of `PATTERNS`.
        feedback: a row of `FEEDBACKS`, or "none".
        weights: the compressor of gathered weights under ZeRO-3 (ZeRO++'s qwZ); None gathers them
            as they are.
        near: devices of a group, for the patterns with two levels, where one mesh axis holds both;
            None for those of a process.
        dense_below: tensors with fewer elements on a device are summed as they are, in one buffer.
        seed: of the random rounding and places.
        exceptions: tensors that are exchanged otherwise, (pattern of their paths, exchange), as
            shells match names; the first that matches counts.

    Example:
        >>> str(Exchange.parse("int4:two_hop=4"))
        'int4=256:two_hop=4'
        >>> Exchange.parse("embedding*@top_k=0.01:gather,int8").of("embedding/kernel").pattern
        'gather'
    """

    compressor: Compressor | str = "int4"
    pattern: str = "scatter_gather"
    feedback: str = "none"
    weights: Compressor | str | None = None
    near: int | None = None
    dense_below: int = DENSE_BELOW
    seed: int = 0
    exceptions: tuple[tuple[str, "Exchange"], ...] = ()
    of_gradients: Compressor = field(init=False, repr=False)
    of_weights: Compressor | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_choice("pattern", self.pattern, PATTERNS)
        check_choice("feedback", self.feedback, ("none", *FEEDBACKS))
        if self.dense_below < 0:
            raise ValueError(f"dense_below: got {self.dense_below}, wanted 0 or more")
        named = self.compressor
        row = compressor_of(named) if isinstance(named, str) else named
        object.__setattr__(self, "of_gradients", row)
        named = self.weights
        weights = compressor_of(named) if isinstance(named, str) else named
        object.__setattr__(self, "of_weights", weights)
        self._check_pairs()
        if nested := [pattern for pattern, own in self.exceptions if own.exceptions]:
            raise ValueError(f"exceptions: got {nested[0]!r} with exceptions of its own")

    def _check_pairs(self) -> None:
        row, is_linear = self.of_gradients, self.of_gradients.is_linear
        is_exact = row.name == "float32"
        if (self.pattern == "all_reduce") > is_linear or (self.pattern == "dense") > is_exact:
            raise ValueError(
                f"pattern: got {self.pattern!r} with {row}, whose messages are not sums; wanted "
                "another pattern"
            )
        if is_linear and not is_exact and self.pattern != "all_reduce":
            raise ValueError(
                f"pattern: got {self.pattern!r} with {row}, whose messages have no places; wanted "
                "'all_reduce'"
            )
        if (self.pattern == "vote") > (row.name == "scaled_sign"):
            raise ValueError(f"compressor: got {row} with pattern 'vote', wanted 'scaled_sign'")
        if self.of_weights is not None and self.of_weights.is_linear and not is_exact:
            raise ValueError(f"weights: got {self.of_weights}, wanted one that gathers")
        if (feedback := self.memory) is None:
            return
        if self.pattern in ("vote", "dense"):
            raise ValueError(
                f"feedback: got {self.feedback!r} with pattern {self.pattern!r}; wanted 'none'"
            )
        if row.contraction is None:
            raise ValueError(
                f"feedback: got {self.feedback!r} with {row}, which is no contraction and would "
                "diverge; wanted `contracted` of it, or 'none'"
            )
        if feedback.is_for_sparse and not row.is_sparse:
            raise ValueError(
                f"feedback: got {self.feedback!r} with {row}, wanted it with 'top_k' only"
            )
        if feedback.is_difference and self.pattern not in ONE_HOP:
            raise ValueError(
                f"feedback: got {self.feedback!r} with pattern {self.pattern!r}, which encodes "
                f"twice; wanted {' or '.join(ONE_HOP)}"
            )

    @classmethod
    def parse(cls, text: str) -> "Exchange":
        """Read "compressor:pattern:feedback:weights", of which all but the first may be left out.

        A size follows "=": "top_k=0.001:gather:error_feedback", "int4=64:two_hop=4". Exceptions
        come first, as PATTERN@exchange, with commas between: "embedding*@top_k:gather,int4".
        Tensors that nothing names are summed as they are.
        """
        *rules, last = text.split(",")
        if "@" in last:
            rules, last = [*rules, last], "float32:dense"
        found: dict[str, Exchange] = {}
        exceptions = []
        for rule in rules:
            pattern, at, own = rule.partition("@")
            if not (pattern and at and own):
                raise ValueError(f"exchange: got {rule!r} in {text!r}, wanted PATTERN@exchange")
            found.setdefault(own, cls._parse_alone(own))
            exceptions.append((pattern, found[own]))
        return replace(cls._parse_alone(last), exceptions=tuple(exceptions))

    @classmethod
    def _parse_alone(cls, text: str) -> "Exchange":
        parts = text.split(":")
        if len(parts) > 4:
            raise ValueError(
                f"exchange: got {text!r}, wanted compressor:pattern:feedback:weights at most"
            )
        pattern, _, near = (parts[1] if parts[1:] else "scatter_gather").partition("=")
        if near and not near.isdigit():
            raise ValueError(f"near: got {near!r} in {text!r}, wanted a number of devices")
        feedback = parts[2] if parts[2:] else "none"
        weights = parts[3] if parts[3:] else None
        return cls(parts[0], pattern, feedback, weights, int(near) if near else None)

    def __str__(self) -> str:
        """The text that `parse` reads."""
        near = f"={self.near}" if self.near is not None else ""
        text = f"{self.of_gradients}:{self.pattern}{near}"
        if self.feedback != "none" or self.of_weights is not None:
            text += f":{self.feedback}"
        text += f":{self.of_weights}" if self.of_weights is not None else ""
        return ",".join([*(f"{pattern}@{own}" for pattern, own in self.exceptions), text])

    def of(self, path: str) -> "Exchange":
        """The exchange of a tensor, by its path."""
        matching = (own for pattern, own in self.exceptions if fnmatchcase(path, pattern))
        return next(matching, self)

    @property
    def how(self) -> Pattern:
        """The row of the pattern."""
        return PATTERNS[self.pattern]

    @property
    def memory(self) -> Feedback | None:
        """The row of the feedback, or None."""
        return FEEDBACKS.get(self.feedback)
