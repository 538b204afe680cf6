"""A file, a row and a layer are a new mixer: one that no room has heard of passes them all."""

import dataclasses
import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest
from toy_mixer import TOY, ToyLayer

from toolkit.attention import MIXERS, mixer, register
from toolkit.attention.table import mixer_page
from toolkit.looped import LAYERS, register_layer
from toolkit.testing import check_mixer
from toolkit.testing.layers import layer_contracts
from toolkit.testing.sequences import sequence_contracts
from toolkit.testing.states import state_contracts

TESTS = Path(__file__).parent


def suite(path):
    """The tests of another file, by name."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, TESTS / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def registered():
    register(TOY)
    register_layer(ToyLayer)
    yield
    del MIXERS["toy"], LAYERS["toy"]


@pytest.mark.slow
def test_it_holds_the_contract_of_mixers_and_layers():
    held = check_mixer(TOY, word="toy")
    assert {*sequence_contracts(), *state_contracts()} <= {*held}
    assert {f"layer_{name}" for name in layer_contracts()} <= {*held}


def sees_the_future(q, k, v, g, write, **options):
    out, state = TOY.function(q, k, v, g, write, **options)
    return out + 1e-3 * v.mean(axis=1, keepdims=True), state


def forgets_documents(*inputs, segment_ids=None, **options):
    return TOY.function(*inputs, **options)


def without_a_gradient(q, k, *others, **options):
    return TOY.function(q, jax.lax.stop_gradient(k), *others, **options)


def step_of_another_scale(*inputs):
    out, state = TOY.step(*inputs)
    return 1.001 * out, state


BROKEN = {
    "the_future_does_not_change_the_past": {"function": sees_the_future},
    "packed_documents_equal_separate_ones": {"function": forgets_documents},
    "one_token_equals_the_reference": {"function": without_a_gradient},
    "prefill_and_steps_equal_one_pass": {"step": step_of_another_scale},
}


@pytest.mark.parametrize("contract", BROKEN)
def test_a_mixer_that_breaks_a_contract_does_not_hold_it(contract):
    with pytest.raises(AssertionError):
        sequence_contracts()[contract](dataclasses.replace(TOY, **BROKEN[contract]))


def test_a_check_names_all_that_does_not_hold(monkeypatch):
    def broken(row):
        raise ValueError("\nthe shapes of q and k differ\nand more")

    names = {"one": broken, "another": lambda row: None, "third": broken}
    monkeypatch.setattr("toolkit.testing.sequence_contracts", lambda: names)
    monkeypatch.setattr("toolkit.testing.state_contracts", lambda is_grouped: {})
    with pytest.raises(AssertionError) as found:
        check_mixer(TOY)
    assert str(found.value).splitlines() == [
        "toy: 2 of 3 contracts do not hold",
        "one: ValueError the shapes of q and k differ",
        "third: ValueError the shapes of q and k differ",
    ]


def test_its_line_is_on_the_page_of_mixers():
    (costs, abilities) = [line for line in mixer_page().splitlines() if line.startswith("| `toy`")]
    assert costs.endswith("| 64 KiB | no | 98,304 | 3,072 | 81,920 | 134,144 |")
    assert "| `q`, `k`, `v` | `g` per key channel, `write` per value channel |" in abilities


def test_the_instrument_of_attention_counts_measures_and_names_it():
    from toolkit.bench.mixers.layer_costs import DECODE, PREFILL, Layer, measure_pieces
    from toolkit.lab.attention.cost_curves import Machine
    from toolkit.lab.attention.instrument import costs, decode_memory

    mixers = ("full", "toy")
    sizes = {"context_length": 4096, "heads": 4, "head_size": 64, "window": 512, "mixers": mixers}
    view = costs(machine=Machine("a machine", 1e11, 1e10, 4), **sizes)
    memory = decode_memory(
        layers=2,
        sequences=3,
        bytes_per_number=2,
        capacity_bytes=80e9,
        capacity_name="H100",
        **sizes,
    )
    for shown in (view, memory):
        assert "the Toy" in shown.sentence()
        assert any("Toy" in heading for heading in shown.data())
    layer = Layer(heads=2, head_size=16, window=8, softmax="dense")
    lengths = {PREFILL: (32,), DECODE: (32,)}
    *_, (done, total, _, points) = measure_pieces(layer, lengths=lengths, mixers=mixers)
    assert done == total
    assert {point.mixer for point in points} == {"full", "toy"}


def test_the_instrument_of_mixers_shows_its_state_and_costs(monkeypatch):
    from toolkit.lab.mixers import panel

    monkeypatch.setitem(panel.MENU, "Toy", "toy")  # the menu is made as the table is when imported
    shown = panel.MixerPanel(left="toy", right="gla")
    assert "Toy: " in shown.view.sentence()
    assert "Toy moves" in panel.MixerCostPanel(left="toy", right="gla").view.sentence()
    before = shown.view.left.state_norm
    suite("lab/mixers/test_mixer_view.py").test_reach_and_state_are_those_of_the_library("toy")
    shown.write_strength = 1.0  # moves any gate between 0 and 1, whatever its name
    assert np.all(shown.view.left.state_norm > before)


@pytest.mark.slow
def test_the_benchmark_times_it():
    from toolkit.bench.mixers import steps as mixer_steps
    from toolkit.bench.mixers import suite as mixers

    plans = [plan for plan in mixers.cases(2) if plan.name.startswith("toy ")]
    assert len(plans) == 7
    cases = [
        mixers.sequence_case(mixer("toy"), 40, 16, 2, "sequence", backward=backward)
        for backward in (False, True)
    ]
    cases.append(mixer_steps.step_case(mixer("toy"), 1, "step"))
    for case in cases:
        case.check({name: call() for name, call in case.contenders.items()})
