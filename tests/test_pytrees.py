"""Dataclasses are pytrees that no program takes for another class's."""

import dataclasses
import itertools

import flax.struct
import jax
import jax.numpy as jnp
import pytest
from jax.tree_util import GetAttrKey, tree_flatten_with_path
from toy_mixer import TOY

from toolkit.attention import MIXERS, register, register_dataclass, sparse
from toolkit.attention.sparse.selector import Selector
from toolkit.looped import LoopedCache, LoopedConfig, register_layer
from toolkit.looped.mixing import LAYERS
from toolkit.testing.sequences import sequence_contracts

STATIC = {"metadata": {"static": True}}


def by_jax(owner):
    return jax.tree_util.register_dataclass(owner)  # noqa: TID251


def numbered(number, decorate=register_dataclass):
    """A class like others but for its number."""
    fields = [("scale", float, dataclasses.field(**STATIC)), ("x", jax.Array)]
    owner = dataclasses.make_dataclass("Numbered", fields, namespace={"number": number})
    return decorate(owner)(2.0, jnp.zeros(()))


is_told_apart = jax.tree.structure(numbered(0, by_jax)) != jax.tree.structure(numbered(1, by_jax))


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


def frozen(register):
    return lambda owner: register(dataclasses.dataclass(frozen=True)(owner))


def memory(decorate):
    class Memory:
        x: jax.Array
        y: jax.Array | None = None

    return decorate(Memory)


def row_with(state):
    """A mixer whose state is an object around the toy's matrix."""
    return dataclasses.replace(TOY, empty_state=lambda *sizes: (state(TOY.empty_state(*sizes)),))


def read_by(decorate, index=lambda keys: ()):
    class Mine(Selector):
        def build(self, keys, values, length):
            return index(keys)

    keys = jnp.ones((1, 2, 8, 4))
    return sparse.build(decorate(Mine)(), keys, keys, jnp.array([5]))


def cached_in(decorate):
    """The empty cache of a model with a layer whose own is an object around that of `gla`."""

    class Mine(LAYERS["gla"]):
        word, mixer = "mine", "gla"

        @classmethod
        def empty_cache(cls, config, batch, capacity):
            return memory(decorate)(super().empty_cache(config, batch, capacity))

    register_layer(Mine)
    try:
        config = LoopedConfig.tiny("full", loops=2, prelude="mine", width=16, heads=2)
        return LoopedCache.empty(config, batch=1, capacity=4)
    finally:
        del LAYERS["mine"]


@pytest.mark.skipif(is_told_apart, reason="this jaxlib tells such classes apart")
@pytest.mark.parametrize("decorate", [frozen(by_jax), flax.struct.dataclass])
def test_a_class_that_jaxlib_may_mistake_is_refused(decorate):
    def is_refused(name):
        told = rf"{name} is registered by .* use toolkit\.attention\.register_dataclass$"
        return pytest.raises(TypeError, match=told)

    row = row_with(memory(decorate))
    with is_refused("Memory"):
        register(row)
    assert row.name not in MIXERS
    with is_refused("Memory"):
        sequence_contracts()["a_state_knows_its_class"](row)
    with is_refused("Memory"):
        cached_in(decorate)
    with is_refused("Mine"):
        read_by(frozen(by_jax))
    with is_refused("Memory"):
        read_by(frozen(register_dataclass), memory(decorate))


def test_a_class_that_knows_itself_is_taken():
    own = memory(frozen(register_dataclass))
    assert register(row_with(own)).name in MIXERS
    del MIXERS["toy"]
    assert cached_in(frozen(register_dataclass)).prelude[0].x.state.shape[0] == 1
    assert read_by(frozen(register_dataclass), own).index.x.shape == (1, 2, 8, 4)
