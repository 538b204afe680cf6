"""Requests that have a row, and what a step needs of them as arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.serving.prefixes import Lease
from toolkit.serving.programs import numbers_of
from toolkit.serving.requests import Progress, Request


@dataclass
class Active:
    """A request that has a row."""

    slot: int
    lease: Lease | None
    key: np.ndarray
    seen: np.ndarray
    cache: Any = None  # until the prompt is read
    token: Any = None  # of the last piece, on the device
    read: int = 0


def inputs_of_step(
    active: Mapping[int, Active], progress: Mapping[int, Progress], slots: int, vocabulary: int
) -> dict[str, Any]:
    """The last token, place and options of each row that writes; other rows are not active."""
    by_slot: list[Request | None] = [None] * slots
    token, position, count = (np.zeros(slots, np.int32) for _ in range(3))
    is_active, key = np.zeros(slots, bool), np.zeros((slots, 2), np.uint32)
    for number, own in active.items():
        if own.cache is not None:
            continue
        request, tokens = progress[number].request, progress[number].tokens
        by_slot[own.slot], count[own.slot] = request, len(tokens)
        token[own.slot], position[own.slot] = tokens[-1], len(request.prompt) + len(tokens) - 1
        is_active[own.slot], key[own.slot] = True, own.key
    return {
        "token": token,
        "position": position,
        "is_active": is_active,
        "how": numbers_of(by_slot, vocabulary),
        "key": key,
        "count": count,
    }
