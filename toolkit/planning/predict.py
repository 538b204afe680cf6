"""Memory and time of a train step, before anything is compiled."""

import dataclasses
from collections import Counter
from functools import cached_property
from typing import Any

from toolkit._checks import checked
from toolkit.looped import LoopedConfig, active_parameter_count, parameter_count
from toolkit.measure import in_words
from toolkit.measure.tables import text_table
from toolkit.planning.clusters import Cluster, cluster
from toolkit.planning.memory.categories import Memory, layer_kinds, memory_of
from toolkit.planning.memory.gpus import usable_bytes
from toolkit.planning.memory.pipelines import pipeline_memory
from toolkit.planning.mixtures import dropped_share, slots
from toolkit.planning.model_checks import check_model
from toolkit.planning.models import model_of
from toolkit.planning.strategy import Strategy
from toolkit.planning.time.orders import least_through, step_in_ticks, step_through
from toolkit.planning.time.products import product_rate
from toolkit.planning.time.seconds import Constants, Seconds, constants_of
from toolkit.planning.time.stage_traffic import device_transfers
from toolkit.planning.time.step import layer_seconds, table_seconds, transfer_seconds
from toolkit.planning.time.traffic import (
    Transfer,
    as_compiled,
    layer_transfers,
    table_transfers,
)

_WAITS = "tensor communication", "tensor and context communication"


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Memory and time of one train step under one strategy; modelled.

    Attributes:
        config: the model.
        cluster: the chips.
        strategy: how the step is sharded.
        batch: sequences per step.
        sequence_length: tokens per sequence.
        constants: rates that chips and links achieve.
        limit: bytes of memory a chip may use.

    Example:
        >>> found = predict("llama-3.2-1b", "v5e:16", Strategy(fsdp=16), batch=16)
        >>> found.fits, found.memory.parameters // 10**6
        (True, 309)
    """

    config: LoopedConfig
    cluster: Cluster
    strategy: Strategy
    batch: int
    sequence_length: int
    constants: Constants
    limit: float

    @cached_property
    def memory(self) -> Memory:
        """Memory by category, of the chip that needs most."""
        sizes = self.config, self.strategy, self.batch, self.sequence_length
        if self.strategy.pipeline > 1:
            return pipeline_memory(*sizes, self.stages)
        return memory_of(*sizes, fuses_logits=self.cluster.chip.name.startswith("TPU"))

    @property
    def fits(self) -> bool:
        """Whether it fits into a chip's memory."""
        return self.memory.total <= self.limit

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Layers per pipeline stage."""
        return self.strategy.layers_by_stage(len(self.config.layers), self.config.loops)

    @cached_property
    def kinds(self) -> tuple[tuple[str, str, str], ...]:
        """Mixer, feed-forward layer and recomputation of every layer."""
        return layer_kinds(self.config, self.strategy)

    @cached_property
    def parts(self) -> Seconds:
        """Seconds of all layers, embedding and head, as if on one pipeline stage."""
        total = self.seconds_of_tables
        for kind, found in self.seconds_by_kind.items():
            total += found.times(self.kinds.count(kind))
        return total

    @cached_property
    def bubble(self) -> float:
        """Seconds that a chip waits for other pipeline stages."""
        if self.strategy.pipeline == 1:
            return 0.0
        step = step_through(self.strategy, self.busy, self.hop_seconds, self.constants.slowdown)
        return max(0.0, step - self.parts.total(self.constants.slowdown) / self.strategy.pipeline)

    @cached_property
    def lockstep_seconds(self) -> float:
        """Seconds of a step whose pipeline runs in ticks, as one program has them: every tick
        takes as long as its slowest task and a message. At least `step_seconds`."""
        if self.strategy.pipeline == 1:
            return self.step_seconds
        return step_in_ticks(self.strategy, self.busy, self.hop_seconds, self.constants.slowdown)

    @property
    def least_seconds(self) -> float:
        """A lower bound on the step: each stage's work after one microbatch's round trip.

        It needs no simulation, and lets a search skip slow plans.
        """
        return least_through(self.strategy, self.busy, self.hop_seconds, self.constants.slowdown)

    @cached_property
    def busy(self) -> list[Seconds]:
        """Seconds of each pipeline stage; equal stages are computed once."""
        kinds, start, busy, seen = self.kinds, 0, [], {}
        for stage, size in enumerate(self.stages):
            start %= len(kinds)  # of the next loop
            key = stage == 0, stage == len(self.stages) - 1, kinds[start : start + size]
            if key not in seen:
                seen[key] = self.stage_seconds(stage, start, start + size)
            busy.append(seen[key])
            start += size
        return busy

    def stage_seconds(self, stage: int, start: int, end: int) -> Seconds:
        """Seconds of one pipeline stage, in one loop, with the layers from `start` to `end`."""
        kinds, loops = Counter(self.kinds[start:end]), self.config.loops
        each = (self.seconds_by_kind[kind].times(count / loops) for kind, count in kinds.items())
        parts = sum(each, Seconds())
        # The first stage embeds, and has half of the table's communication.
        share = 0.25 * (stage == 0) + 0.75 * (stage == self.strategy.stage_count - 1)
        return parts + self.seconds_of_tables.times(share) if share else parts

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of a step by part; their sum is `step_seconds`."""
        parts, stages = self.parts.times(1 / self.strategy.pipeline), self.strategy.pipeline
        named = {
            "forward": parts.forward,
            "backward": parts.backward,
            "recomputed": parts.recomputed,
            _WAITS[self.strategy.context > 1]: parts.tensor,
            "exposed parameter communication": parts.exposed(self.constants.slowdown),
            "update": parts.update,
        }
        if self.strategy.expert > 1:
            named["expert communication"] = parts.expert
        return named | ({"pipeline bubble": self.bubble} if stages > 1 else {})

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all chips."""
        return self.batch * self.sequence_length / self.step_seconds

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation: 6 FLOPs per parameter that a token passes, loop and token over
        the chips' peak."""
        tables = self.config.vocabulary * self.config.width * (not self.config.tied_embedding)
        body = active_parameter_count(self.config) - tables
        head = self.config.vocabulary * self.config.width
        numbers = (body - head) * self.config.loops + head
        flops = 6 * numbers * self.batch * self.sequence_length
        peak = self.cluster.chip.flops_per_second * self.strategy.chips
        return flops / peak / self.step_seconds

    @property
    def transfers(self) -> list[Transfer]:
        """The collectives of a step; of a pipeline, on the chips of the stage that sends most."""
        if self.strategy.pipeline > 1:
            every = map(self.transfers_of, range(self.strategy.pipeline))
            return max(every, key=lambda found: sum(each.total for each in found))
        sizes = (self.strategy, self._sequences(), self.sequence_length)
        found = table_transfers(self.config, *sizes)
        for kind, count in Counter(self.kinds).items():
            found += layer_transfers(self.config, *kind, *sizes, self.cluster) * count
        return as_compiled(found, self.cluster, self._sequences())

    def transfers_of(self, device: int) -> list[Transfer]:
        """The collectives of a step on a chip of one device of the pipeline, counted from 0."""
        sizes = self.strategy, self._sequences(), self.sequence_length
        found = device_transfers(self.config, *sizes, device, self.cluster)
        return as_compiled(found, self.cluster, self._sequences())

    @property
    def sent_bytes(self) -> float:
        """Bytes that a chip sends per step; of a pipeline, where most are sent."""
        return sum(transfer.total for transfer in self.transfers)

    def __str__(self) -> str:
        rows = [("memory per chip", "bytes", "step", "seconds")]
        sizes = [(name, in_words(value, "bytes")) for name, value in self.memory._asdict().items()]
        sizes.append(("total", in_words(self.memory.total, "bytes")))
        took = [(name, in_words(value, "seconds")) for name, value in self.seconds.items()]
        took.append(("step", in_words(self.step_seconds, "seconds")))
        for index in range(max(len(sizes), len(took))):
            left = sizes[index] if index < len(sizes) else ("", "")
            right = took[index] if index < len(took) else ("", "")
            rows.append((left[0], left[1], right[0], right[1]))
        verdict = "fits" if self.fits else "does not fit"
        words = (
            f"{self.cluster.name}, {self.strategy}: {verdict} "
            f"{in_words(self.limit, 'bytes')}; modelled\n{text_table(rows, '<><>')}"
        )
        return words if "moe" not in self.config.feed_forward_words else f"{words}\n{self.routing}"

    @property
    def routing(self) -> str:
        """Experts and tokens in words."""
        config, strategy, moe = self.config, self.strategy, self.config.moe
        tokens = self._sequences() * self.sequence_length // strategy.tensor // strategy.context
        total, active = parameter_count(config), active_parameter_count(config)
        words = (
            f"{total / 1e9:,.1f} billion parameters, of which a token passes {active / 1e9:,.1f}: "
            f"{moe.chosen} of {moe.experts} experts per layer"
        )
        if strategy.expert == 1:
            return f"{words}, all of them on each chip or gathered to it"
        words += f", {moe.experts // strategy.expert} on a chip"
        if strategy.dispatch != "all_to_all":
            return f"{words}; the busiest chip has {self.constants.imbalance:g} times the mean load"
        room, drop = slots(config, strategy, tokens), dropped_share(config, strategy, tokens)
        return (
            f"{words}; an expert takes {room} tokens from each chip, and {drop:.1%} of the choices "
            "find it full at an even load, more at any other"
        )

    def _sequences(self):
        return self.batch // (self.strategy.batch_shards * self.strategy.microbatches)

    def _sizes(self):
        return (
            self.strategy, self.cluster, self._sequences(), self.sequence_length, self.constants
        )  # fmt: skip

    @cached_property
    def seconds_by_kind(self) -> dict[tuple[str, str, str], Seconds]:
        """Seconds of a layer of each kind: mixer, feed-forward layer, recomputation."""
        sizes = self._sizes()
        return {
            kind: layer_seconds(self.config, *kind, *sizes) for kind in dict.fromkeys(self.kinds)
        }

    @cached_property
    def seconds_of_tables(self) -> Seconds:
        """Seconds of embedding and head."""
        return table_seconds(self.config, *self._sizes())

    @cached_property
    def hop_seconds(self) -> float:
        """Seconds to send a microbatch, or a slice of it, to the next pipeline stage, or back."""
        if self.strategy.pipeline == 1:
            return 0.0
        length = self.sequence_length // self.strategy.slices
        sent = self._sequences() * length * self.config.width
        sent *= self.config.compute_dtype.itemsize / self.strategy.tensor / self.strategy.context
        inner = self.strategy.chips // self.strategy.pipeline
        link = self.cluster.link(inner, self.strategy.pipeline)
        return transfer_seconds(link, sent, 2, self.constants)


@checked
def predict(
    model: Any,
    chips: str | Cluster,
    strategy: Strategy,
    *,
    batch: int,
    sequence_length: int = 2048,
    memory: float | None = None,
    constants: Constants | None = None,
) -> Prediction:
    """Predict memory and time of a train step, without tracing or compiling anything.

    Per chip, with Psi parameters in float32 and Adam:

        memory = 4 Psi/f + 8 Psi/m + max(head, layers, update)
        step   = overlap(forward, gathers) + overlap(backward, gathers and gradients)
                 + tensor communication + update + pipeline bubble

    Args:
        model: a configuration, or the name of one (`MODELS`); the path of a config.json or its
            folder; or a model or configuration of Hugging Face transformers.
        chips: kind and number, such as "h100:64" or "v5e:4x4".
        strategy: how the step is sharded; the product of its degrees is the number of chips.
        batch: global batch size in sequences.
        sequence_length: tokens per sequence.
        memory: usable bytes per chip; None: all that `usable_bytes` leaves.
        constants: rates that chips and links achieve; None: defaults, which are not measured.

    Raises:
        ValueError: when the degrees do not divide the model, the batch or the chips; names the
            nearest that do.

    Source: Rajbhandari et al., "ZeRO", 2020; Korthikanti et al., 2022; Austin et al., "How to Scale
        Your Model", 2025.

    Example:
        >>> found = predict("llama-3-8b", "h100:8", Strategy(fsdp=8, recompute="layer"), batch=8)
        >>> found.fits
        True
    """
    config, where = model_of(model), cluster(chips)
    if strategy.chips != where.chips:
        raise ValueError(
            f"strategy takes {strategy.chips} chips ({strategy}), and there are {where.chips}"
        )
    check_model(config, strategy, batch, sequence_length)
    runs_on = {"ragged": "TPUs", "by_host": "GPUs"}.get(strategy.dispatch)
    if runs_on and (runs_on == "TPUs") != where.chip.name.startswith("TPU"):
        raise ValueError(
            f"dispatch {strategy.dispatch!r} runs on {runs_on} only; got chips {where.name!r}, "
            "nearest that works: 'all_to_all'"
        )
    if strategy.products != "bfloat16" and product_rate(where.chip, "float8") == product_rate(
        where.chip, "bfloat16"
    ):
        raise ValueError(
            f"products {strategy.products!r}: chips {where.name!r} multiply no such numbers; "
            "nearest that works: 'bfloat16'"
        )
    if memory is not None and not memory > 0:
        raise ValueError(f"memory must be positive; got {memory}")
    return prediction_of(
        config, where, strategy, batch, sequence_length, memory, constants_of(where, constants)
    )


def prediction_of(config, where, strategy, batch, length, memory, constants) -> Prediction:
    """`predict` without checks."""
    limit = usable_bytes(where) if memory is None else memory
    return Prediction(config, where, strategy, batch, length, constants, limit)
