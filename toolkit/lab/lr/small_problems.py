"""Problems for a search: noisy quadratics, whose losses are exact, and a small network.

A problem trains from any state at any rates and returns the losses. States are immutable pytrees.
Of the noisy quadratics the best possible schedules, and tuned common shapes, take minutes to find
and are therefore stored:

    python -m toolkit.lab.lr.small_problems        # writes data/schedules/noisy-quadratic.json
"""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from toolkit._checks import check_choice
from toolkit.lr.problems.noisy_quadratic import NoisyQuadratic
from toolkit.lr.protocol import Request
from toolkit.lr.running.candidates import CandidateRunner
from toolkit.lr.shapes import shape_rates
from toolkit.measure import Record, read_records, record, write_records
from toolkit.measure.stored import stored_folder
from toolkit.parallel.updates import TrainState

PROBLEMS = {  # menu entry -> name of a problem
    "noisy quadratic, batch 10": "quadratic 10",
    "noisy quadratic, batch 100": "quadratic 100",
    "noisy quadratic, one dimension": "quadratic 1d",
    "small network, measured here": "network",
}
BUDGETS = (500, 1000, 2000, 4000)  # gradient evaluations with stored best schedules
STABLE = 1.99  # largest rate times the largest curvature; at 2 the moments begin to grow

FEATURES, CLASSES, WIDTH, TEACHER_WIDTH = 16, 8, 64, 32
TRAIN_ROWS, HELD_OUT_ROWS, BATCH = 8192, 2048, 32
WRONG_LABELS = 0.1


@dataclass(frozen=True)
class QuadraticProblem:
    """Gradient descent on a noisy quadratic, in expectation; a state is the second moment."""

    quadratic: NoisyQuadratic
    is_exact: ClassVar = True  # losses are expectations in closed form, not measurements
    provenance: ClassVar = "closed form"

    @property
    def lr_range(self) -> tuple[float, float]:
        """Two decades, up to where the steepest direction stays stable."""
        largest = STABLE / float(self.quadratic.curvatures.max())
        return largest / 100, largest

    def start(self) -> np.ndarray:
        """The state before the first step."""
        return self.quadratic.start

    def run(self, state: Any, request: Request) -> tuple[np.ndarray, np.ndarray]:
        """The state after the last candidate's steps, and the losses, [candidates, steps]."""
        with np.errstate(over="ignore", invalid="ignore"):
            runs = [self.quadratic.advance(state, rates) for rates in request.rates]
        return runs[-1][0], np.array([losses for _, losses in runs])

    def loss(self, state: Any) -> float:
        """The final loss, for comparison."""
        return self.quadratic.loss(state)


class NetworkProblem:
    """A network with one hidden layer learns a random one's outputs; Adam, 32 rows per step.

    The final loss is on unseen rows. A tenth of the labels is wrong, so that noise remains and the
    end of the schedule matters.
    """

    lr_range = (1e-4, 1e-1)
    is_exact = False
    provenance = "measured here"

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        rows = random.normal(size=(TRAIN_ROWS + HELD_OUT_ROWS, FEATURES))
        hidden = np.tanh(rows @ random.normal(size=(FEATURES, TEACHER_WIDTH)))
        labels = np.argmax(hidden @ random.normal(size=(TEACHER_WIDTH, CLASSES)), axis=1)
        is_wrong = random.random(len(rows)) < WRONG_LABELS
        labels = np.where(is_wrong, random.integers(0, CLASSES, len(rows)), labels)
        rows, labels = rows.astype(np.float32), labels.astype(np.int32)
        train = rows[:TRAIN_ROWS], labels[:TRAIN_ROWS]
        # A pass shuffles nothing: every step's batch is the same for all candidates and racers.
        batches = tuple(part.reshape(-1, BATCH, *part.shape[1:]) for part in train)
        self._held_out = rows[TRAIN_ROWS:], labels[TRAIN_ROWS:]
        scale = [FEATURES**-0.5, WIDTH**-0.5]
        self._params = {
            "in": jnp.asarray(random.normal(size=(FEATURES, WIDTH)) * scale[0], jnp.float32),
            "bias": jnp.zeros(WIDTH),
            "out": jnp.asarray(random.normal(size=(WIDTH, CLASSES)) * scale[1], jnp.float32),
        }
        self._optimizer = optax.adam(1.0)
        self._runner = CandidateRunner(cross_entropy, self._optimizer, batches)
        self._evaluate = jax.jit(cross_entropy)

    def start(self) -> TrainState:
        return TrainState.create(self._params, self._optimizer)

    def run(self, state: Any, request: Request) -> tuple[TrainState, np.ndarray]:
        reached, curves = state, []
        for rates in request.rates:
            reached, losses = self._runner.run(state, Request(request.kind, rates[None]))
            curves.append(losses[0])
        return reached, np.array(curves, np.float64)

    def loss(self, state: Any) -> float:
        return float(self._evaluate(state.params, self._held_out))


def cross_entropy(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Mean nats of the labels under a network of one hidden layer."""
    rows, labels = batch
    logits = jnp.tanh(rows @ params["in"] + params["bias"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


Problem = QuadraticProblem | NetworkProblem


@functools.cache
def problem(name: str) -> Problem:
    """The problem of this name, a value of `PROBLEMS`; cached."""
    check_choice("problem", name, PROBLEMS.values())
    if name == "network":
        return NetworkProblem()
    if name == "quadratic 1d":
        curvature, noise, start = np.array([[0.7], [0.3], [2.0]])
        return QuadraticProblem(NoisyQuadratic(curvature, noise, start))
    return QuadraticProblem(NoisyQuadratic.harmonic(int(name.split()[1])))


class Run(NamedTuple):
    """Training from the start on; arrays have an entry for each step that was kept."""

    spent: np.ndarray  # evaluations before it, those of candidates included
    rates: np.ndarray
    losses: np.ndarray  # before it
    loss: float  # at the end, as `Problem.loss` says it
    searched: int = 0  # evaluations of candidates


def follow(task: Problem, rates: np.ndarray) -> Run:
    """The run along any schedule, rates [steps]."""
    state, losses = task.run(task.start(), Request("train", np.asarray(rates)[None]))
    return Run(np.arange(len(rates)), rates, losses[0], task.loss(state))


SHAPES = ("linear", "cosine", "wsd")
STORED = ("quadratic 10", "quadratic 100")
# Equal stretches of constant rate: at 1,000 steps 0.006 % above the best with a rate per step.
PIECES = 250
FILE = "noisy-quadratic.json"
PEAKS_PER_DECADE = 4


@functools.cache
def best_known(name: str, steps: int) -> Run | None:
    """The schedule of lowest final loss in `BUDGETS` steps; None if unknown."""
    task = problem(name)
    if isinstance(task, NetworkProblem):
        return None
    if name in STORED:
        return follow(task, np.repeat(_stored(name, steps, "best").samples, steps // PIECES))
    return follow(task, task.quadratic.greedy_rates(steps))  # in one dimension greed is best


@functools.cache
def tuned(name: str, shape: str, steps: int) -> Run:
    """A common shape, one of `SHAPES`, with its best peak; tuning is not charged."""
    if name in STORED:
        return run_peak(name, shape, steps, _stored(name, steps, shape).samples[0])
    if name != "network":
        return run_peak(name, shape, steps, _best_peak(name, shape, steps))
    runs = [run_peak(name, shape, steps, peak) for peak in peaks(name)]
    return runs[np.nanargmin([run.loss for run in runs])]


def peaks(name: str) -> np.ndarray:
    """The peaks among which a shape is tuned on the network, four per decade."""
    low, high = problem(name).lr_range
    return np.geomspace(low, high, round(PEAKS_PER_DECADE * np.log10(high / low)) + 1)


@functools.cache
def run_peak(name: str, shape: str, steps: int, peak: float) -> Run:
    """A run along a shape with this highest rate, remembered."""
    return follow(problem(name), peak * shape_rates(shape, steps))


def find_schedules(name: str, steps: int) -> list[Record]:
    """Find the stored schedules of one quadratic and length; a minute at 1000 steps.

    A record of the final loss for "best", whose samples are the rates of `PIECES` pieces, and for
    each of `SHAPES`, whose only sample is the peak.
    """
    task = problem(name)
    assert not isinstance(task, NetworkProblem)
    best = task.quadratic.best_rates(steps, STABLE, pieces=PIECES)[:: steps // PIECES]
    found = {"best": best} | {shape: [_best_peak(name, shape, steps)] for shape in SHAPES}
    # Five digits: what they leave out changes the loss in the ninth.
    found = {which: [float(f"{rate:.5g}") for rate in rates] for which, rates in found.items()}
    runs = {shape: run_peak(name, shape, steps, found[shape][0]) for shape in SHAPES}
    runs["best"] = follow(task, np.repeat(found["best"], steps // PIECES))
    return [
        record(_key(name, steps, which), runs[which].loss, "1", kind="modelled", samples=rates)
        for which, rates in found.items()
    ]


def main() -> None:
    """Writes the file anew."""
    records = []
    for name in STORED:
        for steps in BUDGETS:
            records += (found := find_schedules(name, steps))
            print(_key(name, steps, ""), *(f"{record.value:.5f}" for record in found))
    write_records(stored_folder("schedules") / FILE, records)


def _best_peak(name: str, shape: str, steps: int) -> float:
    from scipy.optimize import minimize_scalar

    def loss(log_peak: float) -> float:
        return float(np.log(run_peak(name, shape, steps, float(np.exp(log_peak))).loss))

    bounds = tuple(np.log(problem(name).lr_range))
    found: Any = minimize_scalar(loss, bounds=bounds, method="bounded")
    return float(np.exp(found.x))


def _key(name: str, steps: int, which: str) -> str:
    return f"{name} | {steps} steps | {which}"


@functools.cache
def _records() -> dict[str, Record]:
    return {record.name: record for record in read_records(stored_folder("schedules") / FILE)}


def _stored(name: str, steps: int, which: str) -> Record:
    check_choice("steps", steps, BUDGETS)
    return _records()[_key(name, steps, which)]


if __name__ == "__main__":
    main()
