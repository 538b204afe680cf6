"""Exercises in notebooks: the solution passes, and wrong answers fail for the stated reason."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipywidgets")

from toolkit.lab import (
    BalancePanel,
    ChipMemoryPanel,
    CutPanel,
    DecodePanel,
    DropPanel,
    GoodputPanel,
    LoopPanel,
    MeshPanel,
    MixerPanel,
    PipelinePanel,
    RacePanel,
    SentPanel,
    SpeedupPanel,
    StepPanel,
)
from toolkit.schedules.collectives import named_topology, optimum

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"


def said_by_check(name: str, capsys: pytest.CaptureFixture[str], **names: object) -> str:
    """Run the cell that defines `check` with these names; what it printed."""
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    sources = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (source,) = (source for source in sources if "def check(" in source)
    exec(compile(source, name, "exec"), dict(names))
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"left": "retention", "right": "gla", "decay_strength": 0}, "Right: retention and gla"),
        ({"left": "linear", "right": "retention", "decay_strength": 0}, "Right: linear"),
        ({"left": "retention", "right": "gdn"}, "Not yet: the share of one word differs by"),
        ({"left": "linear", "right": "linear"}, "Two different mixers, please"),
        ({"left": "linear", "right": "gdn", "token": 1}, "Two different mixers, please"),
        ({"left": "gdn", "right": "hgrn2", "decay_strength": 0, "write_strength": 0}, "nothing"),
    ],
)
def test_two_mixers_that_remember_alike(answer: dict, words: str, capsys) -> None:
    panel = MixerPanel(**({"token": 19} | answer))
    assert words in said_by_check("mixers", capsys, panel=panel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"window": 2, "loops": 4}, "Right: 9 bytes instead of 15"),
        ({"window": 2, "loops": 1}, "Short enough, but it loses"),
        ({"window": 8, "loops": 4}, "Not yet: yours reaches 57 bytes"),
        ({"pattern": "full full"}, "Layers: two sliding windows, please"),
        ({"window": 2, "output_gate": True}, "Layers: two sliding windows, please"),
    ],
)
def test_shorter_reach_and_yet_better(answer: dict, words: str, capsys) -> None:
    panel, reader = LoopPanel(**answer), LoopPanel()
    assert words in said_by_check("looped", capsys, panel=panel, reader=reader)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"points": [(0, 1), (0.3, 1), (0.6, 0.4), (1, 0)]}, "Right: 1.009 times the best"),
        ({"points": [(0, 1), (1, 0)]}, "Not yet: yours ends at 1.062 times the best loss"),
        ({"points": [(0, 1), (0.2, 1), (0.3, 1), (0.6, 0.4), (1, 0)]}, "at most four"),
        ({"budget": 500}, "1,000 evaluations, please"),
        ({"problem": "quadratic 100"}, "Noisy quadratic, batch 10"),
    ],
)
def test_a_schedule_near_the_best(answer: dict, words: str, capsys) -> None:
    assert words in said_by_check("lr_search", capsys, race=RacePanel(**answer))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"mesh": "4x2", "scheme": "zero3+tensor"}, "Right: zero3+tensor on 4x2 holds 12.7%"),
        ({"mesh": "2x4", "scheme": "zero3"}, "Not yet: small enough, but it sends 336 KiB"),
        ({"mesh": "1x8", "scheme": "tensor"}, "Not yet: small enough, but it sends 896 KiB"),
        ({"mesh": "2x4", "scheme": "tensor"}, "Too much: a device holds 25.1%"),
    ],
)
def test_a_layout_that_holds_and_sends_little(answer: dict, words: str, capsys) -> None:
    panel, step = MeshPanel(**answer), StepPanel()
    assert words in said_by_check("sharding", capsys, panel=panel, step=step)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"model": "kimi_k2", "kind": "v6e", "slices": 8, "batch": 1}, "Right: tpla-lean, g = 8"),
        ({}, "Not yet: dcp is fastest, and exact"),
        ({"slices": 8, "degree": 2, "batch": 1024, "context": 2**20}, "does not fit"),
    ],
)
def test_where_an_approximation_pays(answer: dict, words: str, capsys) -> None:
    assert words in said_by_check("latent", capsys, panel=DecodePanel(**answer))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"fsdp": 32, "recompute": "layer"}, "Right: fsdp 32, recompute layer"),
        ({"fsdp": 4, "tensor": 8, "recompute": "elementwise"}, "Not yet: it fits, but takes 0.51"),
        ({"fsdp": 32}, "Too much: "),
        ({"fsdp": 64, "recompute": "layer"}, "Too many: 64 chips."),
        ({"fsdp": 32, "recompute": "layer", "context": 4096}, "Not the task yet"),
    ],
)
def test_a_cluster_that_holds_seventy_billion(answer: dict, words: str, capsys) -> None:
    panel = ChipMemoryPanel(**{"model": "llama-3-70b", "context": 8192} | answer)
    assert words in said_by_check("planning", capsys, panel=panel)


@pytest.mark.parametrize(
    ("place", "words"), [(0, "Right: "), (1, "Not yet: "), (None, "That is no other library.")]
)
def test_the_rival_that_beats_us_by_most(place: int | None, words: str, capsys) -> None:
    times: Any = SpeedupPanel(method="every", work="every").view
    libraries = ("transformers", "torch", "jax.nn", "flash")
    rivals = [time for time in times.times if time.contender.startswith(libraries)]
    ours = next(time for time in times.times if time.is_ours)
    answer = ours if place is None else sorted(rivals, key=times.ratio)[place]
    least = next(at for at, time in enumerate(times.times) if time is answer)
    names = {
        "panel": SpeedupPanel(method="every", work="every", point=least + 1),
        "times": times,
        "libraries": libraries,
    }
    assert words in said_by_check("speedups", capsys, **names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"system": "tactic"}, "Right: tactic finds all eight with 4.9% of the bytes"),
        ({"system": "hata"}, "Too much: hata finds all, but reads 10.2%"),
        ({"system": "pqcache"}, "Not yet: with pqcache the model finds 4 of 8"),
        ({"system": "tactic", "context": 1024}, "4,096 tokens, please"),
    ],
)
def test_eight_needles_for_few_bytes(answer: dict, words: str, capsys) -> None:
    panel = DropPanel(**{"budget": 64, "context": 4096} | answer)
    assert words in said_by_check("sparsity", capsys, panel=panel)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"rate": 1e-2, "step": 40}, "Right: 1.23 times an even load after 40 steps of 0.01"),
        ({"rate": 3e-3, "step": 60}, "Not yet: 1.53 times an even load after 60 steps"),
        ({"rate": 1e-2, "step": 50, "model": "balanced"}, "trained without a balance loss"),
        ({"rate": 1e-2, "step": 61}, "At most 60 steps, please"),
    ],
)
def test_a_bias_that_levels_the_loads_soon(answer: dict, words: str, capsys) -> None:
    balance = BalancePanel(**({"model": "plain", "layer": 2} | answer))
    assert words in said_by_check("experts", capsys, balance=balance)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"moves": "F4@0 to 4; F3@1 to 3"}, "Right: it ends at 40, and holds up to 5 activations"),
        ({"moves": "F4@0 to 4"}, "Not yet: it ends at 41, and holds up to 5"),
        ({}, "Not yet: it ends at 41, and holds up to 4"),
        ({"schedule": "GPipe"}, "1F1B on 4 devices with 8 microbatches, times 1"),
        ({"delay": 0.25}, "a delay of 0.5, please"),
    ],
)
def test_moves_that_hide_the_messages(answer: dict, words: str, capsys) -> None:
    hands = PipelinePanel(**({"times": 1.0, "delay": 0.5} | answer))
    assert words in said_by_check("pipelines", capsys, hands=hands)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"cable": 1}, "Right: cable 1, "),
        ({"cable": 2}, "Not yet: cable 2, "),
        ({"cable": 0}, "Choose a cable."),
        ({"cable": 1, "speed": 0.75}, "half the speed, please"),
    ],
)
def test_a_cable_that_may_be_slow(answer: dict, words: str, capsys) -> None:
    boxes = CutPanel(**({"network": "a100:2x4", "speed": 0.5} | answer))
    rooms = {"named_topology": named_topology, "optimum": optimum}
    assert words in said_by_check("collectives", capsys, boxes=boxes, **rooms)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"density": 0.065}, "Right: from 1 / 16"),
        ({"density": 0.2}, "a smaller share does so too"),
        ({"density": 0.01}, "Not yet: at 1.0% of 16"),
    ],
)
def test_a_share_from_which_dense_sends_less(answer: dict, words: str, capsys) -> None:
    assert words in said_by_check("gradients", capsys, rows=SentPanel(replicas=16, **answer))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"slots": 64}, "Right: "),
        ({}, "Not yet: 41 requests"),
        ({"slots": 64, "bound": 100}, "bounds should stay"),
        ({"slots": 64, "count": 120}, "Not run yet"),
    ],
)
def test_two_pools_with_enough_slots(answer: dict, words: str, capsys) -> None:
    assert words in said_by_check("serving", capsys, pools=GoodputPanel(**answer))
