"""Bytes of the ways to add sparse rows, side by side (modelled).

With density d, the share of the V rows of width W that one replica touches, and union(j), the share
that j replicas touch together:

    dense        2 (D-1)/D V row                                                    ring
    gather       (D-1) d V (row + 4)                                                all rows
    hierarchy    sum_{i < log2 D} union(2^i) V (row + 4)                            SparCML
    partitioned  (D-1)/D (s d V (row + 4) + s' union(D) V (row + 4))                servers
    blocks       the same, of blocks that are sent if any of their rows is touched  OmniReduce
    rows         (D-1)/D (s d V (row + 4) + s' union(D) V row + V / 8)              Zen

where row = 4 W bytes, and s, s' are the largest owner's part over the mean in push and pull.
"""

from collections.abc import Callable

from toolkit._checks import check_choice, checked

SCHEMES = ("dense", "gather", "hierarchy", "partitioned", "blocks", "rows")
Union = Callable[[int], float]


def independent(density: float) -> Union:
    """The union of replicas that touch rows independently: 1 - (1 - d)^j."""
    return lambda replicas: 1 - (1 - density) ** replicas


@checked
def row_bytes(
    scheme: str, devices: int, rows: int, width: int, density: float, *,
    union: Callable[[int], float] | None = None, push_skew: float = 1.0, pull_skew: float = 1.0,
    block: int = 8,
) -> float:  # fmt: skip
    """Bytes that a device sends to add sparse rows of float32, by a scheme of the taxonomy.

    Args:
        scheme: "dense", "gather", "hierarchy", "partitioned", "blocks" or "rows".
        devices: replicas D.
        rows: rows of the table V.
        width: numbers per row W.
        density: share of the rows that one replica touches.
        union: share that a number of replicas touch together; None: they touch independently.
        push_skew: largest part of an owner over the mean, of what replicas push.
        pull_skew: the same of what they pull.
        block: rows per block of "blocks", touched independently.

    Returns:
        Bytes (modelled).

    Source: Wang et al., Zen, OSDI 2025, for the taxonomy; the formulas are counted here.

    Example:
        >>> round(row_bytes("rows", 16, 4096, 1, 0.01) / (4 * 4096), 4)
        0.1873
    """
    check_choice("scheme", scheme, SCHEMES)
    if not 0 <= density <= 1:
        raise ValueError(f"density: got {density}, wanted 0 to 1")
    union = union or independent(density)
    row, share = 4 * width, (devices - 1) / devices
    if scheme == "dense":
        return 2 * share * rows * row
    if scheme == "gather":
        return (devices - 1) * density * rows * (row + 4)
    if scheme == "hierarchy":
        if devices & (devices - 1):
            raise ValueError(f"devices: got {devices}, wanted a power of two for 'hierarchy'")
        levels = range(devices.bit_length() - 1)
        return sum(union(2**level) for level in levels) * rows * (row + 4)
    if scheme == "blocks":
        own, all_of = (1 - (1 - share) ** block for share in (density, union(devices)))
        per_row = row + 4 / block
        return share * rows * per_row * (push_skew * own + pull_skew * all_of)
    pushed, pulled = push_skew * density, pull_skew * union(devices)
    if scheme == "partitioned":
        return share * rows * (row + 4) * (pushed + pulled)
    return share * rows * (pushed * (row + 4) + pulled * row + 1 / 8)


@checked
def dense_crossover(
    scheme: str, devices: int, width: int, *, push_skew: float = 1.0, pull_skew: float = 1.0
) -> float:
    """The density above which a dense all-reduce sends less (modelled, independent replicas).

    Args:
        scheme: as for `row_bytes`, like all others.
        devices: replicas D.
        width: numbers per row W.
        push_skew: largest part over the mean in the push.
        pull_skew: the same in the pull.

    Returns:
        A density; 1 where sparse rows always send less.

    Example:
        >>> round(dense_crossover("gather", 8, 512), 4)
        0.2495
    """

    def is_sparse_better(density: float) -> bool:
        of = scheme, devices, 1024, width, density
        sparse = row_bytes(*of, push_skew=push_skew, pull_skew=pull_skew)
        return sparse < row_bytes("dense", devices, 1024, width, density)

    low, high = 0.0, 1.0
    if is_sparse_better(high):
        return high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if is_sparse_better(middle) else (low, middle)
    return low
