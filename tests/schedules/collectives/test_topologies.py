"""Networks as data: those of the field, JSON, and what is refused."""

from fractions import Fraction

import pytest

from toolkit.schedules.collectives import (
    Topology,
    circulant,
    fat_tree,
    hypercube,
    leaf_spine,
    mesh,
    named_topology,
    read_topology,
    ring,
    torus,
    tpu_slice,
)

NAMES = [
    "ring:8", "path:5", "mesh:2x3", "torus:4x4", "torus:2x4", "twisted-torus:4x8", "hypercube:3",
    "complete:5", "star:8", "leaf-spine:2x4x1", "fat-tree:4", "dgx1", "a100:2x8", "h100:16",
    "mi250:2x16", "mi250:2x8", "gb200:72", "gb200:2x72", "v4:4x4x4", "v5e:4x4", "v5e:16x16",
    "v5p:4x4x4", "v6e:8x16", "2*v5e:4x4", "mi300x:8", "a10g:4",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_networks_of_the_field_survive_json(name):
    network = named_topology(name)
    again = read_topology(network.to_json())
    assert (again.labels, again.compute, again.links) == (
        network.labels, network.compute, network.links,
    )  # fmt: skip
    assert again.seconds == network.seconds


def test_rates_are_those_of_the_chips_table():
    assert named_topology("a100:2x8").ingress[0] == 325
    assert named_topology("gb200:72").ingress[0] == 900
    assert named_topology("h100:16").ingress[0] == 500
    assert set(tpu_slice("v5p", (4, 4, 4)).links.values()) == {90}
    assert set(tpu_slice("v4", (4, 4, 4)).ingress) == {6 * 45}
    assert max(tpu_slice("v5e", (4, 4), slices=2).ingress) == 4 * 45 + Fraction(25, 8)


def test_slices_are_closed_where_the_pod_closes_them():
    assert tpu_slice("v5e", (4, 4)).links == mesh(4, 4, rate=45).links
    assert tpu_slice("v5e", (16, 16)).links == torus(16, 16, rate=45).links
    assert tpu_slice("v4", (4, 4, 4)).links == torus(4, 4, 4, rate=45).links
    assert tpu_slice("v4", (2, 2, 4)).links == mesh(2, 2, 4, rate=45).links
    assert min(tpu_slice("v6e", (8, 16)).ingress) == 3 * 90


def test_a_twist_changes_which_nodes_are_joined_and_keeps_every_degree():
    plain, twisted = torus(4, 8), torus(4, 8, twist=4)
    assert plain.links != twisted.links
    assert set(twisted.ingress) == set(plain.ingress) == {4}


def test_symmetries_leave_one_node_of_each_class():
    for network in (ring(7), torus(3, 4), hypercube(4), circulant(9, 1, 2), torus(4, 8, twist=4)):
        assert network.representatives == (0,)
    assert named_topology("a100:2x8").representatives == (0,)
    assert len(named_topology("mi250:2x16").representatives) == 16
    assert leaf_spine(2, 4, 1).representatives == (0,)
    assert len(fat_tree(4).representatives) == 16


def cables(*pairs, rate=Fraction(1)):
    return {link: rate for a, b in pairs for link in ((a, b), (b, a))}


@pytest.mark.parametrize(
    ("labels", "compute", "links", "complaint"),
    [
        ("ab", 2, {(0, 1): Fraction(1)}, "no links lead to 'a' from 'b'"),
        ("abcd", 4, cables((0, 1), (2, 3)), "no links lead from 'a' to 'c'"),
        ("ab", 2, cables((0, 1), rate=Fraction(0)), "link a->b: rate must be above 0"),
        ("ab", 2, {**cables((0, 1)), (1, 1): Fraction(1)}, "from 'b' to itself"),
        ("aa", 2, cables((0, 1)), "two nodes have the name 'a'"),
        ("abs", 2, {**cables((0, 2)), (2, 1): Fraction(2), (1, 2): Fraction(1)},
         "switch 's' is unbalanced: 2 GB/s in, 3 out"),
        ("as", 1, cables((0, 1)), "at least 2 compute nodes; got 1"),
        ("ab", 2, {**cables((0, 1)), (1, 2): Fraction(1)}, "link 1->2 leads to no node"),
    ],
)  # fmt: skip
def test_bad_networks_are_refused_in_one_line(labels, compute, links, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        Topology("bad", tuple(labels), compute, links)
    assert "\n" not in str(caught.value)


def test_a_wrong_symmetry_is_refused():
    with pytest.raises(ValueError, match="symmetry"):
        Topology("bad", ("a", "b", "c"), 3, cables((0, 1), (1, 2)), ((1, 2, 0),))


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("rings:8", "write for instance ring"),
        ("ring", "a kind, a colon and a shape"),
        ("ring:0", "2 nodes or more"),
        ("h100:9", "whole boxes"),
        ("v5e:4x4x4", "at most 2 axes"),
        ("v5e:32x32", "256 chips"),
        ("star:2x2x2x2", "another number of sizes"),
        ("fat-tree:3", "even number"),
    ],
)
def test_bad_names_are_refused_in_one_line(name, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        named_topology(name)
    assert "\n" not in str(caught.value)


def test_json_names_what_is_wrong_with_it(tmp_path):
    file = tmp_path / "mine.json"
    for text, complaint in (
        ("[1, 2]", "want nodes with id"),
        ('{"nodes": [{"id": "a"}], "links": [{"src": "a", "dst": "b", "rate": 1}]}', "'b', which"),
        ('{"nodes": [{"id": "a", "kind": "x"}], "links": []}', "'a' is a 'x'"),
        ('{"nodes": [{"id": "a"}, {"id": "b"}], "links": [{"src": "a", "dst": "b", "rate": 0}]}',
         "rate must be above 0; got 0"),
        ('{"nodes": [{"id": "a"}, {"id": "b"}], "links": [{"src": "a", "dst": "b", "rate": "x"}]}',
         "a number or a fraction"),
        ('{"nodes": [{"id": "a"}, {"id": "b"}], "links": [{"src": "a", "dst": "b", "rate": NaN}]}',
         "a number or a fraction"),
        ('{"nodes": [{"id": "a"}, {"id": "b"}], "links": [{"src": "a", "dst": "b", "rate": true}]}',
         "a number or a fraction"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ValueError, match=complaint):
            named_topology(str(file))
