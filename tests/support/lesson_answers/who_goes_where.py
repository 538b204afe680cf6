"""Answers to the exercises on who goes where."""

import numpy as np


def route(logits, bias, *, outside=-np.inf, best=2, groups=True, weigh=0.0, scale=2.5):
    scores = 1 / (1 + np.exp(-logits))
    choice = scores + bias
    if groups:
        sums = np.sort(choice.reshape(len(logits), 4, 2), axis=2)[..., -best:].sum(axis=2)
        chosen = np.argsort(-sums, axis=1)[:, :2]
        is_chosen = (chosen[..., None] == np.arange(4)).any(axis=1)
        choice = np.where(np.repeat(is_chosen, 2, axis=1), choice, outside)
    experts = np.argsort(-choice, axis=1)[:, :2]
    weights = np.take_along_axis(scores + weigh * bias, experts, axis=1)
    return experts, scale * weights / weights.sum(axis=1, keepdims=True)


def softmax_before(logits, bias):
    """Softmax scores where the family has sigmoids."""
    odds = np.exp(logits)
    share = odds / odds.sum(axis=1, keepdims=True)
    return route(np.log(share / (1 - share)), bias)


def softmax_after(logits, bias):
    experts, _ = route(logits, bias)
    odds = np.exp(np.take_along_axis(logits, experts, axis=1))
    return experts, 2.5 * odds / odds.sum(axis=1, keepdims=True)


def not_normalised(logits, bias):
    experts, _ = route(logits, bias)
    return experts, 2.5 / (1 + np.exp(-np.take_along_axis(logits, experts, axis=1)))


def kept(experts, count, slots):
    taken, found = np.zeros(count, int), np.zeros(experts.shape, bool)
    for token, choices in enumerate(experts):
        for place, expert in enumerate(choices):
            found[token, place] = taken[expert] < slots
            taken[expert] += 1
    return found


def last_ones(experts, count, slots):
    return kept(experts[::-1], count, slots)[::-1]


def first_choices_first(experts, count, slots):
    """All first choices before any second one, as if later tokens were known."""
    return kept(experts.T.reshape(-1, 1), count, slots).reshape(2, -1).T


def next_bias(bias, loads, rate):
    total = loads.sum(axis=0)
    return bias + rate * np.sign(total.mean() - total)


def by_micro_batch(bias, loads, rate):
    return bias + rate * np.sign(loads.mean(axis=1, keepdims=True) - loads).sum(axis=0)


def by_difference(bias, loads, rate):
    total = loads.sum(axis=0)
    return bias + rate * (total.mean() - total)


ANSWERS = {
    "route": (
        route,
        [
            (softmax_before, "These are softmax scores"),
            (softmax_after, "a softmax over the chosen logits"),
            (not_normalised, "not divided by their sum"),
            (lambda z, b: route(z, b, weigh=1.0), "The bias weighs too"),
            (lambda z, b: route(z, b, groups=False), "Groups are ignored"),
            (lambda z, b: route(z, b, best=1), "or scored by their largest"),
            (lambda z, b: route(z, b, scale=1.0), "sum to 1"),
            (lambda z, b: route(z, 0 * b), "The bias is not used"),
            (lambda z, b: route(z, b, outside=0), "needs -inf, not 0"),
            (lambda z, b: route(-z, b), "go to other experts"),
            (lambda z, b: (route(z, b)[0], route(z, b)[1][:, ::-1]), "weights are not"),
            (lambda z, b: route(z, b)[0], "two things"),
            (lambda z, b: (0 * route(z, b)[0], route(z, b)[1]), "the same expert twice"),
            (lambda z, b: (9 + route(z, b)[0], route(z, b)[1]), "from 0 to 7"),
        ],
    ),
    "kept": (
        kept,
        [
            (lambda e, n, s: np.ones(e.shape, bool), "keeps"),
            (lambda e, n, s: kept(e, n, s + 1), "slots keeps"),
            (lambda e, n, s: kept(e, n, s - 1), "free slots"),
            (last_ones, "not the first"),
            (first_choices_first, "not the first"),
            (lambda e, n, s: 2 * kept(e, n, s), "True or False"),
            (lambda e, n, s: kept(e, n, s)[:, 0], "wanted [48, 2]"),
        ],
    ),
    "next_bias": (
        next_bias,
        [
            (lambda b, n, r: next_bias(b, n, -r), "wrong way round"),
            (by_micro_batch, "add the loads up first"),
            (by_difference, "the sign alone"),
            (lambda b, n, r: next_bias(0 * b, n, r), "old bias is lost"),
            (lambda b, n, r: b, "not the rate times a sign"),
        ],
    ),
}
