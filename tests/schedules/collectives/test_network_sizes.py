"""A network that no memory holds is refused before its links are made."""

import pytest

from toolkit.schedules.collectives import (
    circulant,
    complete,
    degree_expansion,
    directed,
    fat_tree,
    gpu_boxes,
    hypercube,
    kautz,
    leaf_spine,
    mesh,
    mi250,
    ring,
    star,
    torus,
)

MANY = 10**12


@pytest.mark.parametrize(
    "make",
    [
        lambda: ring(MANY),
        lambda: mesh(MANY, 2),
        lambda: torus(MANY, MANY),
        lambda: hypercube(MANY),
        lambda: hypercube(40),
        lambda: complete(MANY),
        lambda: circulant(MANY, 1),
        lambda: star(MANY),
        lambda: leaf_spine(2, MANY, 1),
        lambda: fat_tree(MANY),
        lambda: gpu_boxes(MANY, 8, 300, 25),
        lambda: mi250(MANY),
        lambda: mi250(1, MANY),
        lambda: directed(MANY, 1),
        lambda: kautz(MANY, 6),
        lambda: degree_expansion(complete(3), MANY),
    ],
)
def test_too_many_links_are_refused(make):
    with pytest.raises(ValueError, match="links, wanted at most 1048576"):
        make()


def test_a_torus_of_many_chips_is_made():
    assert torus(32, 32).compute == 1024
