"""Which page of the cache belongs to whom, and which beginnings of prompts are still there.

A page is free, read by some requests, or idle: read by none, but kept because it is known what is
in it. Known pages form chains: a page is found by its own tokens and all before them. When no page
is free, the page that has been idle the longest is forgotten, the end of a chain first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from toolkit._annotations import AtLeast
from toolkit._checks import checked


@dataclass
class Lease:
    """The pages of a request.

    Attributes:
        pages: their numbers in the order of the text.
        shared: how many of the first were known already.
        states: what the cache keeps beside the pages, where page `index` ends.

    Example:
        >>> Lease(pages=[3, 0], shared=1).pages
        [3, 0]
    """

    pages: list[int]
    shared: int
    states: dict[int, Any] = field(default_factory=dict)


class PageTable:
    """Numbers of pages and who refers to them; the arrays are in a `PagedCache`.

    Args:
        pages: how many there are.
        page: tokens of each.

    Source: Kwon et al., "PagedAttention", 2023 (arXiv:2309.06180), section 4; Zheng et al.,
        "SGLang", 2024 (arXiv:2312.07104), section 3, for prefixes that outlive their request.

    Example:
        >>> table = PageTable(pages=4, page=2)
        >>> table.reserve((5, 3, 8), length=3), table.available
        (Lease(pages=[0, 1, 2], shared=0, states={}), 1)
    """

    @checked
    def __init__(self, pages: Annotated[int, AtLeast(0)], page: Annotated[int, AtLeast(1)]) -> None:
        self.page, self.count = page, pages
        self.free = list(reversed(range(pages)))
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.readers = [0] * pages
        self.names: dict[int, bytes] = {}
        self.known: dict[bytes, int] = {}
        self.states: dict[int, Any] = {}
        self.forgotten = 0

    @property
    def available(self) -> int:
        """Pages that can be given away."""
        return len(self.free) + len(self.idle)

    def chain(self, prompt: Sequence[int], pages: int) -> list[bytes]:
        """Names of the first pages: digests of all tokens up to the end of each."""
        digest, names = hashlib.sha256(), []
        for index in range(pages):
            tokens = np.asarray(prompt[index * self.page : (index + 1) * self.page], np.int64)
            digest.update(tokens.tobytes())
            names.append(digest.digest())
        return names

    def reserve(self, prompt: Sequence[int], length: int) -> Lease | None:
        """Pages for a prompt and `length` more tokens, known ones first; None if there are too few.

        At least one token of the prompt is left to read, whose logits are wanted.
        """
        shared: list[int] = []
        for name in self.chain(prompt, (len(prompt) - 1) // self.page):
            if name not in self.known:
                break
            shared.append(self.known[name])
        wanted = -(-(len(prompt) + length) // self.page) - len(shared)
        if wanted > self.available - sum(number in self.idle for number in shared):
            return None
        for number in shared:
            self.idle.pop(number, None)
        own = [self._take() for _ in range(wanted)]
        for number in (*shared, *own):
            self.readers[number] += 1
        return Lease([*shared, *own], len(shared))

    def _take(self) -> int:
        if self.free:
            return self.free.pop()
        number, _ = self.idle.popitem(last=False)
        del self.known[self.names.pop(number)]
        self.states.pop(number, None)
        self.forgotten += 1
        return number

    def publish(self, lease: Lease, prompt: Sequence[int]) -> None:
        """The prompt is in its pages: others may refer to those that it fills."""
        for index, name in enumerate(self.chain(prompt, len(prompt) // self.page)):
            if index >= lease.shared and name not in self.known:
                number = lease.pages[index]
                self.known[name], self.names[number] = number, name
                self.states[number] = lease.states[index]

    def release(self, lease: Lease) -> None:
        """A request no longer needs its pages."""
        # The last page first, so that a chain is forgotten from its end.
        for number in reversed(lease.pages):
            self.readers[number] -= 1
            if self.readers[number]:
                continue
            if number in self.names:
                self.idle[number] = None
            else:
                self.free.append(number)

    def row(self, lease: Lease | None, width: int) -> np.ndarray:
        """A row of the table; pages that are not there have a number past the last."""
        pages = [] if lease is None else lease.pages
        return np.array([*pages, *[self.count] * (width - len(pages))], np.int32)
