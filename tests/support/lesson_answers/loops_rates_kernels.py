"""Answers to the exercises on loops, learning rates and kernels."""

import jax.numpy as jnp
import numpy as np

from toolkit.lab.lessons.subjects.loops_rates_kernels.causality_trap import EMPTY


def sees_future(model, x):
    for t in range(1, len(x)):
        changed = x.copy()
        changed[t:] += 1
        if (model(changed)[:t] != model(x)[:t]).any():
            return True
    return False


def last_token_only(model, x, seen=slice(None, -1), tolerance=0.0):
    changed = x.copy()
    changed[-1] += 1
    return bool((abs(model(changed)[seen] - model(x)[seen]) > tolerance).any())


def loose(model, x):
    for t in range(1, len(x)):
        changed = x.copy()
        changed[t:] += 1
        if (abs(model(changed)[:t] - model(x)[:t]) > 0.01).any():
            return True
    return False


def decode(step, x_t, states):
    for n, state in enumerate(states):
        x_t, states[n] = step(x_t, state)
    return x_t, states


def one_state(step, x_t, states):
    state = states[0]
    for _ in states:
        x_t, state = step(x_t, state)
    return x_t, [state] * len(states)


def forgetful(step, x_t, states):
    for state in states:
        x_t, _ = step(x_t, state)
    return x_t, states


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


def softmax_kernel(x_ref, out_ref):
    x = x_ref[...]
    e = jnp.exp(x - x.max(axis=-1, keepdims=True))
    out_ref[...] = e / e.sum(axis=-1, keepdims=True)


def reads_thrice(x_ref, out_ref):
    e = jnp.exp(x_ref[...] - x_ref[...].max(axis=-1, keepdims=True))
    out_ref[...] = e / jnp.exp(x_ref[...] - x_ref[...].max(axis=-1, keepdims=True)).sum(
        axis=-1, keepdims=True
    )


def overflowing(x_ref, out_ref):
    e = jnp.exp(x_ref[...])
    out_ref[...] = e / e.sum(axis=-1, keepdims=True)


def whole_block(x_ref, out_ref):
    e = jnp.exp(x_ref[...] - x_ref[...].max())
    out_ref[...] = e / e.sum()


def not_divided(x_ref, out_ref):
    out_ref[...] = jnp.exp(x_ref[...])


ANSWERS = {
    "sees_future": (
        sees_future,
        [
            (lambda model, x: True, "“one loop” is causal"),
            (lambda model, x: model(x) != x, "wanted True or False"),
            (lambda model, x: False, "Change a token and look at the outputs before it"),
            (lambda model, x: last_token_only(model, x, seen=slice(None)), "where its own token"),
            (
                lambda model, x: last_token_only(model, x, seen=slice(0, 1)),
                "“looks one token ahead” sees the future",
            ),
            (last_token_only, "Change tokens at every place"),
            (loose, "A thousandth is a leak"),
        ],
    ),
    "decode": (
        decode,
        [
            (one_state, "one state for all loops"),
            (forgetful, "The states come back empty"),
            (
                lambda step, x_t, states: (
                    (made := step(x_t, states[0]))[0],
                    [made[1], EMPTY, EMPTY],
                ),
                "That is one loop",
            ),
            (lambda step, x_t, states: step(x_t, states[0]), "a list of states"),
            (
                lambda step, x_t, states: (x_t, states[:1]),
                "returned 1 states; wanted 3",
            ),
            (lambda step, x_t, states: decode(step, x_t, states)[0], "two things"),
        ],
    ),
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
    "softmax_kernel": (
        softmax_kernel,
        [
            (reads_thrice, "reads and writes of the block are 4 and 1"),
            (overflowing, "subtract the largest"),
            (whole_block, "those of a row are to"),
            (not_divided, "wanted 1 each"),
            (lambda x_ref, out_ref: None, "leaves out_ref as it was"),
            (lambda x_ref: None, "raised"),
        ],
    ),
}
