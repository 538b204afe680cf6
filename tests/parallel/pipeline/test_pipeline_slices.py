"""Slices of causal sequences through a pipeline: keys and values are passed on, gradients come
back; exact in float64 against whole sequences on one device."""

import jax
import jax.numpy as jnp
import pytest
from float64 import enable_x64

from toolkit.parallel import make_mesh
from toolkit.parallel.pipeline import Context, Pipeline
from toolkit.schedules import gpipe, one_forward_one_backward

pytestmark = pytest.mark.usefixtures("not_cached")

TOLERANCE = 1e-12  # float64
WIDTH, TIME, SLICES, SEQUENCES, BATCH = 6, 12, 3, 2, 2
PART = TIME // SLICES


@pytest.fixture(autouse=True)
def _float64():
    with enable_x64(True):
        yield


def attended(w, x, keys, values, start):
    """Causal attention of x, whose first token has the number `start`, then an MLP; residual."""
    places = start + jnp.arange(x.shape[1])
    scores = (x @ w["q"]) @ keys.swapaxes(1, 2)
    is_seen = jnp.arange(keys.shape[1]) <= places[:, None]
    x = x + jax.nn.softmax(jnp.where(is_seen, scores, -1e30), axis=-1) @ values
    return x + jnp.tanh(x @ w["up"])


def whole(weights, shared, tokens):
    x = shared["table"][tokens]
    for w in weights:
        x = attended(w, x, x @ w["k"], x @ w["v"], 0)
    return jnp.sum(jnp.sin(x) * jnp.arange(1, TIME + 1)[:, None])


def stage(w, given, context):
    x, (keys, values) = given
    start = context.data["start"]
    zero = jnp.zeros((), start.dtype)
    at = (zero, start, zero)
    keys = jax.lax.dynamic_update_slice(keys, x @ w["k"], at)
    values = jax.lax.dynamic_update_slice(values, x @ w["v"], at)
    return attended(w, x, keys, values, start), (keys, values)


def first(shared, data):
    return shared["table"][data["tokens"]]


def last(shared, x, data):
    places = data["start"] + jnp.arange(1, PART + 1)
    return jnp.sum(jnp.sin(x) * places[:, None])


def carried(shared, data):
    return (jnp.zeros((BATCH, TIME, WIDTH)),) * 2


def problem(stages):
    keys = jax.random.split(jax.random.key(0), 6)
    names = ("q", "k", "v", "up")
    drawn = [jax.random.normal(key, (stages, WIDTH, WIDTH)) / 2 for key in keys[:4]]
    weights = [{n: d[s] for n, d in zip(names, drawn, strict=True)} for s in range(stages)]
    shared = {"table": jax.random.normal(keys[4], (9, WIDTH))}
    tokens = jax.random.randint(keys[5], (SEQUENCES, BATCH, TIME), 0, 9)
    parts = tokens.reshape(SEQUENCES, BATCH, SLICES, PART).swapaxes(1, 2)
    starts = jnp.tile(PART * jnp.arange(SLICES), SEQUENCES)
    data = {"tokens": parts.reshape(-1, BATCH, PART), "start": starts}
    return weights, shared, tokens, data


@pytest.mark.parametrize(
    "make", [one_forward_one_backward, pytest.param(gpipe, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_slices_give_the_gradients_of_whole_sequences(make, recompute):
    weights, shared, tokens, data = problem(2)
    total = lambda weights, shared: sum(whole(weights, shared, each) for each in tokens)  # noqa: E731
    wanted = jax.jit(jax.value_and_grad(total, (0, 1)))(weights, shared)
    mesh = make_mesh({"stage": 2}, devices=jax.devices()[:2])
    how = {"first": first, "last": last, "weights": weights, "mesh": mesh, "recompute": recompute}
    run = Pipeline(stage, schedule=make(2, SEQUENCES, slices=SLICES), carried=carried, **how)
    loss, (rows, rest) = jax.jit(run)(run.place(weights), shared, data)
    found = loss, (run.unplace(rows), rest)
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    assert max(float(jnp.max(jnp.abs(a - b) / (1 + jnp.abs(b)))) for a, b in pairs) < TOLERANCE
    # A control: slices that pass nothing on have another loss.
    alone = 0
    for part in range(SEQUENCES * SLICES):
        here = jax.tree.map(lambda leaf, part=part: leaf[part], data)
        x = first(shared, here)
        for number, w in enumerate(weights):
            x, _ = stage(w, (x, carried(shared, here)), Context(here, shared, number))
        alone += last(shared, x, here)
    assert abs(alone - wanted[0]) > 1e-3


def test_slices_that_pass_nothing_on_are_refused_in_one_line():
    weights, *_ = problem(2)
    mesh = make_mesh({"stage": 2}, devices=jax.devices()[:2])
    how = {"first": first, "last": last, "weights": weights, "mesh": mesh}
    for slices, given in ((SLICES, None), (1, carried)):
        with pytest.raises(ValueError, match=r"carried: got .* slices; wanted") as refused:
            Pipeline(stage, schedule=gpipe(2, 2, slices=slices), carried=given, **how)
        assert "\n" not in str(refused.value)
