"""Dataclasses are pytrees that no program takes for another class's."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.tree_util import GetAttrKey, tree_flatten_with_path

from toolkit._pytrees import register_dataclass
from toolkit.attention import sparse
from toolkit.attention.sparse.selector import Selector

STATIC = {"metadata": {"static": True}}


def numbered(number):
    """A class like others but for its number."""
    fields = [("scale", float, dataclasses.field(**STATIC)), ("x", jax.Array)]
    owner = dataclasses.make_dataclass("Numbered", fields, namespace={"number": number})
    return register_dataclass(owner)(2.0, jnp.zeros(()))


def test_a_program_is_that_of_the_class_that_came():
    """Equal structures are not enough for a mistake: of 300 such classes, 46 met another's."""
    nodes = [numbered(number) for number in range(16)]
    structures = list(map(jax.tree.structure, nodes))
    assert not any(a == b for a, b in itertools.combinations(structures, 2))
    number = jax.jit(lambda node: node.number)
    assert [int(number(node)) for node in nodes] == list(range(16))


@pytest.mark.parametrize("settings", [{}, {"sinks": 1, "recent": 3}])
def test_no_two_systems_have_one_structure(settings):
    own = [x for x in sparse.SELECTORS.values() if issubclass(x, Selector)]
    assert len(own) > 10
    structures = [jax.tree.structure(x(**settings)) for x in own]
    assert not any(a == b for a, b in itertools.combinations(structures, 2))


def test_fields_keep_their_names_and_their_places():
    node = numbered(0)
    keyed, structure = tree_flatten_with_path(node)
    assert [(keys, float(leaf)) for keys, leaf in keyed] == [((GetAttrKey("x"),), 0.0)]
    assert structure == jax.tree.structure(dataclasses.replace(node, x=jnp.ones(3)))
    assert structure != jax.tree.structure(dataclasses.replace(node, scale=3.0))
    assert structure != jax.tree.structure(dataclasses.replace(node, x=None))
    back = jax.vmap(jax.grad(lambda node: node.scale * node.x**2))(
        dataclasses.replace(node, x=jnp.arange(3.0))
    )
    assert (type(back), back.scale, back.x.tolist()) == (type(node), 2.0, [0.0, 4.0, 8.0])
