"""Answers to the exercises on what attention costs."""

import numpy as np


def merged(out_a, log_sum_a, out_b, log_sum_b):
    total = np.logaddexp(log_sum_a, log_sum_b)
    return np.exp(log_sum_a - total) * out_a + np.exp(log_sum_b - total) * out_b, total


def merged_without_maximum(out_a, log_sum_a, out_b, log_sum_b):
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = np.exp(log_sum_a), np.exp(log_sum_b)
        return (a * out_a + b * out_b) / (a + b), np.log(a + b)


ANSWERS = {
    "score_flops": (
        lambda n, h, d: 2 * n * (n + 1) * h * d,
        [
            (lambda n, h, d: 4 * n * h * d, "Four times the context"),
            (lambda n, h, d: 2 * n * (n + 1) * d, "Twice the heads"),
            (lambda n, h, d: 2 * n * (n + 1) * h, "Twice the channels"),
            (lambda n, h, d: n * (n + 1) * h * d, "Half of it"),
            (lambda n, h, d: 4 * n * n * h * d, "not at the future"),
            (lambda n, h, d: 2 * n * n * h * d, "the size is 0.9998 times ours"),
        ],
    ),
    "longest_context": (
        lambda m, layers, h, d, b: m // (2 * layers * h * d * b),
        [
            (lambda m, layers, h, d, b: m // (layers * h * d * b), "a key and a value"),
            (lambda m, layers, h, d, b: m // (2 * h * d * b), "more than the"),
            (lambda m, layers, h, d, b: m // (4 * layers * h * d * b), "one more would fit"),
            (lambda m, layers, h, d, b: m / (2 * layers * h * d * b), "tokens come whole"),
        ],
    ),
    "merge": (
        merged,
        [
            (lambda a, la, b, lb: ((a + b) / 2, np.logaddexp(la, lb)), "Both parts count alike"),
            (lambda a, la, b, lb: (a + b, np.logaddexp(la, lb)), "not that of attention to all"),
            (lambda a, la, b, lb: (merged(a, la, b, lb)[0], la + lb), "its log-sum is not"),
            (lambda *parts: merged(*parts)[0], "return two things"),
            (lambda *parts: (merged(*parts)[0][:1], 0.0), "returned shape [1]; wanted [3]"),
            (merged_without_maximum, "take the maximum out"),
        ],
    ),
}
