"""Gradient coding: the sum of all parts from any n - s of n workers (numpy, on the host).

Worker i computes the parts with a coefficient in row i of B [n, n] and sends B_i . G; weights a of
those that answered with a^T B = 1^T give the sum. In one program of SPMD a slow device delays every
collective, so that this is for jobs of separate processes, and no training path here.
"""

from collections.abc import Sequence

import numpy as np

from toolkit._checks import checked


def _check(workers: int, stragglers: int) -> None:
    if not 0 <= stragglers < workers:
        raise ValueError(f"stragglers: got {stragglers}, wanted 0 to {workers - 1}")


@checked
def repetition_code(workers: int, stragglers: int) -> np.ndarray:
    """Fractional repetition: groups of s + 1 workers compute the same s + 1 parts.

    What is recovered is the sum to the bit, as every weight is 0 or 1.

    Args:
        workers: number n.
        stragglers: number s that may be missing; s + 1 divides n.

    Returns:
        B [n, n].

    Cost: Each worker computes s + 1 of n parts.

    Source: Tandon et al., "Gradient coding", 2017, section 4.

    Example:
        >>> repetition_code(4, 1).tolist()[0]
        [1.0, 1.0, 0.0, 0.0]
    """
    _check(workers, stragglers)
    if workers % (stragglers + 1):
        raise ValueError(
            f"stragglers: got {stragglers}, wanted s + 1 to divide {workers} workers; "
            "`cyclic_code` takes any"
        )
    return np.kron(np.eye(workers // (stragglers + 1)), np.ones((stragglers + 1,) * 2))


@checked
def cyclic_code(
    workers: int, stragglers: int, *, seed: int = 0, condition: float = 1e3
) -> np.ndarray:
    """Cyclic repetition: worker i computes the parts i to i + s, for any s < n.

    Rows lie in the null space of a random H [s, n] with H 1 = 0. Weights may be large, so that
    float32 gradients lose digits: a code with weights above `condition` is refused.

    Args:
        workers: number n.
        stragglers: number s that may be missing.
        seed: of H.
        condition: the largest weight that decoding may need, over neighbouring stragglers.

    Returns:
        B [n, n].

    Source: Tandon et al., "Gradient coding", 2017, section 5.

    Example:
        >>> code = cyclic_code(7, 2)
        >>> bool(abs(decoding_weights(code, [0, 1, 2, 4, 6]) @ code - 1).max() < 1e-9)
        True
    """
    _check(workers, stragglers)
    if not stragglers:
        return np.eye(workers)
    h = np.random.default_rng(seed).normal(size=(stragglers, workers))
    h[:, -1] = -h[:, :-1].sum(axis=1)
    code = np.zeros((workers, workers))
    for worker in range(workers):
        parts = (worker + np.arange(stragglers + 1)) % workers
        code[worker, parts[0]] = 1
        code[worker, parts[1:]] = -np.linalg.solve(h[:, parts[1:]], h[:, parts[0]])
    worst = max(
        abs(
            decoding_weights(code, [w for w in range(workers) if (w - at) % workers >= stragglers])
        ).max()
        for at in range(workers)
    )
    if worst > condition:
        raise ValueError(
            f"condition: got {condition:g}, and this code decodes with weights up to {worst:.2g}; "
            "wanted another seed, or `repetition_code`"
        )
    return code


@checked
def decoding_weights(code: np.ndarray, answered: Sequence[int]) -> np.ndarray:
    """The weights a [n], zero for who did not answer, with a^T B = 1^T.

    Args:
        code: B [n, n].
        answered: the workers that answered.

    Returns:
        a [n].

    Example:
        >>> decoding_weights(repetition_code(4, 1), [1, 2, 3]).tolist()
        [0.0, 1.0, 1.0, 0.0]
    """
    weights, alive = np.zeros(len(code)), list(answered)
    is_repetition = bool(np.isin(code, (0, 1)).all())
    if is_repetition:  # the first of each group, so that nothing is rounded
        covered = np.zeros(len(code), bool)
        for worker in alive:
            if not (covered & (code[worker] > 0)).any():
                weights[worker], covered = 1, covered | (code[worker] > 0)
    else:
        weights[alive] = np.linalg.lstsq(code[alive].T, np.ones(len(code)), rcond=None)[0]
    if np.abs(weights @ code - 1).max() > 1e-6:
        raise ValueError(
            f"answered: got {len(alive)} of {len(code)} workers, whose parts do not make the sum; "
            "more are missing than the code allows"
        )
    return weights


@checked
def coded_load(
    workers: int, *,
    stragglers: int | None = None, burst: int = 1, window: int = 1, tolerated: int = 0,
    is_multiplexed: bool = False,
) -> float:  # fmt: skip
    """The share of all parts that a worker computes per round (modelled).

        within a round                   (s + 1) / n
        repeated where it failed         (s + 1) / n,  s = ceil(B lambda / (W - 1 + B))
        multiplexed over rounds          (lambda + 1) (W - 1 + B) / (n (B + (W - 1) (lambda + 1)))

    The last two are the sequential codes, for bursts of B rounds in windows of W rounds with at
    most lambda stragglers. `recovery_rounds` runs the first of them, `multiplexed_rounds` the last.

    Args:
        workers: number n.
        stragglers: number s that a code within a round tolerates; None for a sequential code.
        burst: rounds B.
        window: rounds W.
        tolerated: workers lambda.
        is_multiplexed: whether work is multiplexed over rounds (M-SGC), or repeated (SR-SGC).

    Returns:
        A share.

    Source: Krishnan et al., "Sequential gradient coding", 2022 (arXiv:2211.13802).

    Example:
        >>> coded_load(256, stragglers=15)
        0.0625
    """
    if stragglers is None and is_multiplexed:
        rounds = burst + (window - 1) * (tolerated + 1)
        return (tolerated + 1) * (window - 1 + burst) / (workers * rounds)
    if stragglers is None:
        stragglers = -(-burst * tolerated // (window - 1 + burst))
    _check(workers, stragglers)
    return (stragglers + 1) / workers


@checked
def recovery_rounds(is_late: np.ndarray, stragglers: int, burst: int) -> np.ndarray:
    """When each round's gradient is recovered by the sequential code that repeats (simulated).

    In round t a worker computes its coded part of gradient t; or, if gradient t - B lacks parts,
    those of the workers that owe one make it up, as many as are needed. With
    s = ceil(B lambda / (W - 1 + B)) all are recovered B rounds later at most, if in any W rounds at
    most lambda workers are late, each within B rounds in a row.

    Args:
        is_late: [rounds, workers], whose answer is not waited for.
        stragglers: number s that the code of every gradient tolerates.
        burst: rounds B after which a part is made up.

    Returns:
        For each gradient the round in which n - s parts of it are there, or -1.

    Source: Krishnan et al., "Sequential gradient coding", 2022 (arXiv:2211.13802), SR-SGC.

    Example:
        >>> import numpy as np
        >>> late = np.zeros((4, 4), bool)
        >>> late[1, :2] = True
        >>> recovery_rounds(late, 1, 1).tolist()  # the second gradient a round later
        [0, 2, 2, 3]
    """
    rounds, workers = is_late.shape
    _check(workers, stragglers)
    if burst < 1:
        raise ValueError(f"burst: got {burst}, wanted at least 1 round")
    needed, found = workers - stragglers, np.full(rounds, -1)
    arrived = np.zeros((rounds, workers), bool)
    for now in range(rounds):
        gradient, old = np.full(workers, now), max(now - burst, 0)
        if now >= burst and found[old] < 0:
            owing = np.flatnonzero(~arrived[old])
            gradient[owing[: needed - arrived[old].sum()]] = old
        on_time = np.flatnonzero(~is_late[now])
        arrived[gradient[on_time], on_time] = True
        for each in (old, now):
            if found[each] < 0 and arrived[each].sum() >= needed:
                found[each] = now
    return found


@checked
def multiplexed_rounds(
    is_late: np.ndarray, *, burst: int, window: int, tolerated: int
) -> tuple[np.ndarray, np.ndarray]:
    """When each round's gradient is recovered by the sequential code that multiplexes (simulated).

    Gradient t is W - 1 parts of size lambda + 1 for each worker alone, and B groups of n parts of
    size 1, coded for lambda stragglers. From round t on a worker computes its own parts one by one,
    then those that were late, and with none left, in round t + W - 1 + k, its coded part of group
    k. All are recovered W - 2 + B rounds later, under the condition of `recovery_rounds`.

    Args:
        is_late: [rounds, workers], whose answer is not waited for.
        burst: rounds B.
        window: rounds W.
        tolerated: workers lambda.

    Returns:
        (for each gradient the round in which it is whole, or -1; what a worker does in a round
        [rounds, workers, W - 1 + B] for gradient round - i: an own part 0 to W - 2, the coded part
        of group k as W - 1 + k, or -1 for none).

    Cost: The load of `coded_load(n, burst=B, window=W, tolerated=lambda, is_multiplexed=True)`.

    Source: Krishnan et al., "Sequential gradient coding", 2022 (arXiv:2211.13802), M-SGC.

    Example:
        >>> import numpy as np
        >>> late = np.zeros((5, 4), bool)
        >>> late[1, 2] = True
        >>> multiplexed_rounds(late, burst=1, window=2, tolerated=1)[0].tolist()
        [1, 2, 3, 4, -1]
    """
    rounds, workers = is_late.shape
    _check(workers, tolerated)
    if not 1 <= burst <= window:
        raise ValueError(f"burst: got {burst}, wanted 1 to {window}, the rounds of the window")
    parts, slots = window - 1, window - 1 + burst
    has = np.zeros((rounds, workers, parts), bool)
    coded = np.zeros((rounds, burst), int)
    found, work = np.full(rounds, -1), np.full((rounds, workers, slots), -1)
    for now in range(rounds):
        for slot in range(min(slots, now + 1)):
            gradient = now - slot
            for worker in range(workers):
                missing = np.flatnonzero(~has[gradient, worker])
                piece = slot if slot < parts or not len(missing) else missing[0]
                work[now, worker, slot] = piece
                if is_late[now, worker]:
                    continue
                if piece < parts:
                    has[gradient, worker, piece] = True
                else:
                    coded[gradient, piece - parts] += 1
            is_whole = has[gradient].all() and (coded[gradient] >= workers - tolerated).all()
            if is_whole and found[gradient] < 0:
                found[gradient] = now
    return found, work
