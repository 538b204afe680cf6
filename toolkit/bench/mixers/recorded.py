"""Every time in `data/measurements` with its work, and that work done here.

What is done here is checked before it is timed, in pieces short enough to stop between.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from toolkit.attention import MIXERS, mixer
from toolkit.bench.agreement import agree
from toolkit.bench.mixers.gpu import Work, modelled_work
from toolkit.bench.mixers.inputs import mixer_form, mixer_inputs, output_weight
from toolkit.measure import Peak, Record, published_peak, read_records, record, time_contenders
from toolkit.measure.stored import stored_folder
from toolkit.measure.timing import PASSED

FORWARD, GRADIENT, STEP, OTHER = "forward", "forward+backward", "step", "other"
CHIPS: dict[str, Peak] = {
    name: peak
    for name in ("a100", "h100", "h200", "b200", "tpu v5e", "tpu v5p", "tpu v6e", "tpu v7x")
    if (peak := published_peak(name)) is not None
}
# How suites name what `MIXERS` has under another name.
_ROWS = {"softmax": "full", "softmax_attention": "full", "gated_delta_net": "gdn"}
_SIZE = re.compile(r"\b(B|T|H|D|context)=(\d+)|\bafter (\d+) tokens")


@dataclass(frozen=True)
class Time:
    """Seconds of one contender at one piece of work."""

    method: str  # a name of `MIXERS`, or of the suite if no single mixer was timed
    work: str  # `FORWARD`, `GRADIENT`, `STEP` or `OTHER`
    case: str  # the suite's name of the work
    contender: str  # the name of the contender
    # batch, tokens, heads, size: None if not recorded
    batch: int | None
    tokens: int | None
    heads: int | None
    size: int | None
    record: Record  # the record
    is_here: bool = False  # measured by this process, not read from a file

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

    @property
    def group(self) -> str:
        """Whose time it is: "this package", "others" or "measured here"."""
        return "measured here" if self.is_here else "this package" if self.is_ours else "others"

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


CHECKED_TOKENS = 40  # more than a chunk, and not a whole number of them
TOLERANCE = 1e-3  # relative to the largest entry, float32
ROUNDS = 5
MOST_TOKENS = 8192  # a minute of a small machine, and 900 MB


def can_measure(time: Time | None) -> bool:
    """Whether the button can do this work: a mixer's sequence, not too long for a notebook."""
    return (
        time is not None
        and time.work in (FORWARD, GRADIENT)
        and None not in (time.tokens, time.heads, time.size)
        and (time.tokens or 0) <= MOST_TOKENS
    )


def measure_here(time: Time) -> Iterator[tuple[int, int, str, Time | None]]:
    """Check this package's form against the equation, compile it, time it in rounds.

    Yields (pieces done, pieces in all, what was just done, the time once it is known).
    """
    row, is_gradient = mixer(time.method), time.work == GRADIENT
    total = 3
    assert time.tokens is not None

    def call(tokens: int):
        arrays = mixer_inputs(row, tokens, time.heads or 1, time.size or 1, batch=time.batch or 1)
        args = (output_weight(row, arrays), *arrays) if is_gradient else tuple(arrays)
        form = jax.jit(mixer_form(row, None, backward=is_gradient))
        return arrays, args, lambda: form(*args)

    arrays, _, short = call(min(CHECKED_TOKENS, time.tokens))
    if is_gradient:
        args = (output_weight(row, arrays), *arrays)
        expected = jax.grad(_loss(row), argnums=tuple(range(1, len(args))))(*args)
    else:
        expected = row.reference(*arrays, **row.options)[0]
    agree(TOLERANCE)({"its equation": expected, "toolkit": short()})
    yield 1, total, "agrees with its equation, token by token", None
    _, _, long = call(time.tokens)
    jax.block_until_ready(long())
    yield 2, total, "compiled", None
    timing = time_contenders({"toolkit": long}, rounds=ROUNDS)["toolkit"]
    found = record(
        f"{time.case} | here | toolkit", timing.median, "s", samples=timing.samples, check=PASSED
    )
    new = Time(
        time.method, time.work, time.case, "toolkit, here", time.batch, time.tokens, time.heads,
        time.size, found, is_here=True,
    )  # fmt: skip
    yield 3, total, "timed", new


def _loss(row):
    def loss(weight, *inputs):
        return (row.reference(*inputs, **row.options)[0] * weight).sum()

    return loss
