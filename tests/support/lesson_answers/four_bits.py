"""Answers to the exercises on gradients in few bits."""

import numpy as np


def error_feedback(gradients, memory, compress):
    given = gradients + memory
    sent = compress(given)
    return sent, given - sent


def changed(left=lambda p, g, m, sent: p - sent, given=lambda g, m: g + m):
    def feedback(gradients, memory, compress):
        p = given(gradients, memory)
        sent = compress(p)
        return sent, left(p, gradients, memory, sent)

    return feedback


def like(x, rows):
    return np.broadcast_to(x, rows.shape)


def decode(code, answered):
    weights = np.zeros(len(code))
    solved = np.linalg.lstsq(code[answered].T, np.ones(len(code)), rcond=None)
    weights[answered] = solved[0]
    return weights


def all_alike(code, answered):
    weights = np.zeros(len(code))
    weights[answered] = len(code) / len(answered)
    return weights


ANSWERS = {
    "error_feedback": (
        error_feedback,
        [
            (changed(lambda p, g, m, sent: g - sent), "not of the gradient"),
            (changed(lambda p, g, m, sent: like((p - sent).mean(0), p)), "averaged over devices"),
            (changed(lambda p, g, m, sent: like((p - sent)[0], p)), "out_specs=P()"),
            (changed(lambda p, g, m, sent: m + p - sent), "grows without end"),
            (changed(given=lambda g, m: g), "never sent"),
            (lambda g, m, compress: (compress(g), m), "something is lost"),
            (lambda g, m, compress: (g + m, 0 * g), "is not compress"),
            (lambda g, m, compress: g, "two things"),
            (lambda g, m, compress: (g[0], m), "wanted [4, 64]"),
        ],
    ),
    "decode": (
        decode,
        [
            (all_alike, "once"),
            (lambda code, answered: np.ones(8), "did not answer"),
            (lambda code, answered: np.ones(3), "wanted [8]"),
        ],
    ),
}
