"""Answers to the exercises on the causality trap."""

from toolkit.lab.lessons.subjects.models.causality_trap import EMPTY


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
}
