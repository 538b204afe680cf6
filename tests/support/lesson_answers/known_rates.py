"""Answers to the exercise on a search whose answer is known."""

import numpy as np


def search_rate(loss, low, high, tries):
    """Golden section in the logarithm."""
    a, b = np.log(low), np.log(high)
    golden = (5**0.5 - 1) / 2
    left, right = b - golden * (b - a), a + golden * (b - a)
    f_left, f_right = loss(np.exp(left)), loss(np.exp(right))
    for _ in range(tries - 2):
        if f_left <= f_right:
            b, right, f_right = right, left, f_left
            left = b - golden * (b - a)
            f_left = loss(np.exp(left))
        else:
            a, left, f_left = left, right, f_right
            right = a + golden * (b - a)
            f_right = loss(np.exp(right))
    return np.exp(left if f_left <= f_right else right)


def grid(loss, rates):
    return rates[int(np.argmin([loss(rate) for rate in rates]))]


ANSWERS = {
    "search_rate": (
        search_rate,
        [
            (
                lambda loss, low, high, tries: grid(loss, np.linspace(low, high, tries)),
                "divide the range in its logarithm",
            ),
            (
                lambda loss, low, high, tries: grid(loss, np.geomspace(low, high, tries)),
                "spend what is left around it",
            ),
            (
                lambda loss, low, high, tries: grid(loss, np.geomspace(low, high, 100)),
                "12 tries were allowed",
            ),
            (lambda loss, low, high, tries: high, "it diverges"),
        ],
    ),
}
