"""Answers to the exercises on what attention costs."""

import math


def merged(out_a, log_sum_a, out_b, log_sum_b):
    top = max(log_sum_a, log_sum_b)
    total = top + math.log(math.exp(log_sum_a - top) + math.exp(log_sum_b - top))
    a, b = math.exp(log_sum_a - total), math.exp(log_sum_b - total)
    return [a * x + b * y for x, y in zip(out_a, out_b, strict=True)], total


def merged_without_maximum(out_a, log_sum_a, out_b, log_sum_b):
    a, b = math.exp(log_sum_a), math.exp(log_sum_b)
    out = [(a * x + b * y) / (a + b) for x, y in zip(out_a, out_b, strict=True)]
    return out, math.log(a + b)


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
            (lambda a, la, b, lb: (merged(a, 0.0, b, 0.0)[0], la), "Both parts count alike"),
            (lambda a, la, b, lb: (merged(a, lb, b, la)[0], la), "not that of attention to all"),
            (lambda a, la, b, lb: (merged(a, la, b, lb)[0], la + lb), "its log-sum is not"),
            (lambda *parts: merged(*parts)[0], "return two things"),
            (lambda *parts: (merged(*parts)[0][:1], 0.0), "returned 1 numbers; wanted 3"),
            (merged_without_maximum, "take the maximum out"),
        ],
    ),
}
