"""Plans that cut sequences in slices: time, memory, the search, and what is refused."""

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec

from toolkit.looped import LoopedConfig
from toolkit.parallel import make_mesh
from toolkit.parallel.pipeline import program_of
from toolkit.parallel.pipeline.partition import partition
from toolkit.planning import Strategy, load_plan, plan, predict, save_plan
from toolkit.planning.grade.forward import through
from toolkit.planning.memory.kept import waiting_per_token
from toolkit.planning.memory.pipelines import CARRIED, waiting_bytes
from toolkit.planning.memory.placing import parameters
from toolkit.planning.time.orders import schedule_of
from toolkit.schedules import Durations, simulate, to_csv

ROUNDING = 1e-9  # relative, of sums of a few hundred numbers
NEAR = 0.05  # of what a traced layer keeps: vectors and logarithms of sums
MEMORY = 0.15
# Three heads and one sequence: only a pipeline can use four chips.
ODD = LoopedConfig.tiny(
    "full full full full", loops=1, width=1536, heads=3, residual_gate=False, dtype="bfloat16"
)
SIZES = {"batch": 1, "sequence_length": 4096}
SLICED = Strategy(pipeline=4, microbatches=1, slices=4)


def test_a_step_in_slices_is_the_simulation_of_its_schedule():
    found = predict(ODD, "h100:4", SLICED, **SIZES)
    slowdown, busy = found.constants.slowdown, found.busy
    middle = busy[1]  # stages between the first and the last are alike
    forward, backward = middle.forward_total(slowdown) / 4, middle.backward_total(slowdown) / 4
    weight = middle.weight_gradient / 4
    factors = tuple(part.forward_total(slowdown) / 4 / forward for part in busy)
    times = Durations(
        forward, backward - weight, weight, delay=found.hop_seconds, stages=factors
    )  # fmt: skip
    line = simulate(schedule_of(SLICED), times)
    ratios = [part.backward_total(slowdown) / part.forward_total(slowdown) for part in busy]
    alike = max(ratios) / min(ratios) - 1  # factors are those of the forward passes
    last = max(part.update for part in busy)
    step = float(line.makespan)
    assert step * (1 - alike) <= found.step_seconds <= (step + last) * (1 + alike)
    whole = predict(ODD, "h100:4", dataclasses.replace(SLICED, slices=1), **SIZES)
    assert found.bubble < whole.bubble / 2
    assert found.lockstep_seconds >= found.step_seconds
    assert found.hop_seconds < whole.hop_seconds


def test_the_search_cuts_sequences_where_nothing_else_fills_the_pipeline(tmp_path):
    found = plan(ODD, "h100:4", **SIZES)
    assert found.best.strategy.slices > 1
    one = dataclasses.replace(found.best.strategy, slices=1)
    assert predict(ODD, "h100:4", one, **SIZES).step_seconds > found.best.step_seconds
    save_plan(found.best, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").strategy == found.best.strategy
    assert f"sequences in {found.best.strategy.slices} slices" in str(found)


def waiting_on_a_chip(config, strategy, length):
    """Bytes that the program's layer keeps on one of two chips, and between its halves."""
    graphs, _, shapes = parameters(config, strategy)
    layer = jax.tree.map(lambda a: a.update(shape=a.shape[1:]), shapes["blocks"][0][0])
    leaves, tree = jax.tree.flatten(layer)
    specs = jax.tree.map(lambda a: PartitionSpec(*[None] * (a.ndim + 1)), layer)
    h = jax.ShapeDtypeStruct((1, length // 2, config.width), config.compute_dtype)
    found = []

    def trace():
        def stage(weights, x, _):
            layer = tree.unflatten(weights)
            return [through(config, strategy, "none", graphs[0][0], specs, x[0], layer)[0]]

        cut = partition(stage, leaves, [h], [], recompute=False)
        found.extend(sum(a.size * a.dtype.itemsize for a in each) for each in (cut.kept, cut.split))

    mesh = make_mesh({"tensor": 2}, devices=jax.devices()[:2])
    traced = jax.shard_map(trace, mesh=mesh, in_specs=(), out_specs=None, check_vma=False)
    jax.eval_shape(traced)
    return found


def test_what_waits_is_what_the_program_keeps():
    """Formulas of softmax layers against a trace of what the pipeline's tasks keep; and of layers
    that are traced, once 200 times too much."""
    options = {"full": {"key_value_heads": 2}}
    config = dataclasses.replace(ODD, width=256, heads=4, feed_forward=512, options=options)
    strategy = Strategy(pipeline=2, microbatches=2)
    found = waiting_bytes(config, "full", "swiglu", "none", strategy, 1, 256)
    for formula, traced in zip(found, waiting_per_token(config, "full", 256), strict=True):
        assert formula == pytest.approx(256 * traced, rel=NEAR)
    cut = Strategy(pipeline=2, tensor=2, microbatches=2)
    found = waiting_bytes(config, "full", "swiglu", "none", cut, 1, 256)
    for formula, traced in zip(found, waiting_on_a_chip(config, cut, 256), strict=True):
        assert formula == pytest.approx(traced, rel=NEAR)
    latent = dataclasses.replace(config, pattern="mla mla", options={})
    kept, split = waiting_bytes(latent, "mla", "swiglu", "none", strategy, 1, 256)
    assert kept < split < 2 * kept
    assert waiting_bytes(config, "full", "swiglu", "layer", strategy, 1, 256)[1] == 0


def test_places_for_slices():
    """Less waits in slices, and of caches on their way never more than two."""
    config = dataclasses.replace(ODD, options={"full": {"key_value_heads": 1}})
    memory = [
        predict(config, "h100:4", dataclasses.replace(SLICED, slices=k), **SIZES).memory
        for k in (1, 4)
    ]
    assert memory[1].activations < memory[0].activations
    for schedule in ("1f1b", "gpipe"):
        for slices in (2, 3, 5):
            cut = Strategy(pipeline=4, microbatches=3, slices=slices, schedule=schedule)
            assert program_of(schedule_of(cut)).carry_slots <= CARRIED
    table = to_csv(schedule_of(SLICED))
    listed = predict(ODD, "h100:4", dataclasses.replace(SLICED, schedule=table), **SIZES)
    named = predict(ODD, "h100:4", SLICED, **SIZES)
    assert listed.step_seconds == pytest.approx(named.step_seconds, rel=ROUNDING)
    assert listed.memory == named.memory


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pipeline": 1}, "slices 4 wants a pipeline of 2 or more .*; got pipeline 1 with '1f1b'"),
        ({"schedule": "zb-h1"}, "schedule '1f1b' or 'gpipe', or a table; got .* with 'zb-h1'"),
        ({"slices": 0}, "slices must be 1 to"),
        ({"slices": 3}, "sequence_length 4096 is not divisible by slices 3 x tensor 3"),
        ({"context": 2, "pipeline": 2}, "slices 4 cuts sequences, and so does context 2"),
        ({"recompute": "layer", "block_chunks": 2}, "cuts sequences, and so does block_chunks 2"),
        ({"schedule": "0F0,0B0\n1F0,1B0"}, "wanted pipeline 4, .* 1 microbatches x slices 4"),
        ({"config": "moe"}, "slices 4: 'moe' layers sort the tokens of whole sequences"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_line(changes, words):
    fed = changes.pop("config", "swiglu")
    config = dataclasses.replace(ODD, feed_forwards=fed)
    with pytest.raises(ValueError, match=words) as refused:
        predict(config, "h100:4", dataclasses.replace(SLICED, **changes), **SIZES)
    assert "\n" not in str(refused.value)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("slices", [1, 2])
def test_memory_is_libtpus(slices):
    """Of libtpu 0.0.42: within a hundredth here; once 42 % too much without slices."""
    pytest.importorskip("libtpu")
    from toolkit.planning.grade.by_compiler import peak_bytes, quickly_compiled

    config = LoopedConfig(
        vocabulary=4096, width=1024, pattern=" ".join(["full"] * 8), loops=1, heads=8,
        feed_forward=4096, residual_gate=False, dtype="bfloat16",
        options={"full": {"key_value_heads": 4}},
    )  # fmt: skip
    strategy = Strategy(pipeline=4, microbatches=4, slices=slices)
    found = predict(config, "v5e:2x2", strategy, batch=16, sequence_length=2048)
    done = quickly_compiled(config, strategy, 16, 2048, found.cluster.devices())
    peak = peak_bytes(done)
    assert abs(found.memory.total - peak) < MEMORY * peak
    other = dataclasses.replace(strategy, slices=4)  # a control
    less = predict(config, "v5e:2x2", other, batch=16, sequence_length=2048).memory.total
    assert abs(less - peak) > MEMORY * peak
