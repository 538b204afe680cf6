"""Steps, rates and lengths of the stages of a conversion."""

import dataclasses

from toolkit._checks import check_choice, check_fields


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """Steps, learning rates and lengths of the three stages; checked when made.

    Learning rates are peaks of a warm-up over the first twentieth and a cosine to zero. A stage of
    0 steps is left out.

    Attributes:
        align_steps, align_rate, align_time: of stage 1; `time` is tokens per sequence.
        distil_steps, distil_rate, distil_time: of stage 2.
        choice_batches: batches for the choice of the layers to restore, used in no stage.
        top_k: number of the teacher's likeliest tokens to compare.
        temperature: of both distributions.
        supervision: shares of stage 2 at which supervision of every loop is complete and ends; see
            `loop_weights`.
        trained: "all" parameters in stages 2 and 3, or the new "mixers" alone.
        extend_times: sequence lengths of stage 3, in order; () leaves it out.
        extend_steps, extend_rate: for each of these lengths.
        target_share: share of the cross-entropy of the targets in stage 3's loss; the rest is the
            divergence from the teacher, which at 1 is not run.
        weight_decay: of matrices, in all stages.

    Source: LT2, "Linear-Time Looped Transformers", distillation section: 100M, 600M and 600M tokens
        of length 512, 4096 and up to 32768. Rates, k and temperature are not published.

    Example:
        >>> ConversionPlan(align_steps=100, distil_steps=200).total_steps
        300
    """

    align_steps: int = 1000
    align_rate: float = 3e-3
    align_time: int = 512
    distil_steps: int = 2000
    distil_rate: float = 1e-3
    distil_time: int = 4096
    choice_batches: int = 4
    top_k: int = 64
    temperature: float = 1.0
    supervision: tuple[float, float] = (0.1, 0.7)
    trained: str = "all"
    extend_times: tuple[int, ...] = ()
    extend_steps: int = 500
    extend_rate: float = 3e-4
    target_share: float = 0.5
    weight_decay: float = 0.0

    def __post_init__(self):
        check_fields(self)
        for name in ("align_steps", "distil_steps", "extend_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative.")
        for name in ("align_rate", "distil_rate", "extend_rate", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive.")
        for name in ("align_time", "distil_time", "choice_batches", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if list(self.extend_times) != sorted(set(self.extend_times)) or 0 in self.extend_times:
            raise ValueError(f"extend_times are {self.extend_times}; they must grow.")
        check_choice("trained", self.trained, ("all", "mixers"))
        if not 0 <= self.target_share <= 1:
            raise ValueError(f"target_share is {self.target_share}; it must lie in [0, 1].")
        rise, end = self.supervision
        if not 0 <= rise <= end <= 1:
            raise ValueError(
                f"supervision is {self.supervision}; wanted two shares 0 <= rise <= end <= 1."
            )

    @property
    def total_steps(self) -> int:
        """Steps of all stages together."""
        return self.align_steps + self.distil_steps + len(self.extend_times) * self.extend_steps
