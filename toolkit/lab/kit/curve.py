"""A curve through points, straight between them: what `curve_control` draws, as numbers."""

import numpy as np

Points = tuple[tuple[float, float], ...]


def heights_at(points: Points, places: np.ndarray) -> np.ndarray:
    """A curve's heights at places in [0, 1]."""
    return np.interp(places, *np.array(points).T)
