"""What an annotation says beside a type: ranges, dtypes in common, axes that divide each other.

They stand in `typing.Annotated`, behind the type; `@checked` (`_checks.py`) reads them there.
"""

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

from jax import Array


class Known(NamedTuple):
    """A number of Python or NumPy, which compiling needs."""

    def of_value(self, name: str, value: Any) -> Exception | None:
        """The error with which a value of the right type is refused; None where it is allowed."""
        if isinstance(value, Array):
            shape = ", ".join(map(str, value.shape))
            return TypeError(
                f"{name} must be known when compiling; got an array {value.dtype}[{shape}]."
            )
        return None


class AtLeast(NamedTuple):
    """A whole number from `least` on, known when compiling and small enough for an index."""

    least: int
    why: str = ""

    def of_value(self, name: str, value: Any) -> Exception | None:
        """The error with which a value of the right type is refused; None where it is allowed."""
        if isinstance(value, Array):
            return Known().of_value(name, value)
        if value < self.least:
            return ValueError(f"{name} must be at least {self.least}{self.why}; got {value}.")
        if value >= 2**31:  # an index of jax has 32 bits
            return ValueError(f"{name} must be below 2**31; got {value}.")
        return None


@dataclass(frozen=True)  # as a tuple without fields it would be equal to `Known()`
class Positive:
    """A finite number above zero; an array is not read."""

    def of_value(self, name: str, value: Any) -> Exception | None:
        """The error with which a value of the right type is refused; None where it is allowed."""
        if isinstance(value, Array) or 0 < value < math.inf:
            return None
        return ValueError(f"{name} must be finite and above zero; got {value}.")


class PowerOfTwo(NamedTuple):
    """A power of two from `least` on."""

    least: int

    def of_value(self, name: str, value: Any) -> Exception | None:
        """The error with which a value is refused; None where it is allowed."""
        if isinstance(value, Integral) and int(value) >= self.least and int(value).bit_count() == 1:
            return None
        return ValueError(f"{name} must be a power of two and at least {self.least}; got {value}.")


class Between(NamedTuple):
    """The values of an array, which are read inside `toolkit.checking()` alone."""

    meaning: str
    least: float
    largest: float

    def of_range(self, name: str, low: float, high: float) -> Exception | None:
        """The error with which an array from `low` to `high` is refused; None if it is allowed."""
        if low >= self.least and high <= self.largest:  # NaN is refused
            return None
        bounds = f"in [{self.least:g}, {self.largest:g}]"
        if math.isinf(self.least) or math.isinf(self.largest):
            is_below = math.isinf(self.least)
            bounds = f"<= {self.largest:g}" if is_below else f">= {self.least:g}"
        return ValueError(
            f"{name} is {self.meaning} and must be {bounds}; got {low:g} to {high:g}."
        )


class SameDtype(NamedTuple):
    """Arrays of this label hold something, and in one dtype: promotion is the caller's decision."""

    label: str


class Multiple(NamedTuple):
    """One axis is a whole multiple of another, where a call has both (grouped heads)."""

    many: str
    few: str
    of_many: str
    of_few: str
