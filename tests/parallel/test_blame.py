"""Faults of a layout found, and mended by the first proposal, on layouts with one fault each."""

from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from bad_layouts import KINDS, bad_layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from toolkit.parallel import blame, explain, layout, make_mesh, partitioned_train_step
from toolkit.parallel.faults.variant import variant_of

CASES = 30
AT_LEAST = 24


def sent_by_cause(explanation):
    sent = Counter()
    for item in explanation.collectives:
        cause = item.collective.kind, item.axes, item.source
        sent[cause] += item.collective.total_bytes_sent
    return sent


def is_mended_at_once(case):
    """Whether the first proposal removes the collective by which the fault shows most."""
    step, arguments, results = case.good
    good = explain(variant_of(step, arguments, results).compile())
    found = blame(case.step, case.arguments, results=case.results, most_changes=0)
    assert found.explanation.bytes_sent > good.bytes_sent, "no fault"
    extra = sent_by_cause(found.explanation) - sent_by_cause(good)
    worst = max(extra, key=extra.__getitem__)
    finding = next(
        one
        for one in found.findings
        if (one.item.collective.kind, one.item.axes, one.item.source) == worst
    )
    return bool(finding.trials) and finding.trials[0].removes


def test_the_first_proposal_mends():
    assert is_mended_at_once(bad_layout(7, make_mesh))


@pytest.mark.nightly
def test_the_first_proposal_mends_most_of_thirty():
    mended = [is_mended_at_once(bad_layout(seed, make_mesh)) for seed in range(CASES)]
    missed = [f"{seed}: {KINDS[seed % len(KINDS)]}" for seed in range(CASES) if not mended[seed]]
    assert sum(mended) >= AT_LEAST, missed


def test_words_name_what_to_change():
    mesh = make_mesh({"data": 2, "model": 4})

    def place(*spec):
        return NamedSharding(mesh, P(*spec))

    def step(params, x):
        inner = jnp.tanh(x @ params["up"])
        return inner @ params["down"]

    shapes = {"up": (32, 64), "down": (64, 32)}
    x = jax.ShapeDtypeStruct((128, 32), jnp.float32, sharding=place("data"))

    def blamed(**specs):
        params = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place(*specs[name]))
            for name, shape in shapes.items()
        }
        return blame(step, (params, x), results=place("data"))

    found = blamed(up=("model",), down=("model",))
    changes = [trial.change for one in found.findings for trial in one.trials if trial.removes]
    assert "lay params/up as P(None, 'model'), not P('model',)" in changes
    assert "not P('model',): removed" in str(found)

    (pair,) = blamed(up=(None, "model"), down=("model",)).findings
    assert (pair.item.collective.kind, pair.item.axes) == ("all-reduce", ("model",))
    assert pair.is_textbook


def test_weights_gathered_after_the_moments_step_are_a_textbook_layout():
    """ZeRO-1 holds parameters whole from step to step: no constraint inside may leave them cut."""
    params = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
    found, adam = layout(params, make_mesh({"node": 8, "data": 1}), "zero1"), optax.adam(1e-3)
    step = partitioned_train_step(
        lambda p, x: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2), adam, found
    )
    state = params, adam.init(params)
    shardings = found.shardings(state)
    arguments = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        (*state, jnp.ones((512, 64))),
        (*shardings, found.batch_sharding),
    )
    results = *shardings, NamedSharding(found.mesh, P())
    blamed = blame(step.__wrapped__, arguments, results=results, most_changes=0)
    kinds = {one.item.collective.kind for one in blamed.findings}
    assert kinds == {"all-reduce", "all-gather"}
    assert not [trial.change for one in blamed.findings for trial in one.trials if trial.removes]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"most_trials": 0}, "most_trials=0: want 1 to 100"),
        ({"arguments": (jnp.ones(8),)}, "arguments: none has a NamedSharding"),
        ({"results": []}, "results has 0 shardings; want 1"),
    ],
)
def test_what_cannot_be_blamed_is_refused(change, message):
    place = NamedSharding(make_mesh({"data": 8}), P("data"))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=place)
    given = {"function": jnp.sum, "arguments": (x,)} | change
    with pytest.raises(ValueError, match=message):
        blame(**given)
