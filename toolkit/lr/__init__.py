"""Learning-rate schedules and their search, for any optax loop.

Schedules that optax lacks (step -> rate)
* `warmup_stable_decay_schedule`: rise, plateau, cooldown along a line or 1 - sqrt (WSD)
* `cooldown_schedule`: the cooldown alone
* `power_schedule`: a power of the tokens seen
* `refined_schedule`: from the gradient norms of a past run
* `tabulated_schedule`: one rate per step, from a table
* `shape_rates`: constant, linear, cosine or WSD, as a table with peak 1

Baselines of a search
* `contender`: a tuned schedule or a tuning-free optimiser by its name; returns a `Contender`
* `CONTENDERS`: the names, with sources and settings

Search
* `search`: in one call; returns a `SearchResult` with schedule, ledger and table
* `ProbeThenDecay`: annealed probes, then one run that decays to zero; the default
* `AutoLRS`: as published; the paper's constants, the code's, and some scaled to a short run
* `LR_RANGE`: the default range of rates
* `MODES`: the ways to run candidates
* `SearchProgress`: an unfinished search with its `TrainState`, for a checkpoint or file

The same for custom training loops
* `init`, `ask`, `tell`: pure functions on a `Controller`, which holds the search's state
* `Searcher`: the protocol of a search method
* `Request`: the steps to make next
* `Ledger`: gradient evaluations, forward ones, depth

From a small model to a large one
* `transfer`: factors of rates, decays, logits by width, depth, batch, tokens; returns a `Transfer`
* `transferred_weights`: the initial weights that go with them
* `coordinate_check`: do activations move as far at every width; returns a `CoordinateCheck`
* `ModelOfWidth`: what it asks for at each width

Its parts
* `forecast_loss`: a robust exponential fitted to a loss curve, with its variance
* `published_forecast`: AutoLRS's own
* `Forecast`: mean, variance, time constant, reason
* `fit_gaussian_process`, `GaussianProcess`: Matern-5/2, with a noise variance per point
* `lowest_confidence_bound`: the next point to evaluate

Ground truth
* `NoisyQuadratic`: a problem with exact final losses and known best schedules
* `last_iterate_bound`: the bound of convex theory on a schedule
"""

from toolkit.lr.autolrs import AutoLRS
from toolkit.lr.contenders import CONTENDERS, Contender, contender
from toolkit.lr.coordinate_check import CoordinateCheck, ModelOfWidth, coordinate_check
from toolkit.lr.fits.forecast import Forecast, forecast_loss, published_forecast
from toolkit.lr.fits.gaussian_process import (
    GaussianProcess,
    fit_gaussian_process,
    lowest_confidence_bound,
)
from toolkit.lr.probe_then_decay import ProbeThenDecay
from toolkit.lr.problems.convex_bound import last_iterate_bound
from toolkit.lr.problems.noisy_quadratic import NoisyQuadratic
from toolkit.lr.protocol import Controller, Ledger, Request, Searcher, ask, init, tell
from toolkit.lr.running.candidates import MODES
from toolkit.lr.schedules import (
    cooldown_schedule,
    power_schedule,
    refined_schedule,
    tabulated_schedule,
    warmup_stable_decay_schedule,
)
from toolkit.lr.search import LR_RANGE, SearchProgress, SearchResult, search
from toolkit.lr.shapes import shape_rates
from toolkit.lr.transfer import Transfer, transfer, transferred_weights
from toolkit.parallel.updates import TrainState

__all__ = [
    "CONTENDERS", "LR_RANGE", "MODES", "AutoLRS", "Contender", "Controller", "CoordinateCheck",
    "Forecast", "GaussianProcess", "Ledger", "ModelOfWidth", "NoisyQuadratic", "ProbeThenDecay",
    "Request", "SearchProgress", "SearchResult", "Searcher", "TrainState", "Transfer", "ask",
    "contender", "cooldown_schedule", "coordinate_check", "fit_gaussian_process", "forecast_loss",
    "init", "last_iterate_bound", "lowest_confidence_bound", "power_schedule", "published_forecast",
    "refined_schedule", "search", "shape_rates", "tabulated_schedule", "tell", "transfer",
    "transferred_weights", "warmup_stable_decay_schedule",
]  # fmt: skip
