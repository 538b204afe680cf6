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
        made = [collective for collective in self.collectives if collective.kind == kind]
        return sum(collective.count for collective in made), sum(
            collective.bytes_sent for collective in made
        )

    def expected_of(self, kind: str) -> tuple[int, float]:
        """The same of the textbook's."""
        made = [collective for collective in self.expected if collective.kind == kind]
        return len(made), sum(collective.bytes_sent for collective in made)

    def verdict(self, collective: StoredCollective) -> str:
        """The blame for a collective."""
        if not collective.change:
            return "needed: no single change lessens it (modelled)"
        removed = "removed" if collective.is_removed else "not removed"
        then = in_words(collective.bytes_sent_then, "bytes")
        return f"tried: {collective.change}: {removed}, {then} sent in all (compiled)"

    def description(self) -> tuple[str, str, str]:
        """Of the chosen collective: what it is, its cause, its blame."""
        if not self.collectives:
            return "Nothing is sent.", "", ""
        collective = self.collectives[self.chosen]
        size = in_words(collective.bytes_sent, "bytes")
        over = f"{collective.kind} over {'+'.join(collective.axes)}"
        head = f"{self.chosen + 1}: {over}, {size}, at {collective.source}"
        return head, collective.cause, self.verdict(collective)

    def data(self) -> Data:
        made, book = self.collectives, self.expected
        return {
            "": [*("compiled" for _ in made), *("textbook, modelled" for _ in book)],
            "collective": [collective.kind for collective in (*made, *book)],
            "runs": [*(collective.count for collective in made), *(1 for _ in book)],
            "sent per device (bytes)": [collective.bytes_sent for collective in (*made, *book)],
            "line": [*(collective.source for collective in made), *("" for _ in book)],
            "why": [
                *(collective.cause for collective in made),
                *(collective.purpose for collective in book),
            ],
            "blame": [*map(self.verdict, made), *("" for _ in book)],
        }

    def sentence(self) -> str:
        def all_of(rows) -> str:
            sent = in_words(sum(collective.bytes_sent for collective in rows), "bytes")
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
