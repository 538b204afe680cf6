"""Whether a run overfits: its validation loss rises while its training loss still falls.

    rise = mean(last 4) - mean(lowest and its neighbours) > 5 noise

The noise is that of a check, from the differences of successive ones. A validation loss that rises
together with the training loss is no overfitting, and so no reason to decay early. Of runs whose
validation loss only falls or stays, one in twenty is ended at most.
"""

import numpy as np

SURE = 5.0  # of noise: a lowest loss is picked, and looked for after every piece of a run
NORMAL_MEDIAN = 0.6745  # of the size of a normal number
RECENT = 4  # checks that must be above the lowest, a fifth of a run


def overfits_since(checks: np.ndarray) -> int | None:
    """The step of the lowest validation loss, if it has surely risen since; otherwise None.
    Checks are [checks, 3]: steps, training losses, validation losses.
    """
    steps, training, validation = checks.T
    if len(checks) <= RECENT or not np.isfinite(checks).all():
        return None
    lowest = int(validation.argmin())
    if len(checks) - 1 - lowest < RECENT or not training[-RECENT:].mean() < training[lowest]:
        return None
    around = validation[max(lowest - 1, 0) : lowest + 2]
    # The median, because the first checks fall steeply.
    noise = np.median(np.abs(np.diff(validation, 2))) / NORMAL_MEDIAN / 6**0.5
    rise = validation[-RECENT:].mean() - around.mean()
    is_sure = rise > SURE * noise * (1 / RECENT + 1 / len(around)) ** 0.5
    return int(steps[lowest]) if is_sure else None
