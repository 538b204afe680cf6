"""What every form of context parallel attention refuses."""

from jaxtyping import Array


def check_attention(q: Array, k: Array, v: Array, sliding_window: int | None) -> None:
    """Self-attention: as many queries as keys, whole groups of heads, a window of 1 or none."""
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q, k, v do not fit: shapes {q.shape}, {k.shape}, {v.shape}")
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads: want a multiple of k's {k.shape[2]}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window={sliding_window}: want at least 1")
