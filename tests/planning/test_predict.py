"""Predictions: sizes exact, memory and time as they must move, bad input in one line."""

import dataclasses
import math
import re

import jax
import pytest
from flax import nnx

from toolkit.bench.mixers.matrix_products import matrix_flops
from toolkit.looped import LoopedConfig
from toolkit.looped.feed_forward import FEED_FORWARDS
from toolkit.looped.mixing import LAYERS
from toolkit.looped.parameters import mixing_flops
from toolkit.planning import Constants, Strategy, cluster, overlapped_seconds, predict, what_fits
from toolkit.planning.grade.program import train_program
from toolkit.planning.memory.categories import memory_of

SMALL = LoopedConfig.tiny(
    "full full full full", width=256, heads=8, vocabulary=1000, feed_forward=512,
    options={"full": {"key_value_heads": 4, "query_key_norm": True, "output_gate": True}},
)  # fmt: skip
MODELS = {
    "gated": SMALL,
    "looped, two tables": dataclasses.replace(SMALL, loops=2, tied_embedding=False),
    "hybrid": LoopedConfig.tiny("gdn full gdn full", width=256, heads=4, vocabulary=300),
}
LATENT = LoopedConfig.tiny("mla mla", width=64, residual_gate=False)
STREAMED = {"recompute": "layer", "block_chunks": 4}
CUTS = [
    Strategy(),
    Strategy(fsdp=8),
    Strategy(data=2, fsdp=4, shard_optimizer=True),
    Strategy(data=8, shard_optimizer=True),
    Strategy(fsdp=2, recompute="2 layer, 2 none"),
]
TENSOR = [Strategy(tensor=4, fsdp=2), Strategy(tensor=2, data=2, fsdp=2, shard_optimizer=True)]
CASES = [(name, cut) for name in MODELS for cut in (*CUTS, *(TENSOR if name != "hybrid" else []))]


@pytest.mark.parametrize(("name", "strategy"), CASES, ids=str)
def test_arguments_are_those_of_the_program(name, strategy):
    """19 configurations: what a chip holds between steps, to the byte, before compiling."""
    program = train_program(MODELS[name], strategy, batch=8, sequence_length=64)
    held = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(program.arguments)
    )
    predicted = memory_of(MODELS[name], strategy, 8, 64).arguments
    assert held - predicted == 4  # the optimiser's count of steps


def test_more_chips_never_hold_more():
    held = [
        predict("llama-3-8b", f"h100:{n}", Strategy(fsdp=n), batch=256).memory.total
        for n in (1, 2, 4, 8, 16, 64, 256)
    ]
    assert held == sorted(held, reverse=True)


@pytest.mark.parametrize("recompute", ["none", "elementwise", "layer"])
def test_longer_context_is_never_cheaper(recompute):
    strategy = Strategy(fsdp=8, tensor=2, recompute=recompute)
    found = [
        predict("llama-3-8b", "h100:16", strategy, batch=16, sequence_length=length)
        for length in (512, 1024, 4096, 32768)
    ]
    memory, seconds = ([each.memory.total for each in found], [e.step_seconds for e in found])
    assert memory == sorted(memory)
    assert seconds == sorted(seconds)


def test_layers_and_what_they_keep_are_there_at_one_time():
    """Beside the update of two large tables, which is no moment of its own, they once were lost."""
    strategy = Strategy(fsdp=16, recompute="elementwise", head_chunks=8)
    held = predict("llama-3-8b", "v5e:4x4", strategy, batch=16).memory
    # Per layer and token, in bfloat16, as libtpu compiles it: input, output, queries, keys, values,
    # gate and up.
    kept = 32 * 2048 * 2 * (3 * 4096 + 2 * 1024 + 2 * 14_336)
    assert held.activations == kept
    assert held.working > 0


def test_layers_that_recompute_differently_work_with_as_much_as_the_largest():
    """Which of two layers of one size was taken once depended on the order of a set."""
    working = {}
    for recompute in ("none", "layer", "16 layer, 16 none"):
        strategy = Strategy(fsdp=8, recompute=recompute, head_chunks=8)
        working[recompute] = predict("llama-3-8b", "h100:8", strategy, batch=64).memory.working
    none, layer, mixed = working.values()
    assert mixed == layer > none


def test_recomputing_trades_time_for_memory():
    none, elementwise, layer = (
        predict("llama-3-8b", "h100:8", Strategy(fsdp=8, recompute=what), batch=16)
        for what in ("none", "elementwise", "layer")
    )
    assert none.memory.total > elementwise.memory.total > layer.memory.total
    assert none.step_seconds < elementwise.step_seconds < layer.step_seconds


def test_layers_in_chunks_trade_time_for_memory():
    """Intermediates of long sequences shrink with the chunk; what layers keep does not."""
    usual = {"fsdp": 8, "recompute": "layer", "head_chunks": 512}
    strategies = [Strategy(block_chunks=n, **usual) for n in (1, 2, 4, 8, 16)]
    found = [
        predict("llama-3-8b", "h100:8", each, batch=8, sequence_length=131_072)
        for each in strategies
    ]
    held = [each.memory.working for each in found]
    assert held == sorted(held, reverse=True)
    assert held[-1] < held[0] / 2
    assert len({each.memory.activations for each in found}) == 1
    seconds = [each.step_seconds for each in found]
    assert seconds == sorted(seconds)
    assert str(strategies[1]).endswith("layers in 2 chunks, head in 512 chunks")


def test_memory_of_a_step_in_chunks_is_libtpus():
    """Two steps of one model, compiled by libtpu 0.0.42 for v5e:2x2 (4 x 8,192 tokens)."""
    for chunks, peak in ((1, 6_732_800_000), (4, 6_623_900_000)):
        strategy = Strategy(fsdp=4, recompute="layer", head_chunks=32, block_chunks=chunks)
        held = predict("llama-3.2-1b", "v5e:4", strategy, batch=4, sequence_length=8192).memory
        assert held.total == pytest.approx(peak, rel=0.05)


def test_pipelines_have_bubbles_that_microbatches_fill():
    few, many = (
        predict("llama-3-8b", "h100:8", Strategy(fsdp=2, pipeline=4, microbatches=m), batch=64)
        for m in (4, 32)
    )
    assert few.bubble > many.bubble > 0


def test_overlap_of_the_specification():
    for megabytes, seconds in ((100, 2.3), (200, 2.6), (300, 3.6)):
        assert overlapped_seconds(2.0, megabytes * 0.01) == pytest.approx(seconds)


def test_slower_links_cost_time():
    strategy = Strategy(fsdp=64, recompute="layer")
    slow, fast = (
        predict("llama-3-8b", "h100:64", strategy, batch=64, constants=Constants(link=link))
        for link in (0.1, 0.8)
    )
    assert slow.step_seconds > fast.step_seconds


def test_groups_take_the_link_that_reaches():
    where = cluster("h100:64")
    assert where.link(1, 8).name == "NVLink 4"
    assert where.link(1, 64).bytes_per_second == 8 * 5e10  # eight cards of a host at a time
    assert where.link(8, 8).bytes_per_second == 5e10


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": "llama-9"}, "nor a known name: "),
        ({"chips": "h100:8+a100:8"}, "several kinds"),
        ({"chips": "h100"}, "want a count"),
        ({"chips": "abacus:8"}, "not known"),
        ({"batch": 9}, "nearest that works: 8"),
        ({"batch": 10**12}, "at most"),
        ({"strategy": Strategy(fsdp=4)}, "there are 8"),
        ({"strategy": Strategy(tensor=8), "sequence_length": 100}, "nearest that works: 96"),
        ({"strategy": Strategy(pipeline=8), "model": SMALL, "chips": "h100:8"}, "works: 4"),
        ({"memory": -1.0}, "memory must be positive"),
        ({"strategy": Strategy(fsdp=8, recompute="3 layer, 2 none")}, "names 5 layers"),
        ({"strategy": Strategy(tensor=8, **STREAMED)}, "and so does tensor 8; nearest .* works: 1"),
        ({"strategy": Strategy(fsdp=8, **STREAMED), "sequence_length": 2050}, "works: 2048"),
        ({"strategy": Strategy(fsdp=8, **STREAMED), "model": LATENT}, "not modelled for mla"),
        *(
            ({"model": LoopedConfig.tiny(word)}, f"'{word}' layers .* nearest that are: '{near}'")
            for word, near in (("csa", "dsa"), ("relative", "full"), ("shared_window", "window"))
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(changed, words):
    given = {"model": "llama-3-8b", "chips": "h100:8", "strategy": Strategy(fsdp=8), "batch": 8}
    given |= changed
    with pytest.raises(ValueError, match=words) as refused:
        predict(given.pop("model"), given.pop("chips"), given.pop("strategy"), **given)
    assert "\n" not in str(refused.value)


def test_strategies_say_what_they_cannot_be():
    with pytest.raises(ValueError, match="recompute must be one of"):
        Strategy(recompute="everything")
    with pytest.raises(ValueError, match="fsdp must be 1"):
        Strategy(fsdp=0)
    with pytest.raises(ValueError, match=r"block_chunks 4 wants layers .* works: 'layer'"):
        Strategy(block_chunks=4)
    with pytest.raises(ValueError, match="block_chunks must be 1 to 1024"):
        Strategy(recompute="layer", block_chunks=10**12)


def test_what_fits_grows_with_chips_and_sharding():
    counts = (1, 8, 64)
    found = what_fits(["llama-3.2-1b", "llama-3-70b"], [f"h100:{n}" for n in counts])
    assert len(found) == 2 * 3 * 6
    fits = {key: each is not None and each.fits for key, each in found.items()}
    assert fits[0, 0, "data parallel"]
    assert not fits[1, 1, "ZeRO-3"]
    assert fits[1, 2, "ZeRO-3, recomputing"]
    for model in range(2):
        row = [fits[model, column, "ZeRO-3, recomputing"] for column in range(3)]
        assert row == sorted(row)
    with pytest.raises(ValueError, match="models must be at most 64"):
        what_fits(["llama-3-8b"] * 65, ["h100:8"])


def test_a_pair_of_a_mesh_of_wires_has_one_wire():
    where = cluster("mi300x:16")
    wires = [where.link(1, degree).bytes_per_second / 64e9 for degree in (2, 4, 8)]
    assert wires == pytest.approx([1, 3, 7])
    assert where.link(1, 16).name == "InfiniBand NDR"


@pytest.mark.parametrize(
    ("chips", "words"),
    [("a100-64gb:8", "a100-40gb-sxm"), ("h100 sxm 96gb:4", "h100-sxm"), ("mi300:8", "mi300x")],
)
def test_chips_that_are_not_known_are_refused_with_those_of_like_names(chips, words):
    with pytest.raises(ValueError, match="is not known") as refused:
        cluster(chips)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("word", ["full", "fox", "mla", "grouped_latent", "mlra"])
def test_pairs_of_tokens_cost_what_a_layer_multiplies(word):
    """Of short sequences a layer multiplies all pairs, of which half are needed."""
    config, time = LoopedConfig.tiny(word, width=64, heads=4), 96
    graph, state = nnx.split(nnx.eval_shape(lambda: LAYERS[word](config, rngs=nnx.Rngs(0))))
    x = jax.ShapeDtypeStruct((1, time, 64), "float32")
    counted = matrix_flops(lambda state, x: nnx.merge(graph, state)(x)[0], state, x)
    matrices = sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim > 1)
    wanted = counted / time - 2 * matrices
    assert mixing_flops(word, config, time, whole=True) * 2 * time / (time + 1) == wanted


def test_a_layer_takes_the_time_of_its_own_options():
    def seconds(word, **options):
        config = LoopedConfig(
            pattern=word, width=1024, heads=8, residual_gate=False, options={word: options}
        )
        how = {"batch": 1, "sequence_length": 1 << 15}
        return predict(config, "v5e:1", Strategy(), **how).seconds["forward"]

    assert seconds("mlra", branches=4) > 2 * seconds("mlra", branches=1)
    assert seconds("moba", selected_blocks=3) < 0.5 * seconds("moba", selected_blocks=40)
    assert seconds("path") > seconds("fox") == pytest.approx(seconds("full"), rel=0.05)


@pytest.mark.nightly
@pytest.mark.parametrize("word", [*LAYERS, *FEED_FORWARDS])
def test_a_word_is_predicted_or_refused_in_one_line(word):
    pattern, fed = (word, "swiglu") if word in LAYERS else ("full", word)
    config = LoopedConfig.tiny(
        pattern, width=64, heads=4, residual_gate=False, feed_forwards=fed
    )  # fmt: skip
    found, words = None, ""
    try:
        found = predict(config, "v5e:1", Strategy(), batch=1, sequence_length=128)
    except ValueError as refusal:
        words = str(refusal)
    assert found or (re.search(f"'{word}'.* not modelled", words) and "\n" not in words)
    assert not found or found.seconds["forward"] > 0
