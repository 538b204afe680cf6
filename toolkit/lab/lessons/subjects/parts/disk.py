"""A disk whose power may fail at any operation, and the exercise of lesson 09 that saves on it."""

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from toolkit.figures import ACCENT, LOOKS
from toolkit.lab.lessons.outline import Draw, Show, WrongAnswer


class PowerCut(Exception):
    """The simulated machine dies here."""


class Disk:
    """Files that a power cut tears: what was not synced may be lost, a write may stop half-way."""

    def __init__(self, cut_after: int) -> None:
        self.files: dict[str, str] = {"state": "OLD-STATE"}
        self._unsynced: set[str] = set()
        self._left = cut_after

    def write(self, name: str, data: str) -> None:
        """Write a file, replacing one of that name; a cut leaves half of it."""
        self._unsynced.add(name)
        self.files[name] = data[: len(data) // 2]
        self._tick()
        self.files[name] = data
        self._tick()

    def sync(self, name: str) -> None:
        """Wait until a file is on the disk for good."""
        if name not in self.files:
            raise FileNotFoundError(name)
        self._unsynced.discard(name)
        self._tick()

    def rename(self, old: str, new: str) -> None:
        """Give a file another name in one moment, replacing a file that has it."""
        if old not in self.files:
            raise FileNotFoundError(old)
        self.files[new] = self.files.pop(old)
        self._unsynced.discard(new)
        if old in self._unsynced:
            self._unsynced = self._unsynced - {old} | {new}
        self._tick()

    def remove(self, name: str) -> None:
        """Remove a file."""
        if name not in self.files:
            raise FileNotFoundError(name)
        del self.files[name]
        self._unsynced.discard(name)
        self._tick()

    def found_after(self) -> str:
        """What a restart reads from "state"; an empty text where it is gone or torn."""
        if "state" in self._unsynced:
            return self.files["state"][:4]
        return self.files.get("state", "")

    def _tick(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise PowerCut


def judge_save(save: Callable[..., Any], show: Show) -> str:
    """Judge a way to save: cut the power after each of its writes, and look at what is left."""
    found: list[str] = []
    for cut_after in range(40):
        disk = Disk(cut_after)
        is_cut = False
        try:
            save(disk, "NEW-STATE")
        except PowerCut:
            is_cut = True
        except Exception as error:
            raise WrongAnswer(f"save raised {type(error).__name__}: {error}") from error
        found.append(disk.found_after())
        if not is_cut:
            break
    else:
        raise WrongAnswer("save does more than 40 things; four are enough.")
    if len(found) == 1:
        raise WrongAnswer("Not written yet: save did nothing with the disk.")
    show(_draw_cuts(found))
    for cut_after, text in enumerate(found[:-1]):
        if text not in ("OLD-STATE", "NEW-STATE"):
            left = f"holds {text!r}" if text else "is gone"
            raise WrongAnswer(
                f"Power cut after {cut_after} moments: “state” {left}. There is no state to go on "
                "from."
            )
    if found[-1] != "NEW-STATE":
        words = f"holds {found[-1]!r}" if found[-1] else "is gone"
        raise WrongAnswer(f"After a save that ended, “state” {words}.")
    return "Right: at every moment there is the old state or the new one."


def _draw_cuts(found: Sequence[str]) -> Draw:
    def draw(figure: Figure) -> None:
        axes = figure.add_axes((0.04, 0.4, 0.92, 0.3))
        whole = {"OLD-STATE": ("old", "full"), "NEW-STATE": ("new", "window")}
        for place, text in enumerate(found):
            name, look = whole.get(text, ("torn" if text else "gone", ""))
            colour = LOOKS[look].colour if look else ACCENT
            axes.barh(0, 0.94, 0.9, left=place, color=colour, hatch="" if look else "//")
            axes.text(
                place + 0.47, 0, name, ha="center", va="center", color="white", fontweight="bold"
            )
        axes.set(yticks=[], xticks=[], xlabel="moments of a power cut; last: the save has ended")
        axes.set_title("what a restart finds")
        axes.grid(False)

    return draw
