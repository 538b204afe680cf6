"""What fits: models against chips under one scheme, and the fewest chips under each. Modelled."""

import functools
from dataclasses import dataclass

from toolkit.lab.kit.view import Data, View
from toolkit.measure.words import counted
from toolkit.planning import Prediction, what_fits
from toolkit.planning.models import DENSE
from toolkit.planning.search.what_fits import schemes

MODELS = tuple(DENSE)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SCHEMES = tuple(schemes(1))
Found = dict[tuple[int, int, str], Prediction | None]


@dataclass(frozen=True)
class FitsView(View):
    """Every model on every number of chips."""

    chip: str
    scheme: str
    sequences: int
    context: int
    found: Found

    def share(self, model: int, count: int) -> float | None:
        """Of a chip's memory that is needed; None where the scheme does not divide the model."""
        prediction = self.found[model, count, self.scheme]
        return None if prediction is None else prediction.memory.total / prediction.limit

    def fewest(self, model: int, scheme: str) -> int | None:
        """The smallest number of chips that a model fits."""
        fitting = (
            chips
            for count, chips in enumerate(COUNTS)
            if (prediction := self.found[model, count, scheme]) is not None and prediction.fits
        )
        return next(fitting, None)

    def data(self) -> Data:
        def in_word(value) -> str:
            return "none" if value is None else str(value)

        shares = {
            f"on {chips} (share)": [self.share(model, count) for model in range(len(MODELS))]
            for count, chips in enumerate(COUNTS)
        }
        fewest = {
            f"fewest chips, {scheme}": [
                in_word(self.fewest(model, scheme)) for model in range(len(MODELS))
            ]
            for scheme in SCHEMES
        }
        return {"model, modelled": [*MODELS], **shares, **fewest}

    def sentence(self) -> str:
        entries = []
        for model, name in enumerate(MODELS):
            fewest = self.fewest(model, self.scheme)
            entries.append(f"{name} {'nowhere' if fewest is None else f'from {fewest}'}")
        return (
            f"{self.scheme} on {self.chip}, {counted(self.sequences, 'sequence')} of "
            f"{self.context:,} tokens per chip; which numbers of chips fit: "
            f"{', '.join(entries)}. Modelled."
        )

    def footnote(self) -> str:
        return (
            "Left: share of a chip's memory that is needed. Blue and bold: fits. "
            f"{self.sequences} x {self.context:,} tokens per chip; tensor is 4 wide. Modelled."
        )


def fits(*, chip: str, scheme: str, sequences: int, context: int) -> FitsView:
    """The map of one kind of chip; `sequences` and `context` are those of one chip's batch."""
    return FitsView(chip, scheme, sequences, context, _found(chip, sequences, context))


@functools.lru_cache(maxsize=16)
def _found(chip: str, sequences: int, context: int) -> Found:
    clusters = [f"{chip}:{count}" for count in COUNTS]
    return what_fits(MODELS, clusters, sequences_per_chip=sequences, sequence_length=context)
