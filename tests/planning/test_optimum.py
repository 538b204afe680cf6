"""Plans against every strategy tried one by one, on spaces that are drawn at random."""

import itertools
import random

import pytest

from toolkit.planning import Constants, Strategy, cluster, plan, predict
from toolkit.planning.memory.gpus import usable_bytes
from toolkit.planning.strategy import RECOMPUTE, SCHEDULES

WITHIN = 1.01  # of the fastest of all
CHUNK = 256  # tokens of a sequence whose logits exist at one time


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


def space(seed):
    """A model on a few chips of some kind, whose links may be slow."""
    rng = random.Random(seed)
    chips = f"{rng.choice(['h100', 'a100', 'v5e', 'v5p', 'l4', 't4', 'a10g'])}:"
    chips += str(rng.choice([2, 4, 8] if seed < 10 else [2, 4, 8, 16]))
    constants = Constants(link=rng.choice([0.05, 0.2, 0.8]), slowdown=rng.choice([1.0, 1.3]))
    model = rng.choice(["llama-3.2-1b", "llama-3-8b"])
    sizes = {
        "batch": rng.choice([2, 4, 8, 16, 32, 64]), "sequence_length": rng.choice([512, 2048, 8192])
    }  # fmt: skip
    return model, chips, sizes, constants, rng.choice([0.0, 0.1])


def every(model, chips, sizes, constants, reserve):
    """All strategies that fit, in the order of every schedule, without layers that recompute
    differently."""
    where, batch = cluster(chips), sizes["batch"]
    limit, count = usable_bytes(where) * (1 - reserve), where.chips
    for data, fsdp, tensor in itertools.product(divisors(count), repeat=3):
        if count % (data * fsdp * tensor) or batch % (data * fsdp):
            continue
        pipeline = count // (data * fsdp * tensor)
        orders = [(name, own or 2) for name, own in SCHEDULES.items() if pipeline > 1]
        for (name, own), parts, recompute, chunks, sharded in itertools.product(
            orders or [("1f1b", 1)], divisors(batch // data // fsdp), RECOMPUTE,
            sorted({1, 2, sizes["sequence_length"] // CHUNK}), {False, data > 1},
        ):  # fmt: skip
            try:
                strategy = Strategy(
                    data=data, fsdp=fsdp, tensor=tensor, pipeline=pipeline, schedule=name,
                    chunks=own, microbatches=parts, recompute=recompute, head_chunks=chunks,
                    shard_optimizer=sharded,
                )  # fmt: skip
                found = predict(model, chips, strategy, memory=limit, constants=constants, **sizes)
            except ValueError:
                continue
            if found.fits:
                yield found


def compared(seed):
    """Seconds of the plan and of all strategies by head; None where nothing fits."""
    model, chips, sizes, constants, reserve = drawn = space(seed)
    fitting = list(every(*drawn))
    if not fitting:
        return None
    found = plan(model, chips, constants=constants, reserve=reserve, **sizes).best
    assert found.fits
    fastest = min(each.step_seconds for each in fitting)
    streamed = [
        each.step_seconds
        for each in fitting
        if each.strategy.head_chunks == sizes["sequence_length"] // CHUNK
        and each.strategy.shard_optimizer == (each.strategy.data > 1)
    ]
    return found.step_seconds / fastest, min(streamed, default=float("inf")) / fastest


def check(seeds):
    ratios = [found for seed in seeds if (found := compared(seed))]
    assert len(ratios) > len(seeds) / 2
    assert all(ratio <= WITHIN for ratio, _ in ratios), ratios
    # A head that is always streamed, as plans once had it, misses.
    assert any(control > WITHIN for _, control in ratios)


def test_a_few_plans_are_as_fast_as_anything():
    check((1, 3, 4, 5))


@pytest.mark.nightly
def test_fifty_plans_are_as_fast_as_anything():
    check(range(50))


def test_what_fits_is_not_refused():
    """Four sequences on 64 chips, one on each pipeline: fewer microbatches than stages."""
    strategy = Strategy(fsdp=4, tensor=8, pipeline=2)
    by_hand = predict("llama-3-8b", "h100:64", strategy, batch=4)
    assert by_hand.fits
    found = plan("llama-3-8b", "h100:64", batch=4).best
    assert found.fits
    assert found.step_seconds <= by_hand.step_seconds


def test_a_batch_that_a_refusal_names_is_planned():
    with pytest.raises(ValueError, match="nearest batch that works: 37"):
        plan("llama-3.2-1b", "h100:74", batch=3)
    assert plan("llama-3.2-1b", "h100:74", batch=37).best.fits


@pytest.mark.slow
def test_most_of_three_thousand_chips_cuts_are_bounded_away():
    """Counted, for seconds depend on the machine: 4,394 once had their memory predicted."""
    found = plan("llama-3-8b", "h100:3072", batch=6144)
    assert found.considered < 1000
    assert found.best.step_seconds < 0.49  # with buffers as they are allocated
