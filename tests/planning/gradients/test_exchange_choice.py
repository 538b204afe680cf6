"""What to compress: the optimum is that of brute force; greedy searches are held against it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from flax import nnx

from toolkit.cli.cluster import plan as plan_command
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.measure import published_peak
from toolkit.parallel.gradients import COMPRESSORS, Exchange
from toolkit.parallel.gradients.peers import Along
from toolkit.planning import (
    Constants,
    Cost,
    Option,
    Plan,
    Schedule,
    Strategy,
    best_cut,
    best_exchanges,
    choose_exchanges,
    greedy_exchanges,
    load_plan,
    predict,
    save_plan,
)
from toolkit.planning.gradients.costs import message_cost
from toolkit.planning.gradients.lanes import Message, one_by_one
from toolkit.planning.gradients.program import fastest_exchanged

EQUAL = 1e-8  # what the search takes for the same
SIZES, READY = (16, 64, 4, 64, 16, 1, 64, 4), (1, 3, 3.5, 6, 7, 7.2, 10, 10.5)


def options_for(sizes, link=1.0):
    """Dense, half, and a sixteenth that must be encoded and decoded."""
    total = [0, *itertools.accumulate(sizes)]

    def option(name, share, is_encoded):
        def cost(first, last):
            x = total[last] - total[first]
            extra = (0.3 + 0.01 * x, 0.15 + 0.005 * x) if is_encoded else (0.0, 0.0)
            return Cost(extra[0], (0.3 + 0.25 * x * share) / link, extra[1])

        return Option(name, cost)

    return [option("dense", 1, False), option("half", 1 / 2, False), option("few", 1 / 16, True)]


def by_force(ready, options, is_grouped=False):
    n, found = len(ready), np.inf
    for cuts in itertools.product((0, 1), repeat=n - 1) if is_grouped else [(1,) * (n - 1)]:
        ends = [0, *(at + 1 for at, cut in enumerate(cuts) if cut), n]
        for chosen in itertools.product(options, repeat=len(ends) - 1):
            pairs = zip(itertools.pairwise(ends), chosen, strict=True)
            messages = tuple(Message(*ends_of, option) for ends_of, option in pairs)
            found = min(found, Schedule(tuple(ready), messages).seconds)
    return found


def drawn(seed, n):
    rng = np.random.default_rng(seed)
    return np.cumsum(rng.exponential(1, n)).tolist(), np.exp(rng.normal(1, 1.5, n)).tolist()


def test_golden_choice():
    options = options_for(SIZES)
    alike = [one_by_one(READY, [option] * 8).seconds for option in options]
    assert alike == pytest.approx([61.65, 32.525, 16.2225])
    best, greedy = best_exchanges(READY, options), greedy_exchanges(READY, options, SIZES)
    assert best.seconds == pytest.approx(14.6525) == greedy.seconds
    # What is sent before the last idle time of the link stays as it is.
    assert greedy.options() == ["dense", "few", "dense", "few", "half", "dense", "few", "few"]


def test_the_optimum_is_that_of_brute_force_and_greedy_is_not():
    gaps = []
    for seed in range(25):
        (ready, sizes), options = drawn(seed, 6), None
        options = options_for(sizes)
        best = best_exchanges(ready, options).seconds
        assert best == pytest.approx(by_force(ready, options), rel=EQUAL)
        gaps.append(greedy_exchanges(ready, options, sizes).seconds / best - 1)
        if seed < 4:
            wanted = by_force(ready[:4], options, is_grouped=True)
            found = best_exchanges(ready[:4], options, is_grouped=True)
            assert found.seconds == pytest.approx(wanted, rel=EQUAL)
        assert best_exchanges(ready, options_for(sizes, link=1.3)).seconds <= best
    assert min(gaps) >= -EQUAL
    assert 0.001 < np.mean(gaps) < 0.05
    assert max(gaps) < 0.15


def test_free_encoding_leaves_the_longer_chain():
    ready, sizes = drawn(0, 12)
    dense = options_for(sizes)[0]
    sends = [dense.cost(at, at + 1).send for at in range(12)]
    wanted = max(ready[at] + sum(sends[at:]) for at in range(12))
    assert one_by_one(ready, [dense] * 12).seconds == pytest.approx(wanted)


def test_bisection_is_a_scan_where_there_is_one_lowest_point():
    tried = 0
    for seed in range(20):
        ready, sizes = drawn(seed, 12)
        option = options_for(sizes)[2]
        scan = [
            Schedule(tuple(ready), (Message(0, cut, option), Message(cut, 12, option))).seconds
            for cut in range(1, 12)
        ] + [Schedule(tuple(ready), (Message(0, 12, option),)).seconds]
        falls = np.sign(np.diff(scan))
        if np.all(np.diff(falls) >= 0) and np.all(falls):
            tried += 1
            assert best_cut(ready, option).seconds == pytest.approx(min(scan))
    assert tried > 3


def test_golden_groups():
    rng = np.random.default_rng(7)
    x = np.round(rng.lognormal(0, 1.2, 24), 3)
    ready = np.cumsum(np.round(rng.lognormal(-1, 0.6, 24), 3)).tolist()

    def cost(first, last):
        whole = float(x[first:last].sum())
        return Cost(0.8 + 0.02 * whole, 0.5 + 0.25 * whole)

    option = Option("compressed", cost)
    assert one_by_one(ready, [option] * 24).seconds == pytest.approx(29.0273, abs=1e-4)
    cut = best_cut(ready, option)
    assert (cut.messages[0].last, cut.seconds) == (15, pytest.approx(12.7720, abs=1e-4))
    best = best_exchanges(ready, [option], is_grouped=True)
    assert [message.last for message in best.messages] == [13, 22, 24]
    assert best.seconds == pytest.approx(12.3622, abs=1e-4)


@pytest.mark.parametrize(
    ("chip", "devices", "link", "wanted"),
    [("H100", 8, 0, [3.71, 2.67]), ("A10G", 8, 1, [509, 263]), ("TPU v5e", 16, 0, [17.4, 12.0])],
)
def test_golden_milliseconds_of_350_million(chip, devices, link, wanted):
    peak = published_peak(chip)
    along = Along.over({"data": devices}, devices)
    for name, seconds in zip(("int8", "int4"), wanted, strict=True):
        found = message_cost(
            Exchange(COMPRESSORS[name]()), along, 350_000_000,
            lambda peers: peak.links[min(link, len(peak.links) - 1)],
            0.8 * peak.bytes_per_second, Constants(),
        )  # fmt: skip
        assert 1e3 * sum(found) == pytest.approx(seconds, rel=0.02)


def test_a_plan_compresses_what_the_link_cannot_hide():
    def chosen(chips, exchange, **degrees):
        step = predict("llama-3.2-1b", chips, Strategy(**degrees), batch=64, memory=1e12)
        return choose_exchanges(step, [exchange])

    near = chosen("h100:8", "int8", data=8)  # hidden already, but for the last: the embedding
    assert [near.tensors.names[at] for at, name in enumerate(near.best.options())
            if name != "dense"] == ["embedding: 128256 x 2048"]  # fmt: skip
    far = chosen("h100:64", "int4:far", data=64)
    assert far.best.options().count("int4=256:far=8") > 30
    assert far.best.exposed < far.dense.exposed / 2
    assert far.step_seconds == far.step.step_seconds + far.best.exposed - far.dense.exposed
    assert far.best.seconds <= far.greedy.seconds <= far.dense.seconds
    assert "Espresso's greedy search ends" in str(far)
    scattered = chosen("h100:8", "int4", fsdp=8)
    assert {option.name for option in scattered.options} == {"dense", "int4=256:scatter_gather"}


@pytest.mark.slow
def test_a_saved_choice_names_every_tensor(tmp_path):
    config = LoopedConfig.tiny("full gdn mla", width=256, feed_forward=256, tied_embedding=False)
    sizes = {"batch": 8, "sequence_length": 512}
    step = predict(config, "a10g:8", Strategy(data=4, fsdp=2), **sizes)
    found = choose_exchanges(step, ["int4:scatter_gather", "low_rank=2", "top_k=0.01:gather"])
    options = found.options
    turns = itertools.cycle(options[1:])
    mixed = one_by_one(found.tensors.ready, [next(turns) for _ in found.tensors.ready])
    save_plan(step, tmp_path / "plan.json", exchanges=replace(found, best=mixed))
    exchange = Exchange.parse(load_plan(tmp_path / "plan.json").exchange)
    model = nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
    shapes = {}
    for (top, *path), leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        layer = f"layer {path[0]}" if top == "blocks" else top.replace("unembedding", "head")
        shapes.setdefault((layer, leaf.shape), []).append("/".join(map(str, (top, *path))))
    wanted = {}
    for name, chosen in zip(found.tensors.names, mixed.options(), strict=True):
        label, _, shape = name.partition(": ")
        wanted.setdefault((label, tuple(map(int, shape.split(" x ")))), []).append(chosen)
    for key, chosen in wanted.items():
        paths = [path.removesuffix("/embedding") for path in shapes[key]]
        named = [str(exchange.of(path)).split(",")[-1] for path in paths]
        assert sorted(named) == sorted(chosen)
    # A matrix is costed by its own columns, and merged ones one after the other.
    costs = {option.name: option.cost for option in options}
    apart = [costs["low_rank=2:all_reduce"](at, at + 1).send for at in (0, 1)]
    assert costs["low_rank=2:all_reduce"](0, 2).send == pytest.approx(sum(apart))
    # Of plans the fastest that is exchanged, which without an exchange is not the fastest.
    two = dict.fromkeys(("data", "tensor"), 2)
    steps = [
        predict(replace(config, pattern="full full"), "a10g:4", Strategy(**degrees), **sizes)
        for degrees in ({"fsdp": 4}, two, {"data": 4}, {"pipeline": 2, "data": 2})
    ]
    fastest = fastest_exchanged(Plan(steps[0], tuple(steps[1:]), 4, 4), ["int4"])
    seconds = [choose_exchanges(step, ["int4"]).step_seconds for step in steps[1:3]]
    assert fastest.step_seconds == min(seconds)
    step = predict(config, "a10g:8", Strategy(fsdp=8), **sizes)
    with pytest.raises(ValueError, match="got fsdp 8; wanted replicas"):
        fastest_exchanged(Plan(step, (), 1, 1), ["int4"])
    with pytest.raises(ValueError, match=r"wanted replicas \(data\) to exchange gradients"):
        save_plan(step, tmp_path / "other.json", exchanges=choose_exchanges(step, ["int4"]))


def test_what_cannot_be_chosen_is_refused():
    for degrees, message in (
        ({"tensor": 8}, "tensor 8, whose gradients are not exchanged"),
        ({"data": 2, "pipeline": 4, "microbatches": 8}, "wanted a plan without pipeline stages"),
    ):
        step = predict("llama-3.2-1b", "h100:8", Strategy(**degrees), batch=64)
        with pytest.raises(ValueError, match=message):
            choose_exchanges(step, ["int8"])
    small = LoopedConfig.tiny("full", width=32)
    step = predict(small, "h100:8", Strategy(data=8), batch=8, sequence_length=8)
    with pytest.raises(ValueError, match="no tensor has 16,384 numbers per chip under data 8"):
        choose_exchanges(step, ["int8"])
    step = predict("llama-3.2-1b", "h100:8", Strategy(data=8), batch=64, memory=1e12)
    with pytest.raises(ValueError, match="wanted ways to choose from, without tensors"):
        choose_exchanges(step, ["head@int4:gather"])
    with pytest.raises(ValueError, match="in rising order"):
        best_exchanges([2.0, 1.0], options_for([1, 1]))
    with pytest.raises(ValueError, match="options: got none"):
        best_exchanges([1.0], [])
    with pytest.raises(ValueError, match="sizes: got 1 for 2 tensors"):
        greedy_exchanges([1.0, 2.0], options_for([1, 1]), [1.0])


def test_the_command_chooses_without_a_list_too(capsys):
    """`--exchange` alone once chose nothing, and did not say so."""
    how = {"model": "llama-3.2-1b", "chips": "h100:16", "batch": 32}
    plan_command(**how, exchange=())
    assert "gradients of 16 replicas" in capsys.readouterr().out
    plan_command(**how)
    assert "gradients of" not in capsys.readouterr().out
