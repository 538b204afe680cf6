"""Which cases of a test of the second tier are run by day, and which at night alone."""

from collections.abc import Collection, Iterable

import pytest


def by_night(waits: Collection, cases: Iterable) -> list:
    """All of these cases; what repeats on them the claim of the others waits for the night."""
    return [pytest.param(x, marks=pytest.mark.nightly) if x in waits else x for x in cases]
