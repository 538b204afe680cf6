"""A file, a row and a layer are a new mixer: one that no room has heard of passes them all."""

import importlib.util
import inspect
import itertools
from pathlib import Path

import jax
import numpy as np
import pytest
from toy_mixer import TOY, ToyLayer

from toolkit.attention import MIXERS, mixer
from toolkit.attention.table import mixer_page
from toolkit.looped.mixing import LAYERS

TESTS = Path(__file__).parent


def suite(path):
    """The tests of another file, by name."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, TESTS / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONTRACTS = suite("attention/test_contracts.py"), suite("attention/linear/test_state_contracts.py")
LAYER_CONTRACTS = suite("looped/test_looped_mixers.py")


def inherited(argument, *modules):
    """The tests that are given every name of a table, with the values of their other argument."""
    found = []
    for name, test in (item for module in modules for item in vars(module).items()):
        given = inspect.signature(test).parameters if name.startswith("test_") else ()
        if argument in given:
            marks = getattr(test, "pytestmark", ())
            values = dict(mark.args for mark in marks if mark.name == "parametrize")
            others = [other for other in given if other != argument]
            for chosen in itertools.product(*(values[other] for other in others)):
                params = [value for value in chosen if hasattr(value, "marks")]
                plain = (getattr(value, "values", [value])[0] for value in chosen)
                given_too = dict(zip(others, plain, strict=True))
                every = itertools.chain(marks, *(param.marks for param in params))
                # The toy is of no family of its own.
                is_late = any(mark.name in ("by_family", "nightly") for mark in every)
                late = [pytest.mark.nightly] if is_late else []
                found.append(pytest.param(test, given_too, id=name, marks=late))
    return found


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(MIXERS, "toy", TOY)
    monkeypatch.setitem(LAYERS, "toy", ToyLayer)


@pytest.mark.parametrize(("contract", "given"), inherited("row", *CONTRACTS))
def test_it_inherits_the_contracts(contract, given):
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        contract(row=TOY, **given)


@pytest.mark.parametrize(("contract", "given"), inherited("word", LAYER_CONTRACTS))
def test_its_layer_inherits_the_contracts_of_layers(contract, given):
    contract(word="toy", **given)


def test_its_line_is_on_the_page_of_mixers():
    (costs, abilities) = [line for line in mixer_page().splitlines() if line.startswith("| `toy`")]
    assert costs.endswith("| 64 KiB | no | 98,304 | 3,072 | 81,920 | 134,144 |")
    assert "| `q`, `k`, `v` | `g` per key channel, `write` per value channel |" in abilities


def test_the_instrument_of_attention_counts_measures_and_names_it():
    from toolkit.lab.attention.measurement import measure_pieces
    from toolkit.lab.attention.view import DECODE, PREFILL, Layer, Machine, costs, decode_memory

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
