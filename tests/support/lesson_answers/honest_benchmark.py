"""Answers to the exercises on honest benchmarks."""

import time

import numpy as np


def samples_of(program, calls=11, warmup=1, is_waiting=True):
    found = []
    for count in range(warmup + calls):
        start = time.perf_counter()
        result = program()
        if is_waiting:
            result.block_until_ready()
        if count >= warmup:
            found.append(time.perf_counter() - start)
    return found


def in_turns(a, b):
    rounds = [(samples_of(a, 1, 0), samples_of(b, 1, 0)) for _ in range(12)]
    one, other = np.median(rounds, axis=(0, 2))
    return one / other


def quartiles_apart(a, b):
    return np.quantile(a, 0.75) < np.quantile(b, 0.25)


ANSWERS = {
    "seconds_per_call": (
        lambda program: np.median(samples_of(program)),
        [
            (lambda program: np.median(samples_of(program, is_waiting=False)), "Wait for it"),
            (lambda program: np.mean(samples_of(program, warmup=0)), "first call compiles"),
            (lambda program: samples_of(program, 1)[0], "called 2 times"),
            (lambda program: 0.004, "never called"),
        ],
    ),
    "speedup": (
        in_turns,
        [
            (lambda a, b: np.median(samples_of(a)) / np.median(samples_of(b)), "in turns"),
            (lambda a, b: samples_of(a, 1)[0] / samples_of(b, 1)[0], "five each at least"),
            (lambda a, b: 2 * in_turns(a, b), "take medians"),
        ],
    ),
    "is_faster": (
        quartiles_apart,
        [
            (lambda a, b: np.median(a) < np.median(b), "look at the spread"),
            (lambda a, b: quartiles_apart(b, a), "less time is faster"),
            (lambda a, b: max(a) < 0.5 * min(b), "too careful"),
        ],
    ),
}
