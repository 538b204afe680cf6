"""One way to put a quantity in words, for reports, tables, captions and ticks."""

import numpy as np
import pytest

from toolkit.measure import in_words, short


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (1.5, "seconds", "1.50 s"),
        (1.5e-3, "seconds", "1.50 ms"),
        (3e-6, "seconds", "3.00 µs"),
        (0.0, "seconds", "0 ns"),
        (7200, "seconds", "2.00 h"),
        (64 * 2**20, "bytes", "64.0 MiB"),
        (1023, "bytes", "1,023 B"),
        (2.5e12, "FLOP", "2.50 TFLOP"),
        (12_000, "tokens", "12,000 tokens"),
        (np.int64(3), "tokens", "3 tokens"),
        (0.5, "nats", "0.5 nats"),
        (12_345.6, "", "12,346"),
        (0.123456, "", "0.1235"),
        (1e30, "", "1e+30"),
        (0.0882, "share", "8.82%"),
        (1.0, "share", "100%"),
        (1.64, "times", "1.6×"),
        (8192.0, "times", "8,192×"),
    ],
)
def test_in_words(value: float, unit: str, words: str) -> None:
    assert in_words(value, unit) == words


def test_short_ticks() -> None:
    assert short(32768, "tokens") == "32k"
    assert short(1 << 20, "tokens") == "1M"
    assert short(1e-3, "seconds") == "1 ms"
    assert short(1e4, "seconds") == "10,000 s"
    assert short(2.0**30, "bytes") == "1 GiB"
