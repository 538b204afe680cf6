"""Answers to the exercises on numbers with fewer bits."""

import math


def to_int8(numbers):
    scale = max(map(abs, numbers)) / 127 or 1.0
    return [round(x / scale) for x in numbers], scale


def scaled(numbers, most=127, rounded=round):
    scale = max(map(abs, numbers)) / most or 1.0
    return [rounded(x / scale) for x in numbers], scale


def to_e4m3(x, least=-6, largest=448, rounded=round):
    if x == 0:
        return 0.0
    step = 2 ** (max(math.frexp(x)[1] - 1, least) - 3)
    return math.copysign(min(abs(rounded(x / step) * step), largest), x)


def to_blocks(numbers, size, most=127):
    out = []
    for start in range(0, len(numbers), size):
        block = numbers[start : start + size]
        step = 2 ** (math.frexp(max(map(abs, block)))[1] - 1 - 6)
        out += [max(-most, min(most, round(x / step))) * step for x in block]
    return out


def to_int8_blocks(numbers, size):
    out = []
    for start in range(0, len(numbers), size):
        codes, scale = to_int8(numbers[start : start + size])
        out += [code * scale for code in codes]
    return out


ANSWERS = {
    "to_int8": (
        to_int8,
        [
            (lambda numbers: scaled(numbers, 128), "eight bits hold -127 to 127"),
            (lambda numbers: scaled(numbers, 64), "uses all codes"),
            (lambda numbers: scaled(numbers, rounded=int), "round to the nearest"),
            (lambda numbers: scaled(numbers, rounded=float), "must be whole numbers"),
            (lambda numbers: to_int8(numbers)[0], "two things"),
            (
                lambda numbers: ([round(x * 127 / max(map(abs, numbers))) for x in numbers], 0.02),
                "ZeroDivisionError",
            ),
        ],
    ),
    "to_e4m3": (
        to_e4m3,
        [
            (lambda x: to_e4m3(x, largest=math.inf), "The largest is 448"),
            (lambda x: to_e4m3(x, least=-99), "Below 2^-6"),
            (lambda x: to_e4m3(x, rounded=lambda y: math.floor(y + 0.5)), "ties go to the even"),
            (lambda x: to_e4m3(x, rounded=int), "Steps are 2^(exponent - 3)"),
        ],
    ),
    "to_blocks": (
        to_blocks,
        [
            (lambda numbers, size: to_blocks(numbers, len(numbers)), "one exponent for all"),
            (to_int8_blocks, "a power of two"),
            (lambda numbers, size: to_blocks(numbers, size, 128), "at most 127"),
            (lambda numbers, size: numbers, "The step is 2^(e - 6)"),
            (lambda numbers, size: numbers[:3], "wanted 16"),
        ],
    ),
}
