"""The memory of one chip in a train step, by category. Pure functions; all numbers are modelled."""

from dataclasses import dataclass

from toolkit.lab.kit.view import Data, View
from toolkit.measure import in_words
from toolkit.measure.words import counted
from toolkit.planning import Prediction, Strategy, predict

CHUNK = 256  # tokens of a sequence whose logits exist at one time


@dataclass(frozen=True)
class ChipMemoryView(View):
    """A prediction, its memory as a cascade: each category starts where the last one ends."""

    model: str
    prediction: Prediction

    @property
    def categories(self) -> dict[str, int]:
        """Bytes by category."""
        return self.prediction.memory._asdict()

    def data(self) -> Data:
        sizes = self.categories | {"total": self.prediction.memory.total}
        return {
            "category, modelled": [*sizes],
            "per chip (bytes)": [*sizes.values()],
            "of the chip's memory (share)": [
                size / self.prediction.limit for size in sizes.values()
            ],
        }

    def sentence(self) -> str:
        found = self.prediction
        largest = sorted(self.categories.items(), key=lambda part: -part[1])[:3]
        parts = ", ".join(f"{name} {in_words(size, 'bytes')}" for name, size in largest)
        verdict = "fits" if found.fits else "does not fit"
        return (
            f"{self.model} on {found.cluster.name}, {found.strategy}, "
            f"{counted(found.batch, 'sequence')} of {found.sequence_length:,} tokens: "
            f"{in_words(found.memory.total, 'bytes')} per chip {verdict} "
            f"{in_words(found.limit, 'bytes')}. Largest: {parts}. A step takes "
            f"{in_words(found.step_seconds, 'seconds')}. All modelled, nothing is compiled."
        )

    def footnote(self) -> str:
        found = self.prediction
        return (
            f"{self.model} on {found.cluster.name}: {found.strategy}; {found.batch} x "
            f"{found.sequence_length:,} tokens. Modelled."
        )


def chip_memory(
    *,
    model: str,
    chip: str,
    replicas: int,
    fsdp: int,
    tensor: int,
    pipeline: int,
    shard_optimizer: bool,
    recompute: str,
    sequences: int,
    context: int,
) -> ChipMemoryView:
    """The memory of a chip, with as many microbatches as pipeline stages."""
    strategy = Strategy(
        data=replicas, fsdp=fsdp, tensor=tensor, pipeline=pipeline, shard_optimizer=shard_optimizer,
        recompute=recompute, microbatches=pipeline,
        head_chunks=context // CHUNK if context % CHUNK == 0 else 1,
    )  # fmt: skip
    batch = sequences * strategy.batch_shards * pipeline
    chips = f"{chip}:{strategy.chips}"
    return ChipMemoryView(
        model, predict(model, chips, strategy, batch=batch, sequence_length=context)
    )
