"""Plans as files, trained as they are: one run under three plans, its checkpoints shared."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.language import TrainingRun, train_language_model
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.parallel.gradients import Exchange
from toolkit.planning import SavedPlan, Strategy, choose_exchanges, load_plan, predict, save_plan

pytestmark = pytest.mark.usefixtures("not_cached")

ROUNDING = 1e-5  # float32 losses, summed in another order
CONFIG = LoopedConfig.tiny(
    "full full full", loops=1, width=32, heads=4, feed_forward=32, tied_embedding=False
)
SIZES = {"batch": 8, "sequence_length": 16}
RUN = TrainingRun(CONFIG, steps=30, learning_rate=3e-3, **SIZES)
PIPED = Strategy(pipeline=2, fsdp=2, data=2, microbatches=2, schedule="zb-h1", shard_optimizer=True)
SLICED = Strategy(pipeline=2, fsdp=2, tensor=2, microbatches=2, slices=2, recompute="layer")
# Loops of unlike layers as stages: of one loop, "window" alone is the second.
LOOPED = dataclasses.replace(CONFIG, pattern="full full window", loops=2)
AROUND = Strategy(pipeline=2, data=4, microbatches=2, schedule="interleaved", chunks=2)


def saved(strategy, folder, config=CONFIG):
    save_plan(predict(config, "h100:8", strategy, **SIZES), folder / "plan.json")
    return load_plan(folder / "plan.json")


def test_a_plan_is_written_and_read(tmp_path):
    found = saved(PIPED, tmp_path)
    assert found == SavedPlan(CONFIG, PIPED, chips="h100:8", **SIZES)
    facts = json.loads((tmp_path / "plan.json").read_text())
    assert facts["modelled"]["step_seconds"] == found.prediction.step_seconds
    (tmp_path / "plan.json").write_text(json.dumps(facts | {"batch": 4}))
    with pytest.raises(ValueError, match=r"checksum|edited|damaged"):
        load_plan(tmp_path / "plan.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "piped"), [(CONFIG, PIPED), (LOOPED, AROUND)], ids=["one loop", "two loops"]
)
def test_a_run_goes_on_under_any_other_plan_with_the_losses_of_one_device(tmp_path, config, piped):
    """Under a pipeline, with slices of sequences where loops allow, then under FSDP and tensors,
    then without a plan."""
    run = dataclasses.replace(RUN, config=config)
    wanted = train_language_model(run, tmp_path / "whole", is_progress_shown=False)
    next_plan = Strategy(fsdp=4, tensor=2, recompute="layer") if config.loops > 1 else SLICED
    for strategy in (piped, next_plan, None):
        form = None if strategy is None else saved(strategy, tmp_path, config).form()
        stop = lambda: True  # noqa: E731
        how = {"form": form, "stop": stop, "is_progress_shown": False}
        found = train_language_model(run, tmp_path / "parts", **how)
    assert found.step == RUN.steps
    for name in ("loss", "evaluation_loss"):
        pairs = zip(found.history, wanted.history, strict=True)
        assert all(abs(a[name] - b[name]) < ROUNDING * b[name] for a, b in pairs)
    assert wanted.history[-1]["loss"] < wanted.history[0]["loss"] - 0.1  # something was learnt


MATRICES = LoopedConfig.tiny(
    "full full", loops=1, width=256, heads=2, feed_forward=64, residual_gate=False
)
FEW = "top_k=0.01:gather:error_feedback"
MIXED = f"blocks/0/mixer/*@{FEW},embedding@float32:dense,int4=256:scatter_gather"


def with_exchange(folder, exchange, **degrees):
    save_plan(predict(MATRICES, "a10g:8", Strategy(**degrees), **SIZES), folder / "plan.json")
    return dataclasses.replace(load_plan(folder / "plan.json"), exchange=exchange).form()


@pytest.mark.slow
def test_a_chosen_exchange_is_that_of_each_tensor_of_the_program(tmp_path):
    step = predict(MATRICES, "a10g:8", Strategy(data=2, fsdp=2, tensor=2), **SIZES)
    choice = choose_exchanges(step, ["int4:scatter_gather", FEW])
    save_plan(step, tmp_path / "plan.json", exchanges=choice)
    chosen = Exchange.parse(load_plan(tmp_path / "plan.json").exchange)
    assert str(chosen.of("embedding")) == FEW != str(chosen.of("blocks/0/mixer/query/kernel"))
    # All of them at once: each is its own distance from the exact gradient.
    form = with_exchange(tmp_path, MIXED, data=2, fsdp=2, tensor=2)
    assert [len(group.leaves) for group in form.exchange.groups] == [4, 4, 1]
    model = LoopedLM(MATRICES, rngs=nnx.Rngs(0))
    params = form.layout.apply(jax.jit(form.pack)(nnx.state(model, nnx.Param)))
    tokens = form.layout.apply_batch((jax.random.randint(jax.random.key(0), (8, 16), 0, 256),) * 2)
    exact = jax.jit(jax.grad(form.loss))(params, tokens)
    found = jax.jit(form.exchange.program)(params, tokens, form.exchange.init())[1]
    np.testing.assert_allclose(found["embedding"], exact["embedding"], atol=ROUNDING)
    first, second = (tree["blocks"][0][0]["mixer"]["value"]["kernel"] for tree in (found, exact))
    lost = jnp.linalg.norm(first - second, axis=(1, 2)) / jnp.linalg.norm(second, axis=(1, 2))
    assert lost[0] > 0.5 > 0.3 > lost[1] > 0.05  # the largest 1 %, and four bits


@pytest.mark.nightly
@pytest.mark.parametrize("degrees", [
    {"data": 2, "fsdp": 2, "tensor": 2, "microbatches": 2}, {"data": 8, "shard_optimizer": True},
])  # fmt: skip
def test_a_chosen_exchange_is_trained_and_resumed_to_the_bit(tmp_path, degrees):
    form = with_exchange(tmp_path, MIXED, **degrees)
    run = TrainingRun(MATRICES, steps=30, learning_rate=3e-3, exchange=MIXED, **SIZES)
    quiet = {"form": form, "is_progress_shown": False}
    whole = train_language_model(run, tmp_path / "whole", **quiet)
    for _ in range(3):  # of ten steps each
        parts = train_language_model(run, tmp_path / "parts", stop=lambda: True, **quiet)
    assert parts.step == whole.step == 30
    losses = [[row["loss"] for row in found.history] for found in (parts, whole)]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] - 0.1
    jax.tree.map(np.testing.assert_array_equal, *map(nnx.state, (parts.model, whole.model)))
    with pytest.raises(ValueError, match="exchange: got None with a plan, which says how"):
        train_language_model(dataclasses.replace(run, exchange=None), tmp_path / "run", **quiet)


def test_what_cannot_run_here_is_refused_in_one_line(tmp_path):
    found = saved(PIPED, tmp_path)
    with pytest.raises(ValueError, match=r"plan: it takes 8 devices .*, and there are 4$"):
        found.program(jax.devices()[:4])
    form = found.form()
    for change, words in (
        ({"layout": "zero3"}, "layout: got 'zero3' with a plan"),
        ({"accumulate": 2}, "accumulate: got 2 with a plan"),
        ({"optimizer": "muon"}, "optimizer: got 'muon', which reads whole matrices"),
    ):
        run = dataclasses.replace(RUN, **change)
        with pytest.raises(ValueError, match=words) as refused:
            train_language_model(run, tmp_path / "run", form=form, is_progress_shown=False)
        assert "\n" not in str(refused.value)
