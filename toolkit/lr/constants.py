"""The constants of AutoLRS: the paper's, the published code's, and some for short runs."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from toolkit._checks import check_fields
from toolkit.lr.protocol import require

PROPOSALS = ("sequential", "together")
FORECASTS = ("published", "robust")


@dataclass(frozen=True)
class AutoLRSConstants:
    """The constants of AutoLRS; `paper` and `code` are the published ones.

    Steps are gradient evaluations: those of discarded candidates count.

    Attributes:
        lr_range: lowest and highest rate, searched on a logarithmic scale.
        budget: total steps, including candidates.
        candidates: rates tried in a stage (k).
        first_stage: steps of training in the first stage (tau).
        longest_stage: upper bound of tau, which doubles from stage to stage.
        probe_ratio: tau / tau', the ratio of a stage's steps to a candidate's.
        shortest_probe: shortest stage that is searched.
        kappa: optimism of the confidence bound, in standard deviations.
        proposals: "sequential", each based on those before; "together", k on a logarithmic grid,
            which may run in parallel.
        forecast: "published" or "robust" (whose variance the Gaussian process takes as noise).
        validation_delay: stages at the longest tau that still use the training loss.
        validation_points: validation losses per candidate.
        warmup_steps: steps of a linear rise before the first stage; not searched.
        warmup_rate: rate at its end.
        final_decay: last fraction of the budget, spent on a linear fall to zero.
        validation_batches: batches per validation loss; 0 for none.
        stale_rate: None to apply each rate at once. A rate is what the optimiser had before the
            search: then the first step after a restore is made at the rate saved with the state,
            as the published code does.
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
    stale_rate: float | None = None
    seed: int = 0

    def __post_init__(self):
        check_fields(self)
        low, high = self.lr_range
        at_least_one = ("budget", "candidates", "first_stage", "probe_ratio", "shortest_probe")
        ends = f"0 or more, and with the final decay ({self.decay_steps}) fit the budget"
        rate, warmup, stale = self.warmup_rate, self.warmup_steps, self.stale_rate
        shortest = min(self.shortest_probe, self.first_stage // self.probe_ratio)
        checks = {
            "lr_range": (0 < low < high < np.inf, "0 < low < high, both finite"),
            **{name: (getattr(self, name) >= 1, "at least 1") for name in at_least_one},
            "longest_stage": (
                self.longest_stage >= self.first_stage,
                f"at least first_stage={self.first_stage}",
            ),
            "kappa": (self.kappa >= 0, "0 or more"),
            "proposals": (self.proposals in PROPOSALS, f"one of {', '.join(PROPOSALS)}"),
            "forecast": (self.forecast in FORECASTS, f"one of {', '.join(FORECASTS)}"),
            "validation_delay": (self.validation_delay >= 0, "0 or more"),
            "validation_points": (self.validation_points >= 1, "at least 1"),
            "stale_rate": (
                stale is None or (stale > 0 and shortest > 1),
                "positive, with probes of at least 2 steps, or None",
            ),
            "final_decay": (0 <= self.final_decay < 1, "in [0, 1)"),
            "warmup_steps": (0 <= warmup <= self.budget - self.decay_steps, ends),
            "warmup_rate": (
                not warmup or (rate is not None and rate > 0),
                "positive with warmup_steps: the rise is not searched",
            ),
        }
        require(self, checks)

    @property
    def decay_steps(self) -> int:
        """Steps of the final decay."""
        return round(self.final_decay * self.budget)

    def tau(self, stage: int) -> int:
        """Steps of training in a full stage.

            tau = min(first_stage * 2^stage, longest_stage)

        Returns:
            Steps.
        """
        return min(self.first_stage * 2 ** min(stage, 62), self.longest_stage)

    def is_by_validation(self, stage: int) -> bool:
        """Whether a stage compares candidates by validation losses.

        Returns:
            True once tau has been at its longest for `validation_delay` stages.
        """
        earlier = stage - self.validation_delay
        return (
            self.validation_batches > 0 and earlier >= 0 and self.tau(earlier) == self.longest_stage
        )

    @classmethod
    def paper(cls, lr_range: tuple[float, float], budget: int, **changes: Any) -> Self:
        """As in the paper: kappa 1000, validation losses as soon as tau is at its longest.

        Source: Jin et al., AutoLRS (arXiv:2105.10762), sections 4 and 5.
        """
        return cls(lr_range, budget, **changes)

    @classmethod
    def code(cls, lr_range: tuple[float, float], budget: int, **changes: Any) -> Self:
        """As in the published code: kappa 1e6, validation losses one stage later.

        Source: the authors' repository, autolrs_server.py.
        """
        return cls(lr_range, budget, **{"kappa": 1e6, "validation_delay": 1, **changes})

    @classmethod
    def scaled(cls, lr_range: tuple[float, float], budget: int, **changes: Any) -> Self:
        """The paper's constants for short runs: tau from budget / 20 (at least 50) to four times
        that, robust forecasts, candidates on a grid (to which kappa 1000 amounts), and a final
        decay.

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
