"""The parts of an explanation: a collective with its cause, and a category of memory."""

from dataclasses import dataclass

from toolkit.measure import Collective


@dataclass(frozen=True)
class ExplainedCollective:
    """One communication of a compiled program and why it is there.

    Attributes:
        collective: kind, bytes and count.
        axes: the mesh axes it runs along; () if they could not be read.
        before: the array's sharding on those axes before, such as "cut along dimension 0".
        after: the same after the collective.
        source: file and line of its operation, such as "model.py:12".
        function: the function that contains that line.
        origin: the source of the array: an argument with its spec, or an operation's line.
        wanted_by: the consumer of the result: an operation's line, or a result with its spec.

    Example:
        >>> from toolkit.measure import Collective
        >>> found = Collective("all-reduce", 64, 64, 8, 112.0, 3, True, "psum")
        >>> cause = ("partial sums", "whole", "model.py:12", "loss", "dot", "add")
        >>> one = ExplainedCollective(found, ("data",), *cause)
        >>> one.sentence
        'all-reduce over data: partial sums -> whole; from dot, for add'
    """

    collective: Collective
    axes: tuple[str, ...]
    before: str
    after: str
    source: str
    function: str
    origin: str
    wanted_by: str

    @property
    def sentence(self) -> str:
        """The cause in one line."""
        over = ", ".join(self.axes) or f"{self.collective.group_size} devices"
        change = f"{self.before} -> {self.after}"
        return (
            f"{self.collective.kind} over {over}: {change}; from {self.origin}, "
            f"for {self.wanted_by}"
        )


@dataclass(frozen=True)
class MemoryRow:
    """One category of a device's memory.

    Attributes:
        category: an argument's name, "results", "temporaries", ...
        predicted: bytes from shapes and shardings; None if these do not determine it.
        compiled: bytes that the compiler reports; None if it reports only a sum.

    Example:
        >>> MemoryRow("params", 1024, None).predicted
        1024
    """

    category: str
    predicted: int | None
    compiled: int | None
