"""Looped language models as pipelines: loops as stages, packed documents; exact in float64."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from float64 import enable_x64

from toolkit.language import next_byte_loss, pipeline_batch, pipeline_language_model
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.parallel import make_mesh
from toolkit.schedules import gpipe, interleaved, one_forward_one_backward, zero_bubble_h1

pytestmark = pytest.mark.usefixtures("not_cached")

TOLERANCE = 1e-12  # float64


@pytest.fixture(autouse=True)
def _float64():
    with enable_x64(True):
        yield


def model_of(pattern, **changes):
    sizes = {"width": 8, "heads": 2, "vocabulary": 17, "dtype": "float64"}
    config = LoopedConfig.tiny(pattern, **(sizes | changes))
    model = LoopedLM(config, rngs=nnx.Rngs(0))

    def moved(a):  # off the zeros at which gates start
        steps = jnp.arange(a.size, dtype="float64").reshape(a.shape)
        return a.astype("float64") + 0.1 * jnp.cos(steps)

    state = jax.tree.map(moved, nnx.state(model, nnx.Param))
    nnx.update(model, state)
    return model


def batch_of(sequences, time, *, is_packed):
    tokens = jax.random.randint(jax.random.key(1), (sequences, time + 1), 0, 17)
    if not is_packed:
        return tokens[:, :-1], tokens[:, 1:]
    ids = jnp.broadcast_to(jnp.arange(time) // 2, (sequences, time))
    # Of the first microbatch most tokens do not count.
    targets = tokens[:, 1:].at[0].set(-1)
    return tokens[:, :-1], targets, ids


CASES = {
    "loops are chunks": (
        "full full", {"loops": 2, "loop_embedding": True}, interleaved(2, 2), (), {},
    ),
    "hybrid": ("gdn full", {"loops": 2}, interleaved(2, 2), (), {}),
    "one loop": ("full full", {"loops": 1}, one_forward_one_backward(2, 2), (), {}),
    "uneven, injected": (
        "full full full",
        {"loops": 1, "input_injection": True, "norm_every_loop": True},
        zero_bubble_h1(2, 2), (), {"layers": (1, 2), "recompute": (0,)},
    ),
    "data": ("full full", {"loops": 2}, interleaved(2, 2), ("data",), {}),
    "slices": ("full gdn", {"loops": 1}, one_forward_one_backward(2, 2, slices=2), (), {}),
    "slices, recomputed": (
        "full window gdn full", {"loops": 1}, gpipe(2, 2, slices=3), (),
        {"layers": (1, 3), "recompute": True},
    ),
    "slices, data": (
        "mla full", {"loops": 1}, one_forward_one_backward(2, 2, slices=3), ("data",), {},
    ),
}  # fmt: skip
FIRST_TIER = ("loops are chunks", "slices")
ALL = [name if name in FIRST_TIER else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", ALL)
def test_a_pipeline_has_the_loss_and_gradients_of_the_model(name):
    pattern, changes, schedule, data, how = CASES[name]
    model = model_of(pattern, **changes)
    axes = {"stage": 2} | dict.fromkeys(data, 2)
    mesh = make_mesh(axes, devices=jax.devices()[: 2 * len(axes)])
    batch = batch_of(4, 6 if schedule.slices > 1 else 5, is_packed="data" not in name)
    graph, params = nnx.split(model)
    wanted, gradients = jax.jit(jax.value_and_grad(next_byte_loss, 1), static_argnums=0)(
        graph, params, batch
    )
    cut = pipeline_language_model(model, schedule, mesh, data=data, **how)
    run, data_of_all = jax.jit(cut.pipeline), pipeline_batch(batch, 2, schedule.slices)
    weights = cut.pipeline.place(cut.weights)
    loss, (rows, shared) = run(weights, cut.shared, data_of_all)
    if schedule.slices > 1:  # control: slices that read nothing of those before
        alone = data_of_all | {"continues": jnp.zeros_like(data_of_all["continues"])}
        is_cut = data_of_all["continues"].any()
        assert (abs(run(weights, cut.shared, alone)[0] - wanted) > 1e-4) == is_cut
    found = nnx.clone(model)
    cut.write(found, rows, shared)
    pairs = zip(
        jax.tree.leaves(nnx.state(found, nnx.Param)), jax.tree.leaves(gradients), strict=True
    )
    assert abs(loss - wanted) < TOLERANCE
    assert max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs) < TOLERANCE
    assert max(float(jnp.max(jnp.abs(a))) for a in jax.tree.leaves(gradients)) > 1e-3


@pytest.mark.parametrize(
    ("changes", "stages", "how", "words"),
    [
        ({"loops": 2}, 3, {}, "got 3 stages; wanted a multiple of the 2 loops"),
        ({"loops": 1}, 2, {"layers": (2, 1)}, r"layers: got \[2, 1\], wanted 2 groups of 2"),
        (
            {"loops": 2, "ladder_residual": True},
            2,
            {},
            "ladder_residual is True; a pipeline wants none",
        ),
        ({"loops": 2}, 4, {}, "stages 0 and 2 share weights, and lie on devices 0 and 2"),
        ({"loops": 1, "prelude": "full"}, 2, {"slices": 2}, "prelude_layers .* run outside of"),
        ({"loops": 1, "feed_forwards": "moe"}, 2, {"slices": 2}, "'moe' layers sort the tokens"),
    ],
)
def test_what_no_stage_passes_on_is_refused(changes, stages, how, words):
    model = model_of("full full", **changes)
    mesh = make_mesh({"stage": stages}, devices=jax.devices()[:stages])
    schedule = one_forward_one_backward(stages, 4, slices=how.pop("slices", 1))
    with pytest.raises(ValueError, match=words):
        pipeline_language_model(model, schedule, mesh, **how)


def test_microbatches_and_slices_divide_the_batch():
    with pytest.raises(ValueError, match="slices: got 2, wanted a divisor of 5 tokens"):
        pipeline_batch(batch_of(4, 5, is_packed=False), 2, slices=2)
    with pytest.raises(ValueError, match="microbatches: got 3, wanted a divisor of the batch 4"):
        pipeline_batch(batch_of(4, 5, is_packed=False), 3)
