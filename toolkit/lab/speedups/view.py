"""Filtered recorded times, the bounds of chips, and one selected time with its rivals."""

from dataclasses import dataclass

from toolkit.lab.kit.view import Data, View
from toolkit.lab.speedups.recorded import Time, title_of
from toolkit.measure import Peak, in_words, published_peak

CHIPS: dict[str, Peak] = {
    name: peak
    for name in ("a100", "h100", "h200", "b200", "tpu v5e", "tpu v5p", "tpu v6e", "tpu v7x")
    if (peak := published_peak(name)) is not None
}
EVERY = "every"


@dataclass(frozen=True)
class Row:
    """One line of the picture beside the chosen time.

    Attributes:
        name: the contender, or the chip.
        seconds: its time.
        group: "this package", "others", "measured here" or "modelled".
        ratio: seconds over ours in the same rounds; None unless all results were checked.
        is_chosen: whether it is the selected time.
    """

    name: str
    seconds: float
    group: str
    ratio: float | None = None
    is_chosen: bool = False


@dataclass(frozen=True)
class SpeedupView(View):
    """The times that pass the filters."""

    times: tuple[Time, ...]
    everything: tuple[Time, ...]  # where rivals are looked for
    chosen: int  # of `times`
    chip: Peak

    @property
    def time(self) -> Time | None:
        """The chosen one."""
        return self.times[self.chosen] if self.times else None

    def ratio(self, time: Time) -> float | None:
        """Its seconds over ours in the same rounds, if both were checked."""
        rivals = [other for other in self.everything if other.is_rival(time)]
        # What a user calls comes first; forms that need a line more follow it.
        ours = next((other for other in rivals if other.contender.startswith("toolkit")), None)
        if ours is None or len(rivals) < 2 or not (ours.is_checked and time.is_checked):
            return None
        return time.record.value / ours.record.value

    def modelled(self, time: Time) -> float | None:
        """The least time on the chip."""
        return time.modelled_seconds(self.chip)

    def rows(self) -> list[Row]:
        """The chosen time, its rivals, what was measured here, and what chips could do."""
        if (chosen := self.time) is None:
            return []
        rivals = [
            other
            for other in self.everything
            if other.is_rival(chosen)
            or (other.case == chosen.case and (other.is_here or chosen.is_here))
        ]
        rows = [
            Row(
                rival.contender,
                rival.record.value,
                group_of(rival),
                self.ratio(rival),
                rival is chosen,
            )
            for rival in rivals
        ]
        for peak in CHIPS.values():
            if (seconds := chosen.modelled_seconds(peak)) is not None:
                rows.append(Row(peak.name, seconds, "modelled"))
        return rows

    def answer(self) -> str:
        """Ours against the fastest other, as the heading has it."""
        ratios = [row.ratio for row in self.rows() if row.group == "others" and row.ratio]
        if not ratios:
            return "Who takes how long"
        best = min(ratios)
        if best >= 1:
            return f"The fastest other takes {in_words(best, 'times')} our time"
        return f"We take {in_words(1 / best, 'times')} the time of the fastest other"

    def data(self) -> Data:
        def cell(value: int | None) -> str:
            return "–" if value is None else f"{value:,}"

        records = [time.record for time in self.times]
        return {
            "method": [title_of(time.method) for time in self.times],
            "what": [time.case for time in self.times],
            "batch": [cell(time.batch) for time in self.times],
            "tokens": [cell(time.tokens) for time in self.times],
            "contender": [time.contender for time in self.times],
            "time (seconds)": [record.value for record in records],
            "times ours (times)": [self.ratio(time) for time in self.times],
            f"on one {self.chip.name}, modelled (seconds)": [*map(self.modelled, self.times)],
            "kind": [time.kind for time in self.times],
            "check": [record.check for record in records],
            "device": [record.device for record in records],
            "versions": [_versions(time) for time in self.times],
            "date": [record.date[:10] for record in records],
            "command": [record.command for record in records],
            "commit": [record.commit for record in records],
        }

    def sentence(self) -> str:
        if (time := self.time) is None:
            return "No recorded time passes these filters."
        caption = f"Time {self.chosen + 1} of {len(self.times)}: {time.case}, {time.contender}: "
        caption += f"{in_words(time.record.value, 'seconds')}, {time.kind}."
        rivals = [(row.name, row.ratio) for row in self.rows() if row.ratio is not None]
        if rivals:
            others = ", ".join(f"“{name}” {in_words(ratio, 'times')}" for name, ratio in rivals[1:])
            caption += f" Of the time of “{rivals[0][0]}”, with results that agree: {others}."
        if (floor := self.modelled(time)) is not None:
            caption += (
                f" One {self.chip.name} needs at least {in_words(floor, 'seconds')} (modelled: "
                "bfloat16, published peaks); the time above is "
                f"{in_words(time.record.value / floor, 'times')} that."
            )
        return caption

    def footnote(self) -> str:
        if (time := self.time) is None:
            return "Nothing to show: let more through."
        record = time.record
        return (
            f"Ringed: {time.kind} on {record.device}; {_versions(time)}; {record.date[:10]}; "
            f"check {record.check}.\n{record.command}, commit {record.commit[:8]}. "
            "Filled: recorded (square: here). Diamonds: modelled, bfloat16."
        )


def group_of(time: Time) -> str:
    """Whose time it is."""
    return "measured here" if time.is_here else "this package" if time.is_ours else "others"


def _versions(time: Time) -> str:
    wanted = ("jax", "python")
    return ", ".join(f"{name} {time.record.versions.get(name, '?')}" for name in wanted)


def speedups(
    times: tuple[Time, ...],
    *,
    method: str,
    work: str,
    tokens: int,
    batch: int,
    chip: str,
    point: int,
) -> SpeedupView:
    """Those of `times` that pass, `point` of them chosen; `EVERY` and 0 let everything through."""
    shown = tuple(
        time
        for time in times
        if method in (EVERY, time.method)
        and work in (EVERY, time.work)
        and tokens in (0, time.tokens)
        and batch in (0, time.batch)
    )
    return SpeedupView(shown, times, min(point, max(1, len(shown))) - 1, CHIPS[chip])
