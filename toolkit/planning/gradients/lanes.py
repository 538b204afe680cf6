"""The exchanges of a backward pass in lanes: computing, and the link.

Gradients are ready in the order of back-propagation. An option encodes a group of them, which
delays all computing after it, sends it when the link is free, and decodes it beside the link:

    delay += encode
    link   = max(link, ready + delay) + send
    end    = max(end, link + decode)
    step   = max(end, ready of the last + delay)

All three only ever enter later values through sums and maxima, so that a smaller one never hurts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Cost(NamedTuple):
    """Seconds of one message: before the link, on it, and after it.

    Example:
        >>> Cost(encode=0.5, send=2.0).decode
        0.0
    """

    encode: float
    send: float
    decode: float = 0.0


@dataclass(frozen=True)
class Option:
    """One way to exchange the gradients of a group of tensors.

    Attributes:
        name: such as "int4=256:far".
        cost: (first, last) -> seconds for the tensors from `first` to before `last`.

    Example:
        >>> Option("dense", lambda first, last: Cost(0.0, 1.5 * (last - first))).cost(0, 2).send
        3.0
    """

    name: str
    cost: Callable[[int, int], Cost]


class Message(NamedTuple):
    """A group of tensors and its way: those from `first` to before `last`, by an option."""

    first: int
    last: int
    option: Option


class Lane(NamedTuple):
    """A stretch of a lane: "encode", "link" or "decode", from start to end in seconds."""

    name: str
    message: int
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """Messages in the order of back-propagation, laid out in time (modelled).

    Attributes:
        ready: seconds at which each tensor's gradient is ready, without any encoding.
        messages: groups that cover the tensors in order.

    Example:
        >>> from toolkit.planning.gradients.lanes import Message
        >>> dense = Option("dense", lambda first, last: Cost(0.0, 2.0))
        >>> found = Schedule((1.0, 2.0), (Message(0, 1, dense), Message(1, 2, dense)))
        >>> found.seconds, found.exposed
        (5.0, 3.0)
    """

    ready: tuple[float, ...]
    messages: tuple[Message, ...]

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """What runs when."""
        delay, link, found = 0.0, 0.0, []
        for at, (first, last, option) in enumerate(self.messages):
            cost = option.cost(first, last)
            ready = self.ready[last - 1] + delay
            delay += cost.encode
            start = max(link, ready + cost.encode)
            link = start + cost.send
            for name, begins, ends in (
                ("encode", ready, ready + cost.encode),
                ("link", start, link),
                ("decode", link, link + cost.decode),
            ):
                if ends > begins:
                    found.append(Lane(name, at, begins, ends))
        return tuple(found)

    @property
    def encoding(self) -> float:
        """Seconds by which encoding delays the backward pass."""
        return sum(lane.end - lane.start for lane in self.lanes if lane.name == "encode")

    @property
    def seconds(self) -> float:
        """Until everything is computed, sent and decoded."""
        computed = self.ready[-1] + self.encoding
        return max([computed, *(lane.end for lane in self.lanes)])

    @property
    def exposed(self) -> float:
        """Seconds beyond the backward pass: what is not hidden, and what encoding adds."""
        return self.seconds - self.ready[-1]

    def options(self) -> list[str]:
        """The option's name for every tensor."""
        return [m.option.name for m in self.messages for _ in range(m.first, m.last)]


def one_by_one(ready: Sequence[float], options: Sequence[Option]) -> Schedule:
    """Every tensor as a message of its own, each with its option."""
    messages = (Message(at, at + 1, option) for at, option in enumerate(options))
    return Schedule(tuple(ready), tuple(messages))
