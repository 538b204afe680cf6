"""The recorded times in `data/measurements`, each with its work."""

import functools
import re
from dataclasses import dataclass

from toolkit.attention import MIXERS, mixer
from toolkit.bench.mixers.gpu import Work, modelled_work
from toolkit.lab.kit.stored import stored_folder
from toolkit.measure import Peak, Record, read_records
from toolkit.measure.timing import PASSED

FORWARD, GRADIENT, STEP, OTHER = "forward", "forward+backward", "step", "other"
# How suites name what `MIXERS` has under another name.
_ROWS = {"softmax": "full", "softmax_attention": "full", "gated_delta_net": "gdn"}
_SIZE = re.compile(r"\b(B|T|H|D|context)=(\d+)|\bafter (\d+) tokens")


@dataclass(frozen=True)
class Time:
    """Seconds of one contender at one piece of work.

    Attributes:
        method: a name of `MIXERS`, or of the suite if no single mixer was timed.
        work: `FORWARD`, `GRADIENT`, `STEP` or `OTHER`.
        case: the suite's name of the work.
        contender: the name of the contender.
        batch, tokens, heads, size: None if not recorded.
        record: the record.
        is_here: measured by this process, not read from a file.
    """

    method: str
    work: str
    case: str
    contender: str
    batch: int | None
    tokens: int | None
    heads: int | None
    size: int | None
    record: Record
    is_here: bool = False

    @property
    def kind(self) -> str:
        """Where the number comes from, in words."""
        return "measured here" if self.is_here else "recorded"

    @property
    def is_checked(self) -> bool:
        """Whether a check of correctness had to pass before this was timed."""
        return self.record.check == PASSED

    @property
    def is_ours(self) -> bool:
        """Whether this package did the work, in any form."""
        return self.is_checked and re.match(r"toolkit\b|T=|after", self.contender) is not None

    def is_rival(self, other: "Time") -> bool:
        """Whether the two did the same work in the same process, by turns.

        What was timed as a yardstick did other work, and was not checked.
        """
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("case", "tokens", "is_checked", "is_here")
        ) and (self.record.device, self.record.command) == (
            other.record.device,
            other.record.command,
        )

    def modelled_seconds(self, peak: Peak) -> float | None:
        """The least time of this work on a chip, in bfloat16; None without a formula.

        A step of a mixer with a state of fixed size is the same after any context.
        """
        row = MIXERS.get(self.method)
        sizes = self.batch, self.tokens or 1, self.heads, self.size
        if row is None or self.work == OTHER or not self.is_checked or None in sizes:
            return None
        batch, tokens, heads, size = map(int, sizes)  # pyright: ignore[reportArgumentType]
        if self.work != STEP:
            is_gradient = self.work == GRADIENT
            return modelled_work(
                row, (batch, tokens, heads, size), backward=is_gradient
            ).floor_seconds(peak)
        if self.tokens is None and not row.is_linear_time:
            return None
        shape = batch, tokens, heads, size, size
        moved = row.step_bytes(*shape, element_bytes=2, **row.options)
        return Work(row.step_flops(*shape, **row.options), moved).floor_seconds(peak)


def read_time(record: Record, suite: str) -> Time | None:
    """A record as a time; None for one that is of something else, such as memory."""
    case, *_, contender = record.name.split(" | ")
    if record.unit != "s" or record.kind == "modelled":
        return None
    found = {name or "after": int(number or after)
             for name, number, after in _SIZE.findall(f"{case} {contender}")}  # fmt: skip
    word = case.split(" ")[0].removesuffix("_step")
    method, work = _ROWS.get(word, word), OTHER
    if method in MIXERS:
        is_step = "step" in case.split(" H=")[0]
        work = STEP if is_step else GRADIENT if GRADIENT in case else FORWARD
    return Time(
        method if method in MIXERS else suite, work, case, contender, found.get("B"),
        found.get("T", found.get("context", found.get("after"))), found.get("H"), found.get("D"),
        record,
    )  # fmt: skip


@functools.cache
def recorded_times() -> tuple[Time, ...]:
    """Every time in the records, in the order of machines, suites and cases."""
    files = sorted(stored_folder("measurements").glob("*/*.json"))
    times = (read_time(record, path.stem) for path in files for record in read_records(path))
    return tuple(time for time in times if time is not None)


def title_of(method: str) -> str:
    """A method for menus and tables."""
    return mixer(method).title if method in MIXERS else f"suite {method}"
