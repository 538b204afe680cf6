"""The constants of AutoLRS: the paper's, the published code's, and some for short runs."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np


@dataclass(frozen=True)
class AutoLRSConstants:
    """The constants of AutoLRS; `paper` and `code` are the published ones.

    Steps are gradient evaluations: those of discarded candidates count.

    Attributes:
        lr_range: lowest and highest rate, searched on a logarithmic scale.
        budget: steps in all, candidates included.
        candidates: rates tried in a stage (k).
        first_stage: steps of training in the first stage (tau).
        longest_stage: tau doubles from stage to stage up to this.
        probe_ratio: tau / tau', how much longer a stage trains than a candidate.
        shortest_probe: a stage that the rest of the budget would cut below this is not searched.
        kappa: optimism of the confidence bound, in standard deviations.
        proposals: "sequential", each from those before; "together", k on a logarithmic grid, which
            may run side by side.
        forecast: "published" or "robust" (whose variance the Gaussian process takes as noise).
        validation_delay: stages at the longest tau that still go by the training loss.
        validation_points: validation losses a candidate.
        warmup_steps: steps of a linear rise before the first stage; not searched.
        warmup_rate: rate at its end.
        final_decay: last fraction of the budget, spent on a linear fall to zero.
        validation_batches: batches of one validation loss; 0 if there is none to be had.
        seed: of the first candidate of each stage.
    """

    lr_range: tuple[float, float]
    budget: int
    candidates: int = 10
    first_stage: int = 1000
    longest_stage: int = 8000
    probe_ratio: int = 10
    shortest_probe: int = 5
    kappa: float = 1000.0
    proposals: str = "sequential"
    forecast: str = "published"
    validation_delay: int = 0
    validation_points: int = 16
    warmup_steps: int = 0
    warmup_rate: float | None = None
    final_decay: float = 0.0
    validation_batches: int = 0
    seed: int = 0

    def __post_init__(self):
        low, high = self.lr_range
        if not (0 < low < high < np.inf):
            raise ValueError(f"lr_range must be 0 < low < high, both finite, got {self.lr_range}")
        for name in ("budget", "candidates", "first_stage", "probe_ratio", "shortest_probe"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.longest_stage < self.first_stage:
            raise ValueError(
                f"longest_stage must be at least first_stage={self.first_stage}, "
                f"got {self.longest_stage}"
            )
        if not self.kappa >= 0:
            raise ValueError(f"kappa must not be negative, got {self.kappa}")
        if self.proposals not in ("sequential", "together"):
            raise ValueError(f"proposals: want sequential or together, got {self.proposals!r}")
        if self.forecast not in ("published", "robust"):
            raise ValueError(f"forecast must be published or robust, got {self.forecast!r}")
        if self.validation_delay < 0 or self.validation_points < 1:
            raise ValueError(
                "need validation_delay >= 0 and validation_points >= 1, got "
                f"{self.validation_delay} and {self.validation_points}"
            )
        if not 0 <= self.final_decay < 1:
            raise ValueError(f"final_decay must lie in [0, 1), got {self.final_decay}")
        if not 0 <= self.warmup_steps <= self.budget - self.decay_steps:
            raise ValueError(
                f"warmup_steps and the final decay ({self.decay_steps}) must fit the budget of "
                f"{self.budget}, got {self.warmup_steps}"
            )
        if self.warmup_steps and not (self.warmup_rate is not None and self.warmup_rate > 0):
            raise ValueError(
                f"warmup_steps needs a positive warmup_rate, got {self.warmup_rate}: "
                "the rise is not searched"
            )

    @property
    def decay_steps(self) -> int:
        """Steps of the final decay."""
        return round(self.final_decay * self.budget)

    def tau(self, stage: int) -> int:
        """Steps of training in a stage that the budget does not cut short.

            tau = min(first_stage * 2^stage, longest_stage)

        Args:
            stage: 0 for the first.

        Returns:
            Steps.

        Source: Jin et al., AutoLRS (arXiv:2105.10762), algorithm 1.
        """
        return min(self.first_stage * 2 ** min(stage, 62), self.longest_stage)

    def is_by_validation(self, stage: int) -> bool:
        """Whether a stage's candidates go by validation losses.

        Args:
            stage: 0 for the first.

        Returns:
            True once tau has been at its longest for `validation_delay` stages.

        Source: Jin et al., AutoLRS (arXiv:2105.10762), section 4; the delay is the code's.
        """
        earlier = stage - self.validation_delay
        return (
            self.validation_batches > 0 and earlier >= 0 and self.tau(earlier) == self.longest_stage
        )

    @classmethod
    def paper(cls, lr_range: tuple[float, float], budget: int, **changes: Any) -> Self:
        """As in the paper: kappa 1000, validation losses as soon as tau is at its longest.

        Args:
            lr_range: lowest and highest rate.
            budget: steps in all.
            **changes: of any other attribute.

        Returns:
            The constants.

        Source: Jin et al., AutoLRS (arXiv:2105.10762), sections 4 and 5.
        """
        return cls(lr_range, budget, **changes)

    @classmethod
    def code(cls, lr_range: tuple[float, float], budget: int, **changes: Any) -> Self:
        """As in the published code: kappa 1e6, validation losses one stage later.

        Args:
            lr_range: lowest and highest rate.
            budget: steps in all.
            **changes: of any other attribute.

        Returns:
            The constants.

        Source: the authors' repository, autolrs_server.py.
        """
        return cls(lr_range, budget, **{"kappa": 1e6, "validation_delay": 1, **changes})

    @classmethod
    def scaled(cls, lr_range: tuple[float, float], budget: int, **changes: Any) -> Self:
        """The paper's with stages for short runs: tau from budget / 20 (at least 50) to four
        times that, robust
        forecasts, candidates on a grid (which kappa 1000 amounts to), and a final decay.

        Args:
            lr_range: lowest and highest rate.
            budget: steps in all.
            **changes: of any other attribute.

        Returns:
            The constants.

        Source: the paper's stages for 100 times as many steps.
        """
        first = max(budget // 20, 50)
        ours = {
            "first_stage": first,
            "longest_stage": 4 * first,
            "forecast": "robust",
            "proposals": "together",
            "final_decay": 0.2,
        }
        return cls(lr_range, budget, **{**ours, **changes})
