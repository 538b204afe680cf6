"""The communication of the compiled step and of the textbook: counts, bytes, causes. Pure
functions."""

from dataclasses import dataclass

from toolkit.lab.kit.view import Data, View
from toolkit.lab.sharding.lanes import Span, lanes
from toolkit.lab.sharding.stored_steps import StoredCollective, compiled_with, stored_step
from toolkit.lab.sharding.textbook import Expected, textbook
from toolkit.measure import in_words

KINDS = ("all-reduce", "all-gather", "reduce-scatter")  # no other is in a stored step


@dataclass(frozen=True)
class StepView(View):
    """The collectives of one step, as compiled and as in the textbook."""

    mesh: str
    scheme: str
    collectives: tuple[StoredCollective, ...]
    expected: tuple[Expected, ...]
    spans: tuple[Span, ...]
    chosen: int  # index among `collectives`

    def compiled_of(self, kind: str) -> tuple[int, float]:
        """How many collectives of a kind run in the compiled step, and the bytes a device sends."""
        made = [one for one in self.collectives if one.kind == kind]
        return sum(one.count for one in made), sum(one.bytes_sent for one in made)

    def expected_of(self, kind: str) -> tuple[int, float]:
        """The same of the textbook's."""
        made = [one for one in self.expected if one.kind == kind]
        return len(made), sum(one.bytes_sent for one in made)

    def verdict(self, one: StoredCollective) -> str:
        """The blame for a collective."""
        if not one.change:
            return "needed: no single change lessens it (modelled)"
        removed = "removed" if one.is_removed else "not removed"
        then = in_words(one.bytes_sent_then, "bytes")
        return f"tried: {one.change}: {removed}, {then} sent in all (compiled)"

    def description(self) -> tuple[str, str, str]:
        """Of the chosen collective: what it is, its cause, its blame."""
        if not self.collectives:
            return "Nothing is sent.", "", ""
        one = self.collectives[self.chosen]
        size = in_words(one.bytes_sent, "bytes")
        head = f"{self.chosen + 1}: {one.kind} over {'+'.join(one.axes)}, {size}, at {one.source}"
        return head, one.cause, self.verdict(one)

    def data(self) -> Data:
        made, book = self.collectives, self.expected
        return {
            "": [*("compiled" for _ in made), *("textbook, modelled" for _ in book)],
            "collective": [one.kind for one in (*made, *book)],
            "runs": [*(one.count for one in made), *(1 for _ in book)],
            "sent per device (bytes)": [one.bytes_sent for one in (*made, *book)],
            "line": [*(one.source for one in made), *("" for _ in book)],
            "why": [*(one.cause for one in made), *(one.purpose for one in book)],
            "blame": [*map(self.verdict, made), *("" for _ in book)],
        }

    def sentence(self) -> str:
        def all_of(rows) -> str:
            sent = in_words(sum(one.bytes_sent for one in rows), "bytes")
            return f"{len(rows)} collectives and {sent} sent per device"

        return (
            f"Scheme {self.scheme!r} on {self.mesh}: the compiled step has "
            f"{all_of(self.collectives)}, the textbook {all_of(self.expected)} (modelled). "
            + ". ".join(words for words in self.description() if words)
        )

    def footnote(self) -> str:
        return (
            f"Compiled: {compiled_with()}; XLA for CPUs sums in one all-reduce where others "
            "scatter. Textbook: modelled."
        )


def step_of(*, mesh: str, scheme: str, collective: int) -> StepView:
    """The step of a menu entry; `collective` counts from 1, and the last stands for all beyond."""
    step = stored_step(mesh, scheme)
    chosen = max(min(collective, len(step.collectives)) - 1, 0)
    spans = tuple(lanes(step.collectives))
    return StepView(mesh, scheme, step.collectives, tuple(textbook(step)), spans, chosen)
