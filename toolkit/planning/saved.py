"""Plans as files: what `toolkit plan --save` writes and `toolkit train --plan` runs as it is."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from toolkit._checks import checked
from toolkit._files import read_sealed_json, sealed_json, write_whole
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.measure import in_words
from toolkit.measure.tables import text_table
from toolkit.parallel.gradients import Exchange, ExchangePlan
from toolkit.planning.clusters import cluster
from toolkit.planning.grade.forms import packed, unpacked
from toolkit.planning.grade.program import Program, check_built, train_program
from toolkit.planning.grade.sent import sent_by_device
from toolkit.planning.gradients.exchanges import ExchangeChoice
from toolkit.planning.gradients.program import exchange_text, exchanging
from toolkit.planning.memory.placing import optimizer_specs
from toolkit.planning.predict import Prediction, predict
from toolkit.planning.strategy import Strategy
from toolkit.training import ProgramForm

VERSION = 1


@dataclasses.dataclass(frozen=True)
class SavedPlan:
    """A strategy for a model and a batch.

    Attributes:
        config: the model.
        strategy: layout, pipeline schedule, recomputation, microbatches, stages and chunks.
        batch: sequences per step.
        sequence_length: tokens per sequence.
        chips: for which it was made; any devices of the same number run it.
        exchange: how replicas agree on each gradient, as `toolkit.parallel.gradients.Exchange`
            reads it; None: they sum.

    Example:
        >>> from toolkit.looped import LoopedConfig
        >>> config = LoopedConfig.tiny("full", width=64, residual_gate=False)
        >>> saved = SavedPlan(config, Strategy(), batch=1, sequence_length=8, chips="h100:1")
        >>> saved.prediction.cluster.chips
        1
    """

    config: LoopedConfig
    strategy: Strategy
    batch: int
    sequence_length: int
    chips: str
    exchange: str | None = None

    @property
    def prediction(self) -> Prediction:
        """Time and memory on the chips for which it was made."""
        return predict(
            self.config, self.chips, self.strategy,
            batch=self.batch, sequence_length=self.sequence_length,
        )  # fmt: skip

    def program(self, devices: Sequence[Any] | None = None) -> Program:
        """The train step on these devices; None: all that are here.

        ValueError unless there are as many as the plan takes.
        """
        there = list(jax.devices() if devices is None else devices)
        if len(there) != self.strategy.chips:
            raise ValueError(
                f"plan: it takes {self.strategy.chips} devices ({self.strategy}), and there are "
                f"{len(there)}"
            )
        sizes = {"batch": self.batch, "sequence_length": self.sequence_length}
        return train_program(self.config, self.strategy, **sizes, devices=there)

    def form(self, devices: Sequence[Any] | None = None) -> ProgramForm:
        """The program as `toolkit.language.train_language_model` takes it."""
        program, config, strategy = self.program(devices), self.config, self.strategy
        exchange = self._exchange(program)
        model = nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
        like = nnx.state(model, nnx.Param)
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, program.arguments[0])
        return ProgramForm(
            loss=program.loss,
            layout=program.layout,
            pack=lambda params: packed(config, strategy, params),
            unpack=lambda found: unpacked(config, strategy, found, like),
            is_model=lambda tree: isinstance(tree, nnx.State),
            is_program=lambda tree: isinstance(tree, dict) and "blocks" in tree,
            specs_of=lambda state: optimizer_specs(strategy, state, program.params, specs),
            exchange=exchange,
        )

    def _exchange(self, program: Program) -> ExchangePlan | None:
        if self.exchange is None:
            return None
        return exchanging(self.config, self.strategy, program, Exchange.parse(self.exchange))

    def explained(self, devices: Sequence[Any] | None = None) -> str:
        """Bytes sent by the compiled program beside those predicted, for each device of the
        pipeline."""
        program = self.program(devices)
        compiled, exchange = program.compile(), self._exchange(program)
        found = sent_by_device(compiled, self.config, self.strategy)
        rows = [("pipeline device", "collective", "compiled: bytes sent", "predicted")]
        for device, sent in enumerate(found):
            is_whole = self.strategy.pipeline == 1
            each = self.prediction.transfers if is_whole else self.prediction.transfers_of(device)
            for kind in sorted({*sent, *(transfer.kind for transfer in each)}):
                total = sum(transfer.total for transfer in each if transfer.kind == kind)
                rows.append((str(device), kind, f"{sent.get(kind, 0):,.0f}", f"{total:,.0f}"))
        step, ticks = self.prediction.step_seconds, self.prediction.lockstep_seconds
        took = in_words(step, "seconds")
        if self.strategy.pipeline > 1:
            took += f", or {in_words(ticks, 'seconds')} in ticks that wait for their slowest task"
        if exchange is not None:
            took += (
                f"\nHere gradients are summed; exchanged as {exchange.exchange}, they take "
                f"{exchange.bytes_sent:,.0f} bytes sent between replicas, modelled"
            )
        return (
            f"{self.strategy}; {self.batch} sequences of {self.sequence_length} tokens\n"
            f"A step on {self.chips}, modelled: {took}\n"
            f"{text_table(rows, '<<>>')}\n"
            "Sums of small arrays, which no chip cuts, and of the head's scalars are not predicted."
        )


@checked
def save_plan(
    found: Prediction, path: Path | str, *, exchanges: ExchangeChoice | None = None
) -> None:
    """Write a plan to a file.

    Args:
        found: a prediction, such as `plan(...).best`.
        path: the file, JSON.
        exchanges: how its gradients are exchanged, tensor by tensor; None: they are summed.

    Raises:
        ValueError: `train_program` does not build it.

    Example:
        >>> save_plan(predict("llama-3.2-1b", "h100:8", Strategy(fsdp=8), batch=8), "plan.json")
        >>> load_plan("plan.json").strategy.fsdp
        8
    """
    check_built(found.config, found.strategy)
    facts = {
        "toolkit plan": VERSION,
        "chips": found.cluster.name,
        "batch": found.batch,
        "sequence_length": found.sequence_length,
        "strategy": dataclasses.asdict(found.strategy),
        "modelled": {
            "step_seconds": found.step_seconds,
            "bytes_per_chip": found.memory.total,
        },
        "model": dataclasses.asdict(found.config),
    }
    if exchanges is not None:
        facts["exchange"] = exchange_text(exchanges)
        facts["modelled"]["step_seconds"] = exchanges.step_seconds
    write_whole(path, sealed_json(facts, indent=1))


@checked
def load_plan(path: Path | str) -> SavedPlan:
    """Read a plan that `save_plan` wrote.

    Args:
        path: the file.

    Raises:
        ValueError: it is damaged, was edited, or is of another version.

    Example:
        >>> save_plan(predict("llama-3.2-1b", "h100:8", Strategy(fsdp=8), batch=8), "plan.json")
        >>> load_plan("plan.json").batch
        8
    """
    facts = read_sealed_json(Path(path).read_bytes(), str(path))
    try:
        if facts["toolkit plan"] != VERSION:
            raise ValueError(f"it is of version {facts['toolkit plan']}, wanted {VERSION}")
        config, strategy = LoopedConfig(**facts["model"]), Strategy(**facts["strategy"])
        sizes = facts["batch"], facts["sequence_length"], cluster(facts["chips"]).name
        exchange = facts.get("exchange")
        if exchange is not None:
            Exchange.parse(exchange)
        return SavedPlan(config, strategy, *sizes, exchange)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"plan: {str(path)!r} is no plan of this version ({error})") from error
