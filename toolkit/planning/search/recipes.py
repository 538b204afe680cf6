"""Published recipes of large runs, written down, predicted and held against what a search finds."""

import dataclasses
from typing import Any, NamedTuple

from toolkit._checks import check_choice, checked
from toolkit.measure import in_words
from toolkit.planning.memory.gpus import GpuPeak, shown_bytes
from toolkit.planning.memory.staged import staged_peak
from toolkit.planning.models import model_of
from toolkit.planning.predict import Prediction, predict
from toolkit.planning.search.plan import plan, why
from toolkit.planning.strategy import Strategy

_LLAMA = "Grattafiori et al., The Llama 3 Herd of Models, 2024, section 3.3.2 and table 4"
_LLAMA_CUT: dict[str, Any] = {
    "tensor": 8, "pipeline": 16, "schedule": "interleaved", "chunks": 4, "microbatches": 16,
    "shard_optimizer": True, "stages": (1, *(2,) * 62, 1),
}  # fmt: skip


class Recipe(NamedTuple):
    """How a published model was trained.

    Attributes:
        model: name of the model.
        chips: kind and number.
        strategy: how the step was distributed; schedules that no room here has are the nearest.
        batch: sequences per step.
        sequence_length: tokens per sequence.
        seconds: of a step, as published.
        scatters: whether gradients are cut once a stage's last microbatch has gone backward.
        source: where.

    Example:
        >>> RECIPES["llama-3-405b"].strategy.chips
        16384
    """

    model: str
    chips: str
    strategy: Strategy
    batch: int
    sequence_length: int
    seconds: float
    scatters: bool
    source: str

    @property
    def prediction(self) -> Prediction:
        """Its step, as modelled."""
        return predict(
            self.model, self.chips, self.strategy, batch=self.batch,
            sequence_length=self.sequence_length,
        )  # fmt: skip

    def peak(self, strategy: Strategy) -> GpuPeak:
        """Memory of the GPU that holds most, with a program per stage and fused kernels."""
        config = model_of(self.model)
        sizes = self.batch, self.sequence_length
        return staged_peak(config, strategy, *sizes, scatters=self.scatters)


RECIPES = {
    "llama-3-405b": Recipe(
        "llama-3.1-405b", "h100:16384", Strategy(data=128, **_LLAMA_CUT), 2048, 8192, 6.721,
        True, _LLAMA,
    ),
    "llama-3-405b-long": Recipe(
        "llama-3.1-405b", "h100:16384", Strategy(data=8, context=16, **_LLAMA_CUT), 128, 131_072,
        15.278, True, _LLAMA,
    ),
    "deepseek-v3": Recipe(
        "deepseek-v3", "h800:2048",
        Strategy(
            data=128, pipeline=16, expert=64, shard_optimizer=True, schedule="dualpipe-v", chunks=2,
            microbatches=120, recompute="elementwise", products="float8", dispatch="by_host",
        ),
        15_360, 4096, 19.907, False,
        "DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, sections 1, 3.1 and 3.2",
    ),
}  # fmt: skip


@checked
def explain_recipe(name: str) -> str:
    """Predict a published recipe, and say in words what `plan` would choose instead, and why.

    Args:
        name: of `RECIPES`.

    Returns:
        The recipe's step beside the published one, what each of its choices gains or loses alone,
        and the plan with the part of the step that it shortens most.

    Cost: a search over all divisions of the chips: minutes for 16,384.

    Example:
        >>> print(explain_recipe("llama-4"))
        Traceback (most recent call last):
        ValueError: name must be one of 'llama-3-405b', 'llama-3-405b-long', ...; got 'llama-4'.
    """
    check_choice("name", name, RECIPES)
    recipe = RECIPES[name]
    found = recipe.prediction
    sizes: dict[str, Any] = {"batch": recipe.batch, "sequence_length": recipe.sequence_length}
    best = plan(recipe.model, found.cluster, **sizes, host=0.0, capacity=1.0).best
    return "\n".join(
        [*_own_words(recipe, found), *_choices(recipe, found), _instead(recipe, found, best)]
    )


def _fits(recipe: Recipe, found: Prediction) -> bool:
    return recipe.peak(found.strategy).total <= shown_bytes(found.cluster)


def _memory(recipe: Recipe, found: Prediction) -> str:
    total = in_words(recipe.peak(found.strategy).total, "bytes")
    return f"{total}, {'fits' if _fits(recipe, found) else 'does not fit'}"


def _own_words(recipe: Recipe, found: Prediction) -> list[str]:
    took, published = (in_words(each, "seconds") for each in (found.step_seconds, recipe.seconds))
    peak = recipe.peak(found.strategy)._asdict().items()
    parts = ", ".join(f"{name} {in_words(size, 'bytes')}" for name, size in peak if size)
    return [
        f"{recipe.model} on {recipe.chips}, {recipe.batch} x {recipe.sequence_length} tokens: "
        f"{found.strategy}",
        f"step {took} modelled, {published} published "
        f"({found.step_seconds / recipe.seconds - 1:+.0%})",
        "per chip with a program for every stage and fused kernels, modelled: "
        f"{_memory(recipe, found)} {in_words(shown_bytes(found.cluster), 'bytes')}: {parts}",
        f"source: {recipe.source}",
    ]


def _choices(recipe: Recipe, found: Prediction) -> list[str]:
    """What single choices of a recipe gain: the same without each."""
    others = {"shard_optimizer": False, "products": "bfloat16", "recompute": "layer"}
    lines = []
    for field, value in others.items():
        own = getattr(found.strategy, field)
        if own == value:
            continue
        changed = dataclasses.replace(found.strategy, **{field: value})
        other = dataclasses.replace(found, strategy=changed)
        seconds = in_words(abs(other.step_seconds - found.step_seconds), "seconds")
        more = "slower" if other.step_seconds > found.step_seconds else "faster"
        memory = _memory(recipe, other)
        lines.append(f"{field} {value} instead of {own}: {seconds} {more}, {memory}")
    return lines


def _instead(recipe: Recipe, found: Prediction, best: Prediction) -> str:
    took = in_words(best.step_seconds, "seconds")
    if _fits(recipe, found) and found.step_seconds <= best.step_seconds:
        return f"plan finds nothing faster: at best {best.strategy}, {took}, {why(best, found)}"
    share = 1 - best.step_seconds / found.step_seconds
    faster = f"{share:.0%} faster" if share > 0 else f"{-share:.0%} slower, but it fits"
    return (
        f"plan would choose {best.strategy}: {took}, {faster}, "
        f"{in_words(best.memory.total, 'bytes')} per chip; the recipe has {why(found, best)}"
    )
