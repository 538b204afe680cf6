"""Chunk-level recomputation: which layers of which chunks keep their activations, by stage."""

from collections.abc import Sequence

import numpy as np

from toolkit._checks import checked


@checked
def keep_layers(
    sizes: Sequence[float],
    again: Sequence[float],
    *,
    layers: int,
    in_flight: int,
    budget: float,
) -> tuple[tuple[int, ...], float]:
    """How many layers of each chunk a stage keeps, so that it computes least anew.

        min sum_j r_j (L - k_j)    with    sum over any n consecutive chunks of A_j k_j <= budget

    For chunks of one size the constraints are intervals, whose matrix is totally unimodular: with a
    whole budget / A the linear program has whole solutions, and it is solved as such. Chunks of
    different sizes take an integer program.

    Args:
        sizes: A_j, memory that one layer of chunk j keeps.
        again: r_j, seconds to compute one layer of it anew.
        layers: L, of the stage.
        in_flight: n, chunks that are in flight at once: p - i on stage i of p in 1F1B.
        budget: memory of the stage.

    Returns:
        (k_j of each chunk, seconds computed anew).

    Raises:
        ValueError: a number is out of range, or the solver fails; says why.

    Source: "InfiniPipe", 2025 (arXiv:2509.21275), stage-aware chunk-level checkpointing; the
        program is ours.

    Example:
        >>> keep_layers([1.0] * 4, [1, 1.3, 1.6, 1.9], layers=8, in_flight=4, budget=16)
        ((0, 0, 8, 8), 18.4)
    """
    from scipy.optimize import LinearConstraint, milp

    count = len(sizes)
    if not 1 <= count == len(again) or layers < 1 or in_flight < 1 or budget < 0:
        raise ValueError(
            f"sizes and again must be equally long, layers and in_flight at least 1 and budget not "
            f"negative; got {count}, {len(again)}, {layers}, {in_flight} and {budget}"
        )
    if min(sizes) <= 0 or min(again) < 0:
        raise ValueError("sizes must be positive and again not negative")
    width = min(in_flight, count)
    rows = np.zeros((count - width + 1, count))
    for start, row in enumerate(rows):
        row[start : start + width] = sizes[start : start + width]
    is_whole = len(set(sizes)) == 1 and float(budget / sizes[0]).is_integer()
    found = milp(
        -np.asarray(again, float),
        constraints=LinearConstraint(rows, -np.inf, budget),
        bounds=(0, layers),
        integrality=np.zeros(count) if is_whole else np.ones(count),
    )
    if found.x is None:
        raise ValueError(f"budget: got {budget}, and the solver found nothing: {found.message}")
    kept = tuple(round(value) for value in found.x)
    assert np.allclose(found.x, kept, atol=1e-6), "the constraints are not unimodular"
    return kept, round(sum(r * (layers - k) for r, k in zip(again, kept, strict=True)), 9)
