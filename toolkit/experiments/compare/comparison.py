"""A comparison as two experiments: learning rates by the same budget, then all seeds.

Every contender is trained once per rate of the same grid around its own configured rate, for its
whole number of steps, on the training part of the text; the rate with the least loss on the end of
that part is taken. Then it is trained with each seed at that rate, and judged on held-out text that
no rate was chosen by. Seeds pair the contenders: the same seed draws the same batches.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from toolkit.experiments.compare.matching import run_flops
from toolkit.experiments.kit.experiment import Column, Experiment, Stopped, Workspace
from toolkit.experiments.kit.results import Outcome, Results
from toolkit.experiments.kit.verdicts import Claim, below
from toolkit.language import TrainingRun, train_language_model
from toolkit.language.load import parts_of
from toolkit.language.losses import loss_of_parts
from toolkit.language.run import bits_per_byte
from toolkit.language.start import text_corpus
from toolkit.language.tokens import bytes_per_token
from toolkit.looped import LoopedConfig, LoopedLM, flops_per_token, parameter_count
from toolkit.training import Corpus, DivergedError, evaluation_batches, make_evaluation

LOSS, CURVE = "held-out loss", "held-out loss by step"
FIRST_TUNING_SEED = 1000  # so that no rate is chosen on the seeds that are judged
MOST_EVALUATED = 64  # batches of held-out text


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run of a comparison, without its seed.

    Attributes:
        run: what is trained.
    """

    run: TrainingRun


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Contenders, what is equal between them, and the rule that judges them.

    Attributes:
        contenders: label -> its run, matched; the first is the one that others are compared to.
        match: a key of `MATCHES`.
        unit: "bits per byte", or "nats per token" where the bytes of a token are unknown.
        smallest: the smallest difference of the loss that matters, in that unit.
        rates: learning rates tried per contender.
        factor: between neighbouring rates.
        seeds: per contender.
        text: name, size and sha256 of the text.

    Example:
        >>> from toolkit.language import TrainingRun
        >>> from toolkit.looped import LoopedConfig
        >>> runs = {word: TrainingRun(LoopedConfig.tiny(word)) for word in ("full", "gdn")}
        >>> Comparison(runs, "tokens", "bits per byte", rates=3).grid("full")
        (0.0015, 0.003, 0.006)
    """

    contenders: Mapping[str, TrainingRun]
    match: str
    unit: str
    smallest: float = 0.01
    rates: int = 5
    factor: float = 2.0
    seeds: int = 5
    text: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def grid(self, label: str) -> tuple[float, ...]:
        """The learning rates that a contender tries, around the one it is configured with."""
        middle: Any = self.contenders[label].learning_rate
        steps = range(-((self.rates - 1) // 2), self.rates // 2 + 1)
        return tuple(float(f"{middle * self.factor**step:.4g}") for step in steps)

    def tuning(self, text: "Text | None" = None) -> Experiment:
        """The experiment that tries every rate."""
        settings = {
            f"{label}, rate {rate:g}": Trained(dataclasses.replace(run, learning_rate=rate))
            for label, run in self.contenders.items()
            for rate in self.grid(label)
        }
        return self._experiment("compare-rates", settings, (), text, is_tuning=True)

    def best_rates(self, tried: Results) -> dict[str, float]:
        """The rate of each contender with the least loss."""
        return {
            label: min(
                self.grid(label), key=lambda rate: tried.mean(f"{label}, rate {rate:g}", LOSS)
            )
            for label in self.contenders
        }

    def final(self, rates: Mapping[str, float], text: "Text | None" = None) -> Experiment:
        """The experiment that is judged, at the rates that were found."""
        settings = {
            label: Trained(dataclasses.replace(run, learning_rate=rates[label]))
            for label, run in self.contenders.items()
        }
        first, *others = self.contenders
        claims = tuple(
            Claim(
                f"{label} has a lower held-out loss than {first}",
                below(LOSS, [label], [first], 4),
                smallest=self.smallest,
                control=partial(_learns, first),
            )
            for label in others
        )
        return self._experiment("compare", settings, claims, text)

    def _experiment(self, name, settings, claims, text, *, is_tuning=False) -> Experiment:
        return Experiment(
            name=name,
            title=f"{' or '.join(self.contenders)}, at equal {self.match}",
            settings=settings,
            execute=_not_to_be_run if text is None else partial(execute, text, is_tuning),
            columns=(Column(LOSS, self.unit, 4), Column("seconds", "s", 0)),
            claims=claims,
            draw=_not_to_be_run,
            beyond="",
            minutes=0,
            work=lambda setting: run_flops(setting.run),
        )


@dataclasses.dataclass(frozen=True)
class Text:
    """What contenders are trained on.

    Attributes:
        corpus: the whole text, as bytes or tokens.
        tokenizer: of its tokens, or None.
    """

    corpus: Corpus
    tokenizer: Any = None

    def training_part(self) -> "Text":
        """The text without its held-out end."""
        train, _ = self.corpus.split()
        name = f"{self.corpus.name} without its end"
        part = dataclasses.replace(self.corpus, name=name, tokens=train, size=len(train))
        return Text(part, self.tokenizer)

    def held_out(self, run: TrainingRun) -> np.ndarray:
        """The tokens that a run is judged by."""
        if run.validation is not None:
            return text_corpus((run.validation,)).tokens
        return self.corpus.split()[1]

    @property
    def unit(self) -> str:
        """Of losses."""
        is_known = self.corpus.tokens.dtype == np.uint8 or self.tokenizer is not None
        return "bits per byte" if is_known else "nats per token"

    def in_unit(self, loss: float, targets: np.ndarray) -> float:
        """A loss in nats per token of these targets, in the unit."""
        if self.unit != "bits per byte":
            return loss
        is_text = self.corpus.tokens.dtype == np.uint8
        return bits_per_byte(loss, 1.0 if is_text else bytes_per_token(self.tokenizer, targets))


def execute(
    text: Text, is_tuning: bool, setting: Trained, seed: int, workspace: Workspace
) -> Outcome:
    """Train one contender with one seed, and evaluate it on text that it has not seen."""
    run = dataclasses.replace(setting.run, seed=seed)
    if is_tuning:
        text = text if run.validation else text.training_part()
        run = dataclasses.replace(run, seed=FIRST_TUNING_SEED + seed, validation=None)
    try:
        trained = train_language_model(
            run,
            workspace.directory / "training",
            corpus=text.corpus,
            tokenizer=text.tokenizer,
            callback=lambda row: workspace.progress(row["step"] / run.steps),
            is_progress_shown=False,
        )
    except DivergedError:
        return {LOSS: math.inf}
    if trained.stopped_by is not None:
        raise Stopped
    loss, scale = _held_out_loss(trained.model, text, run)
    rows = [row for row in trained.history if "evaluation_loss" in row]
    return {
        LOSS: loss,
        "seconds": sum(row["seconds"] for row in trained.history),
        "step": [row["step"] for row in rows],
        CURVE: [row["evaluation_loss"] * scale for row in rows],
    }


def _held_out_loss(model: LoopedLM, text: Text, run: TrainingRun) -> tuple[float, float]:
    """The loss in the text's unit, and what a nat per token is in that unit."""
    tokens, size = text.held_out(run), run.batch * run.sequence_length
    count = min(MOST_EVALUATED, max(1, (len(tokens) - 1) // size))
    batches = evaluation_batches(tokens, run.batch, run.sequence_length, count)
    graph, *parts = parts_of(model)
    loss = make_evaluation(partial(loss_of_parts, graph), batches)(
        *(part for part in parts if part is not None)
    )
    scale = text.in_unit(1.0, np.asarray(batches[1]))
    return loss * scale, scale


def _learns(label: str, results: Results) -> tuple[Sequence[float] | np.ndarray, str]:
    """The control: with an eighth of its training the first contender must be worse."""
    curves = results.paired(CURVE, [label])[0]
    return curves[:, 0] - curves[:, -1], f"{label} at its first evaluation and at its end"


def _not_to_be_run(*_: Any) -> Any:
    raise ValueError("a comparison that was loaded is only shown; `run_comparison` runs it")


def sizes_of(run: TrainingRun) -> dict[str, float]:
    """What a reader wants to know of a contender's cost."""
    return {
        "parameters": parameter_count(run.config),
        "FLOPs per token": flops_per_token(run.config, run.sequence_length),
        "steps": run.steps,
        "tokens": run.steps * run.batch * run.sequence_length,
        "training FLOPs": run_flops(run),
    }


def run_of(facts: Mapping[str, Any]) -> TrainingRun:
    """A run from JSON."""
    values = dict(facts)
    config = LoopedConfig(**values.pop("config"))
    text = values.pop("text")
    return TrainingRun(config, text if isinstance(text, str) else tuple(text), **values)
