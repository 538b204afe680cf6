"""The figure style: words for numbers, looks told apart without colour, quick pictures."""

import io

import numpy as np
import pytest
from PIL import Image

from toolkit.figures import LOOKS, Picture, in_words, look, new_figure, short, style


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (1.5e-3, "seconds", "1.50 ms"),
        (0.0, "seconds", "0 ns"),
        (7200, "seconds", "2.00 h"),
        (64 * 2**20, "bytes", "64.0 MiB"),
        (1023, "bytes", "1,023 B"),
        (2.5e12, "FLOP", "2.50 TFLOP"),
        (12_000, "tokens", "12,000 tokens"),
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


def test_looks_differ_in_more_than_colour() -> None:
    assert len({str(one.dashes) for one in LOOKS.values()}) == len(LOOKS)
    assert len({one.marker for one in LOOKS.values()}) == len(LOOKS)
    assert look("unheard of") == look("unheard of")


def test_picture_moves_only_what_it_is_told() -> None:
    with style():
        figure = new_figure(3, 2)
        axes = figure.subplots()
        axes.set_ylim(0, 1)
        (line,) = axes.plot([0, 1], [0.2, 0.2])
    picture = Picture(figure, [line])
    first = picture.png()
    line.set_ydata([0.8, 0.8])
    moved = picture.png()
    assert picture.png() == moved != first
    axes.set_ylim(0, 2)  # what stands still has changed
    assert picture.png() != moved
    axes.set_ylim(0, 1)
    assert picture.png() == moved
    line.set_ydata([0.2, 0.2])
    assert picture.png() == first
    assert np.asarray(Image.open(io.BytesIO(first))).shape == (260, 390, 3)


def test_style_leaves_the_users_settings_alone() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    with style():
        pass
    assert dict(matplotlib.rcParams) == before
