"""The program: loss and gradients of the model, whatever the strategy; `training` runs it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.planning import Strategy, train_program
from toolkit.training import TrainState, adamw, make_train_step

CONFIG = LoopedConfig.tiny(
    "full full full full", loops=2, width=64, heads=4, vocabulary=203, feed_forward=64,
    options={"full": {"key_value_heads": 2}},
)  # fmt: skip


def stacked(state, runs):
    """The parameters of a model as the program has them: runs of stacked layers."""
    pure = nnx.to_pure_dict(state)
    ends = np.cumsum((0, *runs))
    blocks = [
        [jax.tree.map(lambda *x: jnp.stack(x), *(pure["blocks"][i] for i in range(a, b)))]
        for a, b in itertools.pairwise(ends)
    ]
    table = pure["embedding"]["embedding"]
    params = {"blocks": blocks, "embedding": table, "norm": pure["norm"]["scale"]}
    return params | {"rho": pure["rho"]}


@pytest.fixture(scope="module")
def reference():
    graph, state = nnx.split(LoopedLM(CONFIG, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(0), (8, 17), 0, CONFIG.vocabulary)
    batch = (tokens[:, :-1], tokens[:, 1:])

    def loss(state):
        logits = nnx.merge(graph, state)(batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    return state, batch, *jax.jit(jax.value_and_grad(loss))(state)


@pytest.mark.parametrize(
    ("strategy", "runs"),
    [
        pytest.param(
            Strategy(data=2, fsdp=2, tensor=2, recompute="layer", microbatches=2), (4,),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            Strategy(fsdp=8, recompute="1 layer, 3 none", head_chunks=2), (1, 3),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            Strategy(fsdp=4, tensor=2, recompute="elementwise"), (4,), marks=pytest.mark.nightly
        ),
        pytest.param(
            Strategy(fsdp=4, recompute="2 layer, 2 none", block_chunks=2), (2, 2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_loss_and_gradients_are_the_models(reference, strategy, runs):
    state, batch, wanted, gradients = reference
    program = train_program(CONFIG, strategy, batch=8, sequence_length=16)
    whole = stacked(state, runs)
    # The vocabulary is padded to what the tensor axis divides.
    rows = program.params["embedding"].shape[0] - CONFIG.vocabulary
    pad = lambda tree: tree | {"embedding": jnp.pad(tree["embedding"], ((0, rows), (0, 0)))}  # noqa: E731
    params = program.layout.apply(pad(whole))
    given = program.layout.apply_batch(batch)
    loss, found = jax.jit(jax.value_and_grad(program.loss))(params, given)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for a, b in zip(
        jax.tree.leaves(found), jax.tree.leaves(pad(stacked(gradients, runs))), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=2e-6 * max(1e-3, np.abs(b).max()) + 1e-8, rtol=1e-4)


@pytest.mark.nightly
def test_training_runs_a_program_as_it_is():
    program = train_program(CONFIG, Strategy(fsdp=8), batch=8, sequence_length=16)
    params = jax.tree.map(lambda x: 0.02 * jnp.ones(x.shape, x.dtype), program.params)
    optimizer = adamw(1e-2)
    step = make_train_step(program.loss, optimizer, batch_sharding=program.layout.batch_sharding)
    state = TrainState.create(program.layout.apply(params), optimizer)
    tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, CONFIG.vocabulary)
    batch = program.layout.apply_batch((tokens[:, :-1], tokens[:, 1:]))
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"][0]))
    assert losses[2] < losses[0]
