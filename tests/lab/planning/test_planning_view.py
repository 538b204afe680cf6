"""The planning panels show what the planning room predicts, and label every number."""

from typing import Any

import numpy as np
import pytest

from toolkit.lab.planning.fits import COUNTS, MODELS, SCHEMES, fits
from toolkit.lab.planning.memory import chip_memory
from toolkit.lab.planning.timeline import SPEEDS, STRATEGIES, timeline_of
from toolkit.looped import parameter_count
from toolkit.planning import Strategy, predict, what_fits
from toolkit.planning.models import model_of

STATE: dict[str, Any] = {
    "model": "llama-3-8b", "chip": "h100", "replicas": 2, "fsdp": 4, "tensor": 2, "pipeline": 2,
    "shard_optimizer": True, "recompute": "layer", "sequences": 2, "context": 4096,
}  # fmt: skip


def test_a_chip_holds_what_is_predicted():
    view = chip_memory(**STATE)
    strategy = Strategy(
        data=2, fsdp=4, tensor=2, pipeline=2, shard_optimizer=True, recompute="layer",
        microbatches=2, head_chunks=16,
    )  # fmt: skip
    wanted = predict("llama-3-8b", "h100:32", strategy, batch=32, sequence_length=4096)
    assert view.prediction == wanted
    sizes = view.data()["per chip (bytes)"]
    assert sum(sizes[:-1]) == sizes[-1] == wanted.memory.total


@pytest.mark.parametrize(
    ("change", "verdict"), [({}, " fits "), ({"fsdp": 1, "context": 131_072}, " does not fit ")]
)
def test_words_give_the_verdict_and_say_that_it_is_modelled(change, verdict):
    view = chip_memory(**{**STATE, **change})
    assert verdict in view.sentence()
    assert "modelled" in view.sentence()
    assert "Modelled" in view.footnote()


def test_a_strategy_that_does_not_divide_the_model_is_refused():
    with pytest.raises(ValueError, match="pipeline 64 is more than the 32 layers"):
        chip_memory(**{**STATE, "pipeline": 64})


def test_the_map_holds_what_fits_under_every_scheme():
    found = what_fits(["llama-3-8b"], [f"h100:{count}" for count in COUNTS], sequence_length=4096)
    row = MODELS.index("llama-3-8b")
    for scheme in SCHEMES:
        view = fits(chip="h100", scheme=scheme, sequences=1, context=4096)
        fitting = []
        for column, count in enumerate(COUNTS):
            one = found[0, column, scheme]
            assert view.share(row, column) == (one and one.memory.total / one.limit)
            fitting += [count] * bool(one and one.fits)
        assert view.fewest(row, scheme) == min(fitting, default=None)
        assert "Modelled" in view.sentence()


def test_sentences_of_the_notebook():
    alone = {**STATE, "replicas": 1, "fsdp": 1, "tensor": 1, "pipeline": 1,
             "shard_optimizer": False, "recompute": "none", "sequences": 1}  # fmt: skip

    def per_parameter(**changes):
        memory = chip_memory(**{**alone, **changes}).prediction.memory
        count = parameter_count(model_of("llama-3-8b"))
        return np.array([memory.parameters, memory.optimizer, memory.gradients]) / count

    whole = per_parameter()
    assert whole == pytest.approx([4, 8, 4], rel=0.1)
    assert per_parameter(replicas=8) == pytest.approx(whole)
    assert (per_parameter(fsdp=8) < whole / 4).all()
    assert per_parameter(replicas=8, shard_optimizer=True) == pytest.approx([4, 1, 4], rel=0.1)
    plain, again = (
        fits(chip="h100", scheme=scheme, sequences=1, context=4096)
        for scheme in ("ZeRO-3", "ZeRO-3, recomputing")
    )
    cells = [(row, column) for row in range(len(MODELS)) for column in range(len(COUNTS))]
    blue = [np.mean([(one.share(*at) or 2) <= 1 for at in cells]) for one in (plain, again)]
    assert blue[0] < 0.5 < blue[1]
    large = MODELS.index("llama-3-70b")  # 4 times the chips
    assert 0.9 < plain.share(large, COUNTS.index(256)) / plain.share(large, COUNTS.index(64)) < 1
    assert plain.fewest(large, "ZeRO-3") is None


@pytest.mark.parametrize(("layout", "lost"), [*zip(STRATEGIES, (71, 82), strict=True)])
def test_a_stored_step_is_slower_on_slower_links_and_says_what_is_modelled(layout, lost):
    view = timeline_of(layout=layout, speed=0.5, straggler=1.0, part=100.0)
    steps = [view.by_speed[speed].step_seconds for speed in SPEEDS]
    assert steps == sorted(steps, reverse=True)
    assert round(1e3 * (steps[SPEEDS.index(0.5)] - steps[SPEEDS.index(1.0)])) == lost
    assert view.now.hidden > 0  # asynchronous, as compiled
    assert view.window[1] == pytest.approx(view.now.step_seconds)
    assert "Durations modelled" in view.sentence()
    assert "as compiled" in view.footnote()
    slow = timeline_of(layout=layout, speed=0.5, straggler=2.0, part=60.0)
    assert slow.now.step_seconds > view.now.step_seconds
