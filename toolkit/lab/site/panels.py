"""Which panels the site replays, over which settings, and below which cells of the notebooks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from toolkit.lab.kit.panel import Panel
from toolkit.lab.site.replay import Values


@dataclass(frozen=True)
class Replayed:
    """A panel of the site.

    Attributes:
        cell: where it stands: a page, and how a line of one of its cells begins.
        make: makes the panel as it starts.
        grid: control -> what it can be set to; the others stay.
    """

    cell: tuple[str, str]
    make: Callable[[], Panel]
    grid: Mapping[str, Values]


def _mixer_costs() -> Panel:
    from toolkit.lab.mixers.cost_panel import MixerCostPanel

    return MixerCostPanel()


REPLAYED: dict[str, Replayed] = {
    "mixer-costs": Replayed(
        ("notebooks/mixers", "costs = MixerCostPanel("),
        _mixer_costs,
        {
            "context_length": None,
            "left": ("linear", "retention", "mamba2"),
            "right": ("gdn", "kda"),
            "heads": (4, 16, 64),
        },
    ),
}
