"""Searches of the learning rate that several tests look at, taken once."""

import functools

from toolkit.lab.lr.search_rounds import Search, Settings, begin, further_rounds


@functools.cache
def whole_search(settings: Settings) -> Search:
    """A search from beginning to end."""
    *_, whole = further_rounds(begin(settings))
    return whole
