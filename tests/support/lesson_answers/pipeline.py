"""Answers to the exercises on pipeline schedules."""

import math


def one_f_one_b(device, devices, microbatches, ahead=None):
    ahead = min(devices - 1 - device, microbatches) if ahead is None else ahead
    order = [("F", i) for i in range(ahead)]
    for i in range(ahead, microbatches):
        order += [("F", i), ("B", i - ahead)]
    return order + [("B", i) for i in range(microbatches - ahead, microbatches)]


def split(device, devices, microbatches, waiting=None):
    waiting = device if waiting is None else waiting
    order, done = [], 0
    for kind, i in one_f_one_b(device, devices, microbatches):
        order.append(("F" if kind == "F" else "I", i))
        if kind == "B" and i - done >= waiting:
            order.append(("W", done))
            done += 1
    return order + [("W", i) for i in range(done, microbatches)]


def all_forwards_first(device, devices, microbatches):
    return [(kind, i) for kind in "FB" for i in range(microbatches)]


def one_at_a_time(device, devices, microbatches):
    return [(kind, i) for i in range(microbatches) for kind in "FB"]


ANSWERS = {
    "microbatches_for": (
        lambda p, b: math.ceil((p - 1) * (1 - b) / b),
        [
            (lambda p, b: p - 1, "leave a bubble of"),
            (lambda p, b: 100 * p, "fewer than 200"),
            (lambda p, b: math.floor((p - 1) * (1 - b) / b), "10 are the fewest"),
            (lambda p, b: 0.5, "no number of microbatches"),
        ],
    ),
    "one_f_one_b": (
        one_f_one_b,
        [
            (all_forwards_first, "device 0 holds 8 microbatches"),
            (one_at_a_time, "takes 96"),
            (lambda *sizes: one_f_one_b(*sizes)[:-1], "B7@0 is missing"),
            (lambda *sizes: one_f_one_b(*sizes)[::-1], "waits for ever"),
            (lambda d, p, m: one_f_one_b(d, p, m, 3), "hold 4, 4, 4, 4"),
            (lambda *sizes: ["F0"], "wanted pairs such as"),
        ],
    ),
    "beat": (
        split,
        [
            (
                lambda d, p, m: [(kind, i) for i in range(m) for kind in "FIW"],
                "no earlier than 1F1B",
            ),
            (lambda d, p, m: split(d, p, m, min(d, 1)), "is possible in the same memory"),
            (
                lambda d, p, m: [(kind, i) for kind in "FIW" for i in range(m)],
                "activations of 8 microbatches",
            ),
            (one_f_one_b, "has ('B', 0)"),
        ],
    ),
}
