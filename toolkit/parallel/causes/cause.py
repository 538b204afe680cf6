"""What an explanation is made of: a collective with its cause, and a category of memory."""

from dataclasses import dataclass

from toolkit.measure import Collective


@dataclass(frozen=True)
class ExplainedCollective:
    """One communication of a compiled program and why it is there.

    Attributes:
        collective: what moves, how many bytes, how often.
        axes: the mesh axes it runs along; () where they could not be read.
        before: how the array lies on those axes before, such as "cut along dimension 0".
        after: how it lies after.
        source: file and line of the operation it belongs to, such as "model.py:12".
        function: the function that line is in.
        origin: where the array comes from: an argument with its spec, or an operation's line.
        wanted_by: who wants it as it lies after: an operation's line or a result with its spec.

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
        predicted: bytes by shapes and shardings alone; None where these do not tell.
        compiled: bytes the compiler reports; None where it reports only a sum.

    Example:
        >>> MemoryRow("params", 1024, None).predicted
        1024
    """

    category: str
    predicted: int | None
    compiled: int | None
