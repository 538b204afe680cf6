"""The figure style: looks told apart without colour, quick pictures."""

import io

import numpy as np
import pytest
from PIL import Image

from toolkit.figures import LOOKS, Picture, look, new_figure, style, use_size


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


def test_a_size_for_a_room_enlarges_what_is_made_next() -> None:
    use_size("projector")
    try:
        assert new_figure(4, 3, dots_per_inch=100).canvas.get_width_height() == (600, 450)
    finally:
        use_size("page")
    assert new_figure(4, 3, dots_per_inch=100).canvas.get_width_height() == (400, 300)
    with pytest.raises(ValueError, match="size must be one of 'page', 'projector'"):
        use_size("wall")
