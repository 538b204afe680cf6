"""Lesson 13, who goes where: routing by hand, what a capacity drops, a bias instead of a loss."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from toolkit.experts import route
from toolkit.figures import look
from toolkit.lab.experts.balance import STEPS, levelling
from toolkit.lab.experts.small_mixture import CHOSEN, EXPERTS, held_out_logits, kept_pairs
from toolkit.lab.lessons.drawing import draw_bars, draw_matrices, mark_guess
from toolkit.lab.lessons.outline import (
    Answer,
    Exercise,
    Outline,
    Question,
    Show,
    WrongAnswer,
    ask,
    ask_array,
)

GROUPS, CHOSEN_GROUPS, SCALE = 4, 2, 2.5
TOKENS, RATE = 24, 3e-3
MEANS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PER_EXPERT = 16


def _fullest() -> Answer:
    loads = {name: levelling(name, 2, RATE).loads[0] for name in ("plain", "balanced")}
    times = {name: float(own.max() / own.mean()) for name, own in loads.items()}
    return Answer(
        round(times["plain"], 2),
        f"{times['plain']:.2f} times (measured here, {int(loads['plain'].sum()):,} pairs of "
        "held-out text), and the emptiest has "
        f"{float(loads['plain'].min() / loads['plain'].mean()):.2f} times. Trained with a loss "
        f"that evens the loads it is {times['balanced']:.2f}.",
    )


def dropped_share(mean: float) -> float:
    """Share of pairs above the mean where an expert's pairs are Poisson, in per cent."""
    from scipy.stats import poisson

    counts = np.arange(int(mean + 12 * mean**0.5) + 20)
    return 100 * float((np.maximum(counts - mean, 0) * poisson.pmf(counts, mean)).sum() / mean)


def _even_drops() -> Answer:
    truth = dropped_share(PER_EXPERT)
    words = (
        f"{truth:.1f} per cent (computed: the excess of a Poisson number above its mean). Chance "
        f"alone fills experts unevenly. With 4 pairs expected it is {dropped_share(4):.0f} and "
        f"with 256 it is {dropped_share(256):.1f} per cent: small batches need room to spare."
    )

    def draw(figure: Figure, guess: float) -> None:
        axes = figure.add_axes((0.1, 0.18, 0.86, 0.74))
        axes.plot(MEANS, [dropped_share(mean) for mean in MEANS], **look("full").line)
        axes.plot([PER_EXPERT], [truth], "o", color=look("full").colour, markersize=10)
        mark_guess(axes, PER_EXPERT, guess, truth)
        axes.set_xscale("log", base=2)
        axes.set_xticks(MEANS, map(str, MEANS))
        axes.set(xlabel="pairs expected per expert", ylabel="dropped at capacity 1, %")
        axes.set_ylim(bottom=0)

    return Answer(truth, words, draw)


def _pairs_moved() -> Answer:
    of = levelling("plain", 2, RATE)
    truth = 100 * float(of.moved[-1])
    before, after = 1 + of.violation[[0, -1]]
    return Answer(
        truth,
        f"{truth:.0f} per cent (measured here). The fullest expert went from {before:.2f} to "
        f"{after:.2f} times an even load, and nothing but the bias has changed: in training the "
        "router and the experts learn with it.",
    )


def _dense(experts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The weight of every expert [tokens, experts], 0 for one that is not chosen."""
    found = np.zeros((len(experts), EXPERTS))
    np.put_along_axis(found, experts, weights, axis=1)
    return found


def _variant(
    logits: np.ndarray,
    bias: np.ndarray,
    *,
    is_softmax: bool = False,
    has_groups: bool = True,
    is_choice_biased: bool = True,
    weighs_bias: bool = False,
    is_softmax_after: bool = False,
    normalise: bool = True,
    scale: float = SCALE,
) -> np.ndarray:
    """Dense weights of the rule, or of a wrong one."""
    scores = 1 / (1 + np.exp(-logits))
    if is_softmax:
        scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    choice = scores + bias * is_choice_biased
    if has_groups:
        grouped = choice.reshape(len(logits), GROUPS, -1)
        best = grouped.sum(-1)
        floor = np.sort(best, axis=1)[:, -CHOSEN_GROUPS, None]
        choice = np.where((best >= floor)[..., None], grouped, -np.inf).reshape(choice.shape)
    experts = np.argsort(-choice, axis=1, kind="stable")[:, :CHOSEN]
    weights = np.take_along_axis(scores + bias * weighs_bias, experts, axis=1)
    if is_softmax_after:
        weights = np.exp(np.take_along_axis(logits, experts, axis=1))
    if normalise:
        weights = weights / weights.sum(1, keepdims=True)
    return _dense(experts, scale * weights)


_WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"is_softmax": True}, "These are softmax scores; here each expert has a sigmoid of its own."),
    (
        {"is_softmax_after": True},
        "The weights are a softmax over the chosen logits; wanted are the chosen sigmoids over "
        "their sum.",
    ),
    ({"normalise": False}, "The weights are not divided by their sum before they are scaled."),
    ({"weighs_bias": True}, "The bias weighs too; it may only choose."),
    (
        {"has_groups": False},  # the same as with groups scored by their largest, of which 2 win
        "Groups are ignored, or scored by their largest: a group's score is the sum of its two, "
        "and a token chooses from its two best groups alone.",
    ),
    ({"scale": 1.0}, "The weights of a token sum to 1; wanted is the scale, 2.5."),
    ({"is_choice_biased": False}, "The bias is not used: it must choose."),
)


def _judge_route(function: Callable[..., Any], show: Show) -> str:
    logits = held_out_logits("plain")[1, :TOKENS]
    bias = levelling("plain", 2, RATE).bias[-1]

    def asked(bias: np.ndarray) -> np.ndarray:
        value = ask(function, logits.copy(), bias)
        if not isinstance(value, tuple) or len(value) != 2:
            raise WrongAnswer("route must return two things: the experts and their weights.")
        shape = (TOKENS, CHOSEN)
        experts, weights = ask_array(lambda: value[0], shape), ask_array(lambda: value[1], shape)
        whole = experts.astype(int)
        if (whole != experts).any() or (whole < 0).any() or (whole >= EXPERTS).any():
            raise WrongAnswer(f"experts must be whole numbers from 0 to {EXPERTS - 1}.")
        if (np.diff(np.sort(whole, axis=1)) == 0).any():
            raise WrongAnswer("A token chose the same expert twice.")
        return _dense(whole, weights)

    how: dict[str, Any] = {"scores": "sigmoid", "groups": GROUPS, "chosen_groups": CHOSEN_GROUPS}
    routing = route(jnp.asarray(logits), CHOSEN, choice_bias=jnp.asarray(bias), scale=SCALE, **how)
    wanted = _dense(np.asarray(routing.experts), np.asarray(routing.weights))
    got = asked(bias)
    show(draw_matrices(got, wanted, xlabel="expert", ylabel="token"))
    near: dict[str, Any] = {"atol": 1e-4}
    if not np.allclose(got, wanted, **near):
        for changes, reason in _WRONG:
            if np.allclose(got, _variant(logits, bias, **changes), **near):
                raise WrongAnswer(reason)
        others = ((got > 0) != (wanted > 0)).any(1).sum()
        if others:
            raise WrongAnswer(f"{others} of {TOKENS} tokens go to other experts.")
        raise WrongAnswer("The experts are right, their weights are not.")
    if not np.allclose(asked(bias - 2), wanted, **near):
        raise WrongAnswer(
            "Right for this bias. But 2 less for every expert must change nothing, and does: an "
            "expert outside of the chosen groups needs -inf, not 0, where scores are negative."
        )
    return f"Right: the router of DeepSeek-V3, on {TOKENS} bytes and {EXPERTS} experts."


def _judge_kept(kept: Callable[..., Any], show: Show) -> str:
    logits = held_out_logits("plain")[1, : 2 * TOKENS]
    experts = np.argsort(-logits, axis=1, kind="stable")[:, :CHOSEN]
    even = experts.size // EXPERTS
    wanted, slots = kept_pairs(experts, 1, 1.0)
    got = ask_array(kept, experts.shape, experts.copy(), EXPERTS, slots)
    if not np.isin(got, (0, 1)).all():
        raise WrongAnswer("kept must return True or False for every pair.")
    got = got.astype(bool)
    counts = [np.bincount(experts[mask], minlength=EXPERTS).tolist() for mask in (got, wanted)]
    names = [f"expert {expert + 1}" for expert in range(EXPERTS)]
    show(draw_bars(names, counts[0], counts[1], xlabel=f"pairs kept, of {slots} slots"))
    most, least = max(counts[0]), min(np.subtract(counts[0], counts[1]))
    if most > slots:
        raise WrongAnswer(f"An expert with {slots} slots keeps {most} pairs.")
    if least < 0:
        raise WrongAnswer("An expert drops pairs while it has free slots.")
    if (got != wanted).any():
        later = np.flatnonzero((got & ~wanted).any(1))
        raise WrongAnswer(
            f"As many as wanted, but not the first: token {later[0]} is kept, and a token before "
            "it that chose the same expert is not. A token must not depend on later ones."
        )
    lost = (~wanted).sum()
    return f"Right: {lost} of {wanted.size} pairs are dropped at {even} slots, an even load."


def _judge_next_bias(next_bias: Callable[..., Any], show: Show) -> str:
    logits, bias = held_out_logits("plain")[1], levelling("plain", 2, RATE).bias[5]
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :CHOSEN].reshape(8, -1)
    loads = np.stack([np.bincount(part, minlength=EXPERTS) for part in chosen])
    total = loads.sum(0)
    change = np.sign(total.mean() - total)
    got = ask_array(next_bias, bias.shape, bias.copy(), loads.copy(), RATE)
    names = [f"expert {expert + 1}" for expert in range(EXPERTS)]
    show(draw_bars(
        names, (1000 * (got - bias)).tolist(), (1000 * RATE * change).tolist(),
        xlabel="change of the bias, thousandths",
    ))  # fmt: skip
    near: dict[str, Any] = {"atol": 1e-6}
    if np.allclose(got, bias + RATE * change, **near):
        return "Right: full experts lose, empty ones gain, all by the same step."
    each = np.sign(loads.mean(1, keepdims=True) - loads)
    for wrong, reason in (
        (bias - RATE * change, "Full experts gain: the sign is the wrong way round."),
        (bias + RATE * each.sum(0), "A step for every micro-batch: add the loads up first."),
        (bias + RATE * each.mean(0), "A step for every micro-batch: add the loads up first."),
        (RATE * change, "The old bias is lost: it must be added to."),
        (bias + RATE * (total.mean() - total), "Wanted is the sign alone, not the difference."),
    ):
        if np.allclose(got, wrong, **near):
            raise WrongAnswer(reason)
    raise WrongAnswer("The change is not the rate times a sign.")


OUTLINE = Outline(
    "Who goes where",
    questions=(
        Question(
            "fullest",
            "A small model with 8 experts in a layer, of which every byte passes 2, was trained on "
            "text without a loss that evens their loads. How many times an even load has the "
            "fullest expert of its second layer, on text that it has not seen?",
            _fullest,
            unit="times",
            low=1,
            high=4,
            seconds=3,
        ),
        Question(
            "even_drops",
            "A router is even: every expert is as likely as any other, and 16 pairs are expected "
            "for each. An expert takes 16 and no more (capacity 1). Which share of all pairs is "
            "dropped, in per cent?",
            _even_drops,
            unit="per cent",
            low=0,
            high=100,
            seconds=3,
        ),
        Question(
            "pairs_moved",
            f"A bias is added to the scores of the trained router for the choice alone, and moved "
            f"{STEPS} times by 0.003 against full experts. Which share of all pairs then goes to "
            "another expert than before, in per cent?",
            _pairs_moved,
            unit="per cent",
            low=0,
            high=100,
        ),
    ),
    exercises=(
        Exercise(
            "route",
            "The router of DeepSeek-V3: sigmoid scores, a bias that chooses, groups, weights that "
            "sum to a scale.",
            _judge_route,
            (
                "Four steps: scores; scores + bias; experts outside of the two best groups out; "
                "the two best that are left. Weights come from the first step.",
                "choice.reshape(tokens, 4, 2) has the groups; a group's score is the sum of its "
                "two, and np.argsort(-sums, axis=1)[:, :2] names the best groups.",
                "Put -inf where a group is not chosen, take experts = argsort(-choice)[:, :2], w = "
                "take_along_axis(scores, experts, 1), and return experts, 2.5 * w / w.sum(1).",
            ),
            minutes=15,
            seconds=5,
        ),
        Exercise(
            "kept",
            "Which pairs of tokens and experts are kept if an expert takes the first `slots` of "
            "them in the order of the tokens.",
            _judge_kept,
            (
                "Walk through the pairs in the order of the tokens and count for each expert.",
                "A pair is kept if its expert has taken fewer than `slots` before it.",
                "taken = zeros(count); for every token and choice: kept[t, j] = taken[e] < slots; "
                "taken[e] += 1.",
            ),
            minutes=10,
        ),
        Exercise(
            "next_bias",
            "The bias after a training step, from the loads in each of its micro-batches.",
            _judge_next_bias,
            (
                "Who has too much must be chosen less: its bias falls.",
                "Add up the loads of all micro-batches first; then compare with their mean.",
                "total = loads.sum(0); bias + rate * sign(total.mean() - total).",
            ),
            minutes=5,
        ),
    ),
)
