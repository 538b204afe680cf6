"""The share of requests that keep their bounds, by load: the knee of each policy.

The requests and the engines are those of both instruments of serving: Llama 3 8B on two H100,
modelled.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from toolkit import serving
from toolkit.figures import ACCENT, INK, look
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, Progress, View
from toolkit.looped import cache_bytes_per_token
from toolkit.planning import cluster
from toolkit.planning.models import model_of

MODEL, CHIP, CHIPS = "llama-3-8b", "h100:1", 2
PAGE = 16  # tokens
BATCH = 2048  # tokens of prompts that are read together where they are read alone
POLICIES = {
    "static": "batch waits for its longest",
    "first": "prompts first",
    "chunks": "prompts in chunks",
    "pools": "two pools",
}
ORDERS = {
    "arrival": lambda job: (job.arrival, job.number),
    "shortest": lambda job: (job.output, job.number),
}


@functools.cache
def requests_at_one_per_second(count: int) -> tuple[serving.TracedRequest, ...]:
    """Poisson arrivals; prompts and texts of lognormal lengths, about 350 and 40 tokens."""
    draw = np.random.default_rng(0)
    arrivals = np.cumsum(draw.exponential(1, count))
    prompts = np.clip(draw.lognormal(np.log(300), 0.6, count), 8, 1000).astype(int)
    outputs = np.clip(draw.lognormal(np.log(30), 0.8, count), 2, 128).astype(int)
    rows = zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return tuple(serving.TracedRequest(*row) for row in rows)


@functools.cache
def _cost():
    return serving.planned_cost(model_of(MODEL), CHIP)


@functools.lru_cache(512)
def served(
    policy: str, rate: float, count: int, *, order: str = "arrival", budget: int = 256,
    slots: int = 16, pages: int = 1024, evicts: bool = False,
) -> serving.Run[serving.Served]:  # fmt: skip
    """A run of the first requests at a rate, on two chips; slots and pages are a chip's."""
    key = ORDERS[order]
    how = {"room": pages * PAGE, "reserves": "written" if evicts else "all"}

    def instance(scheduler: serving.Scheduler, role: str = "both") -> serving.Instance:
        seats = None if role == "prefill" else slots
        return serving.Instance(scheduler, _cost(), seats, role=role, **how)  # type: ignore[arg-type]

    if policy == "pools":
        instances = [
            instance(serving.PrefillFirst(BATCH, order=key), "prefill"),
            instance(serving.WriteOnly(order=key), "decode"),
        ]
    else:
        make = {"static": (serving.Static, BATCH), "first": (serving.PrefillFirst, BATCH),
                "chunks": (serving.Scheduler, budget)}[policy]  # fmt: skip
        instances = [instance(make[0](make[1], order=key)) for _ in range(CHIPS)]
    trace = [entry._replace(arrival=entry.arrival / rate)
             for entry in requests_at_one_per_second(count)]  # fmt: skip
    link = cluster("h100:2").link(1, CHIPS)
    sent = cache_bytes_per_token(model_of(MODEL)) / link.bytes_per_second
    return serving.simulate(trace, instances, seconds_per_token_sent=sent)


LOADS = (2.0, 15.0, 30.0, 45.0, 60.0, 80.0, 100.0, 120.0)  # requests per second
SHARE = 0.9  # of the requests, by which DistServe defines goodput
QUICK = 60  # requests that are run at once; more of them by the button
LOOKS = dict(zip(POLICIES, ("hgrn2", "gdn", "full", "window"), strict=True))
GAPS = {"per_token": "mean gap", "largest_gap": "largest gap"}


def knee(shares: list[float]) -> float:
    """The load up to which `SHARE` of the requests keep the bounds, between points on a line."""
    below = next((place for place, share in enumerate(shares) if share < SHARE), None)
    if below is None:
        return LOADS[-1]
    if below == 0:
        return 0.0
    pair = slice(below - 1, below + 1)
    return float(np.interp(-SHARE, [-share for share in shares[pair]], LOADS[pair]))


@dataclass(frozen=True)
class GoodputView(View):
    """Attainment of every policy at every load."""

    first: float  # milliseconds to the first token that are allowed
    # gap, bound: which gap is bounded, and its milliseconds
    gap: str
    bound: float
    count: int  # requests of the trace
    # Policy -> share of the requests that keep both bounds, by load; of those that have been
    # run
    shares: dict[str, list[float]]
    half: dict[str, float]  # policy -> the knee that the first half of the requests shows

    @property
    def knees(self) -> dict[str, float]:
        """Policy -> goodput."""
        return {policy: knee(shares) for policy, shares in self.shares.items()}

    def data(self) -> Data:
        none = [float("nan")] * len(LOADS)
        named = {f"{words} (share)": self.shares.get(policy, none)
                 for policy, words in POLICIES.items()}  # fmt: skip
        return {"load (requests per second)": list(LOADS)} | named

    def sentence(self) -> str:
        if len(self.knees) < len(POLICIES):
            return f"{self.count} requests are to be run at every load: press the button below."
        best = max(self.knees, key=self.knees.__getitem__)
        knees = ", ".join(f"{POLICIES[name]} {rate:.0f}" for name, rate in self.knees.items())
        return (
            f"First token within {self.first:g} ms and {GAPS[self.gap]} within {self.bound:g} ms "
            f"for nine of ten requests, on {CHIPS} H100: requests per second at the knee: {knees}. "
            f"Half of the {self.count} requests would say {self.half[best]:.0f} instead of "
            f"{self.knees[best]:.0f} for {POLICIES[best]}: an overloaded queue needs time to fail."
        )

    def footnote(self) -> str:
        return (
            f"Modelled: Llama 3 8B in bfloat16, half of the published rates; {self.count} requests "
            "with the same arrivals, scaled. Between the points read off a line."
        )


def goodput_view(
    runs: Mapping[str, list[serving.Run]], *, first: float, gap: str, bound: float, count: int
) -> GoodputView:
    """Policies whose runs at all loads are given."""
    bounds = {"first_token": first / 1e3, gap: bound / 1e3}

    def shares(policy: str, part: int) -> list[float]:
        return [
            serving.attainment(run._replace(requests=run.requests[:part]), **bounds)
            for run in runs[policy]
        ]

    half = {policy: knee(shares(policy, count // 2)) for policy in runs}
    return GoodputView(first, gap, bound, count, {p: shares(p, count) for p in runs}, half)


class SharesPlot(Plot):
    """Shares of the requests that keep the bounds; diamonds are knees."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Requests within both bounds (modelled)")
        axes.set(xlim=(0, LOADS[-1]), ylim=(0, 1.03), xlabel="requests per second")
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.axhline(SHARE, color=INK, linewidth=1, linestyle=":")
        self.lines, self.knees = {}, {}
        for name, words in POLICIES.items():
            own = look(LOOKS[name])
            self.lines[name] = self.line(**own.line, marker=own.marker, label=words)
            self.knees[name] = self.marks(ACCENT, "D", markersize=8)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), labelspacing=0.9)

    def show(self, view: GoodputView) -> None:
        for name in POLICIES:
            rate, shares = view.knees.get(name, 0.0), view.shares.get(name, [])
            self.lines[name].set_data(LOADS[: len(shares)], shares)
            is_inside = 0 < rate < LOADS[-1]
            self.knees[name].set_data([rate] * is_inside, [SHARE] * is_inside)


class KneesPlot(Plot):
    """The knees in numbers, and what half of the requests would say."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="At the knee (half of the trace)", grid="")
        axes.set(xticks=[], xlim=(0, 1), ylim=(len(POLICIES) - 0.5, -0.5), yticks=[])
        axes.spines[:].set_visible(False)
        self.words = [self.text(0, row, va="center", fontsize=10) for row in range(len(POLICIES))]

    def show(self, view: GoodputView) -> None:
        for words, name in zip(self.words, POLICIES, strict=True):
            pair = [each[name] for each in (view.knees, view.half) if name in each]
            shown = [f"≥ {rate:.0f}" if rate == LOADS[-1] else f"{rate:.0f}" for rate in pair]
            words.set_text(f"{' ('.join(shown)})   {POLICIES[name]}" if pair else "not run yet")


class GoodputPanel(Panel):
    """How many requests per second keep their bounds, by policy.

    Example:
        >>> panel = GoodputPanel(count=60)
        >>> panel.view.knees["chunks"] > panel.view.knees["static"]
        True
    """

    title = "Goodput: at which load does service break?"
    figure_size = (9.6, 3.9)
    has_palette = True
    button = "Run the requests"

    first = Number("First token", 200, low=20, high=2000, step=10, explanation="Milliseconds")
    gap = Choice("Bounded", "largest_gap", {words: name for name, words in GAPS.items()})
    bound = Number("Gap", 50, low=10, high=500, step=5, explanation="Milliseconds")
    count = Number(
        "Requests", QUICK, low=60, high=960, step=60, is_continuous=False,
        explanation=f"Of the trace; a short one ends before the queue has grown. Above {QUICK} "
        "the button runs them",
    )  # fmt: skip
    budget = Number(
        "Chunk", 256, low=16, high=2048, powers_of_two=True, is_continuous=False,
        explanation="Tokens of a turn, prompts and texts, where prompts are read in chunks",
    )  # fmt: skip
    slots = Number(
        "Slots", 16, low=4, high=64, powers_of_two=True, is_continuous=False,
        explanation="Of a chip",
    )  # fmt: skip

    def __init__(self, **values: Any) -> None:
        self._runs: dict[tuple[Any, ...], serving.Run] = {}
        super().__init__(**values)

    def compute(self, *, budget: int, slots: int, **state: Any) -> GoodputView:
        wanted = state["count"], budget, slots
        if state["count"] <= QUICK:
            for _ in self._missing(*wanted):
                pass
        runs = {p: [self._runs.get((*wanted, p, load)) for load in LOADS] for p in POLICIES}
        whole = {policy: [run for run in each if run] for policy, each in runs.items()}
        return goodput_view({p: x for p, x in whole.items() if len(x) == len(LOADS)}, **state)

    def _missing(self, count: int, budget: int, slots: int) -> Iterator[Progress]:
        every = [(policy, load) for policy in POLICIES for load in LOADS]
        for done, (policy, load) in enumerate(every):
            key = count, budget, slots, policy, load
            if key not in self._runs:
                yield done, len(every), f"{POLICIES[policy]}, {load:g} requests per second"
                self._runs[key] = served(policy, load, count, budget=budget, slots=slots)

    def pieces(self) -> Iterator[Progress]:
        """All policies at all loads, one after the other."""
        yield from self._missing(*(self.state[name] for name in ("count", "budget", "slots")))

    places = (
        (SharesPlot, (0.07, 0.2, 0.58, 0.68)),
        (KneesPlot, (0.685, 0.2, 0.3, 0.3)),
    )
