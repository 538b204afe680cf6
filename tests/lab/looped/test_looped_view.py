"""Inside a looped model: what the panels show against the model itself and against theory."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.attention import MIXERS
from toolkit.lab.kit.text import MOST
from toolkit.lab.looped import reader
from toolkit.lab.looped.panel import BEST, look
from toolkit.lab.looped.reader import (
    MAX_LOOPS,
    MAX_TOKENS,
    PATTERNS,
    influence,
    loop_gates,
    read,
    small_model,
    trace,
)
from toolkit.lab.looped.state import EVEN, first_byte, look_inside, sink_heading
from toolkit.looped import (
    LoopedCache,
    LoopedConfig,
    LoopedLM,
    cache_bytes_per_sequence,
    decode_step,
    load_model,
    parameter_count,
)
from toolkit.looped.parameters import token_flops
from toolkit.looped.theory import tokens_reached
from toolkit.measure import program_cost
from toolkit.measure.stored import stored_folder

TEXT = "The class statement defines a class object."
TOKENS = jnp.asarray(list(TEXT.encode().ljust(MAX_TOKENS)), jnp.int32)
# Float32 sums in another order; hidden states have a norm of about 100.
HIDDEN_TOLERANCE = 1e-3
GRADIENT_TOLERANCE = 1e-3
COST_SHARE = 0.12  # what the compiler counts beyond matrix products and mixers
BUDGET_BYTES = 2_000_000

every_model = pytest.mark.parametrize("gated", [False, True])
every_pattern = pytest.mark.parametrize("pattern", PATTERNS.values())
SETTINGS = {
    "token": 30, "loops": 4, "pattern": "window window", "window": 4, "output_gate": False,
    "residual_gate": True,
}  # fmt: skip
INSIDE = SETTINGS | {"context_length": 4096}


@every_pattern
@every_model
def test_the_reader_computes_what_the_model_computes(pattern: str, gated: bool) -> None:
    small = small_model(pattern, gated)
    path = stored_folder("models") / f"{pattern.replace(' ', '-')}{'-gated' * gated}.safetensors"
    model = load_model(path)
    assert model.config == small.config
    logits, hidden = nnx.jit(lambda m, t: m(t, return_loops=True))(model, TOKENS[None])
    seen = trace(small.model, TOKENS, small.switches(small.config.window.sliding_window, True))
    loops = small.config.loops
    np.testing.assert_allclose(seen.hidden[1 : loops + 1], hidden[:, 0], atol=HIDDEN_TOLERANCE)
    np.testing.assert_allclose(seen.logits[loops - 1], logits[0], atol=HIDDEN_TOLERANCE)


@pytest.mark.slow
def test_influence_is_the_gradient_of_the_likeliest_byte() -> None:
    small, token, loops = small_model("gdn full", False), 20, 2
    switches = small.switches(8, True)
    seen = trace(small.model, TOKENS, switches)
    model, rho = small.model, loop_gates(small.model)

    def logit(start):
        h = start[None]
        for loop in range(loops):
            h, _ = reader._loop(model, h, rho[loop], switches, reader._recurrent)
        return jnp.max(model.head(h)[0, token])

    wanted = jnp.linalg.norm(jax.jit(jax.grad(logit))(seen.hidden[0]), axis=-1)
    found = influence(model, seen, jnp.asarray(token), jnp.asarray(4), switches)
    np.testing.assert_allclose(found[loops - 1], wanted, rtol=GRADIENT_TOLERANCE, atol=1e-5)
    assert not np.any(found[:4, token + 1 :])
    assert not np.any(found[4:])


def test_the_recurrent_state_is_the_one_after_each_byte() -> None:
    small, token = small_model("gdn full", False), 11
    block = small.model.blocks[0]
    norm = trace(small.model, TOKENS, small.switches(8, True)).inside.state[0, 0, token]
    start = small.model.embedding(TOKENS[None, : token + 1])
    cache = block.mixer.empty_cache(small.config, 1, MAX_TOKENS)
    _, cache = block.mixer(block.mixer_norm(start), cache=cache)
    np.testing.assert_allclose(norm, np.linalg.norm(cache.state), rtol=1e-5)
    assert small.config.layers[0] in MIXERS


@pytest.mark.parametrize("window", [1, 2, 4, 8])
def test_no_influence_comes_from_beyond_the_reach_and_some_from_its_end(window: int) -> None:
    view = look(TEXT, **SETTINGS | {"window": window, "token": 40})
    for loop, reach in enumerate(view.reach):
        assert reach == 2 * (loop + 1) * (window - 1) + 1
        seen = np.flatnonzero(view.share[loop])
        assert seen[-1] == view.token
        assert seen[0] == max(0, view.token + 1 - reach)
    config = small_model("window window", False).config
    config = config.with_options(window={"sliding_window": window})
    assert view.reach[-1] == tokens_reached(config)
    full = look(TEXT, **SETTINGS | {"pattern": "full full"})
    assert full.reach == (None,) * 4
    assert np.all(full.share[:, : full.token + 1] > 0)


def test_shares_chances_and_losses_are_what_they_say() -> None:
    view = look(TEXT, **SETTINGS)
    np.testing.assert_allclose(view.share.sum(axis=1), 1, rtol=1e-5)
    for loop in range(view.loops):
        back = view.distance(loop)
        assert view.share[loop, view.token - back : view.token + 1].sum() >= MOST
        assert view.share[loop, view.token - back + 1 : view.token + 1].sum() < MOST
        chances = [chance for _, chance in view.best[loop]]
        assert chances == sorted(chances, reverse=True)
        assert len(chances) == BEST
    np.testing.assert_allclose(view.loss, -np.log(view.chances[:, 1:]).mean(axis=1))
    reading = read(TEXT, "window window", 4, False, True)
    np.testing.assert_allclose(np.exp(reading.log_probabilities).sum(-1), 1, rtol=1e-6)


@every_pattern
def test_looping_is_seen_to_help_up_to_the_loops_of_training(pattern: str) -> None:
    view = look(TEXT, **SETTINGS | {"pattern": pattern, "window": 8})
    assert view.loss[0] > view.loss[1] > view.loss[2]
    assert view.loss[0] - view.loss[3] > 0.3


def test_gates_are_switches_and_the_output_gate_is_another_model() -> None:
    def first_of(**changes):
        return look(TEXT, **SETTINGS | {"pattern": "full full"} | changes)

    plain = first_of()
    assert not np.allclose(first_of(residual_gate=False).loss, plain.loss)
    losses = [one.held_out_loss for one in (first_of(output_gate=True), plain)]
    assert losses[0] != losses[1]
    view = look_inside(TEXT, **INSIDE | {"residual_gate": False})
    assert not view.columns["rho, mean"].any()
    assert look_inside(TEXT, **INSIDE).columns["rho, mean"].any()


def test_inside_shows_states_where_there_are_any_and_sinks_with_and_without_gate() -> None:
    def sinks(view):
        return {
            name: values for name, values in view.columns.items() if name.endswith("gate (share)")
        }

    hybrid = look_inside(TEXT, **INSIDE | {"pattern": "gdn full"})
    assert [name for name in hybrid.columns if name.startswith("state")] == ["state, layer 1"]
    assert [*sinks(hybrid)] == [sink_heading(gate, 2) for gate in (False, True)]
    softmax = look_inside(TEXT, **INSIDE | {"pattern": "full full"})
    assert [*softmax.everywhere] == ["size of h", "change of h"]
    assert [*sinks(softmax)] == [sink_heading(gate, n) for gate in (False, True) for n in (1, 2)]
    reading = read(TEXT, "full full", 4, False, True)
    first = np.asarray(reading.seen.inside.first)[1, 0, 8 : len(TEXT)].mean()
    np.testing.assert_allclose(softmax.columns[sink_heading(False, 1)][1], first)
    np.testing.assert_allclose(first_byte(reading)[0, 1], first)
    even = np.mean(1 / (np.arange(8, len(TEXT)) + 1))
    assert softmax.columns[EVEN] == pytest.approx(even)
    windows = look_inside(TEXT, **INSIDE)
    for pattern in (windows, hybrid, softmax):
        size, change = (pattern.columns[name][:4] for name in ("size of h", "change of h"))
        assert (np.diff(size) > 0).all()
        assert (change > 0.15 * size).all()  # no fixed point
    assert not windows.columns[EVEN].any()  # 4 bytes never see the first from the ninth on
    assert all(not first.any() for first in sinks(windows).values())
    hidden = np.asarray(reading.seen.hidden[:, 29])
    np.testing.assert_allclose(
        np.linalg.norm(hidden[2]), softmax.columns["size of h"][1], rtol=1e-6
    )
    change = np.linalg.norm(hidden[2] - hidden[1])
    np.testing.assert_allclose(change, softmax.columns["change of h"][1], rtol=1e-6)


@every_pattern
def test_costs_are_those_of_the_library_and_of_the_compiler(pattern: str) -> None:
    columns = look_inside(TEXT, **INSIDE | {"pattern": pattern}).columns
    config = small_model(pattern, False).config.with_options(window={"sliding_window": 4})
    assert columns["cache (bytes)"][3] == cache_bytes_per_sequence(config, 4096)
    operations = token_flops(config, 4096)
    assert columns["operations per token (FLOP)"][3] == operations
    steps = np.diff(columns["operations per token (FLOP)"])
    np.testing.assert_array_equal(steps, steps[0])


def test_operations_of_latent_attention_are_those_of_a_compiled_step() -> None:
    sizes = {"latent_size": 32, "key_size": 16, "rope_size": 8, "value_size": 16}
    config = LoopedConfig.tiny("mla", width=64, vocabulary=16, options={"mla": sizes})
    model = LoopedLM(config, rngs=nnx.Rngs(0))
    cache = LoopedCache.empty(config, 1, 64)
    token = jnp.zeros(1, jnp.int32)
    step = jax.jit(lambda m, t, c: decode_step(m, t, c)[0])
    counted = program_cost(step.lower(model, token, cache).compile()).flops
    counted -= 2 * config.heads * 32 * 64  # a branch that is taken where an empty slot holds NaN
    assert counted == pytest.approx(token_flops(config, 64), rel=COST_SHARE)


def test_operations_agree_with_the_compiled_program() -> None:
    # One full layer on t tokens at once: the mean context of a causal text is half its length.
    config = LoopedConfig.tiny("full", loops=1, width=64, vocabulary=16)
    model = LoopedLM(config, rngs=nnx.Rngs(0))
    time = 32
    compiled = jax.jit(lambda m, t: m(t)).lower(model, jnp.zeros((1, time), jnp.int32)).compile()
    counted = program_cost(compiled).flops / time
    assert counted == pytest.approx(token_flops(config, time), rel=COST_SHARE)


@every_model
@every_pattern
def test_stored_models_have_a_record_and_fit_the_budget(pattern: str, gated: bool) -> None:
    small = small_model(pattern, gated)
    record = small.record
    assert LoopedConfig(**record["configuration"]["model"]) == small.config
    assert record["result"]["parameters"] == parameter_count(small.config)
    assert 120_000 < record["result"]["parameters"] < 150_000
    assert (small.config.width, small.config.loops, len(small.config.layers)) == (64, 4, 2)
    assert record["result"]["steps"] == record["configuration"]["training"]["steps"]
    assert 0.5 < record["result"]["held_out_loss"] < 1.5
    assert record["environment"]["command"].startswith("toolkit train ")
    assert len(record["corpus"]["sha256"]) == 64
    assert small.switches(8, True).has_output_gate == gated
    own = tuple(pattern.replace(" ", "-") for pattern in PATTERNS.values())
    files = [path for path in stored_folder("models").iterdir() if path.name.startswith(own)]
    assert sum(path.stat().st_size for path in files) < BUDGET_BYTES
    assert "/" not in json.dumps(record["environment"]["command"]).replace("runs/looped/", "")


def test_short_and_long_texts() -> None:
    with pytest.raises(ValueError, match="text: got 'a', wanted at least two bytes"):
        look("a", **SETTINGS)
    view = look("word " * 20, **SETTINGS | {"token": 99})
    assert len(view.reading.raw) == MAX_TOKENS
    assert view.token == MAX_TOKENS - 1
    assert "last 36 bytes did not fit" in view.sentence()
    short = look_inside("ab", **INSIDE)
    assert np.isfinite(short.columns["size of h"]).all()
    assert short.sentence()


def test_words_and_tables_tell_the_numbers() -> None:
    view = look(TEXT, **SETTINGS | {"loops": 6})
    said, table = view.sentence(), view.table()
    assert "Measured here" in said
    assert f"{view.loss[-1]:.2f} nats per byte" in said
    assert "more is new to it" in said
    assert len(table.rows) == 3 + 2 * BEST + 2 * len(TEXT)
    assert table.columns == ("what", "byte", *(f"loop {n}" for n in range(1, 7)))
    inside = look_inside(TEXT, **INSIDE | {"loops": MAX_LOOPS})
    assert "Modelled at 4,096 tokens" in inside.sentence()
    assert len(inside.table().rows) == MAX_LOOPS
    assert all(len(row) == len(inside.table().columns) for row in inside.table().rows)


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="jax 0.7 compiles one switch again")
@every_pattern
def test_no_switch_compiles_again(pattern: str) -> None:
    look(TEXT, **SETTINGS | {"pattern": pattern})
    before = trace._cache_size(), influence._cache_size()
    for changes in ({"window": 7}, {"loops": 2}, {"token": 3}, {"output_gate": True},
                    {"residual_gate": False}):  # fmt: skip
        look(TEXT + "!", **SETTINGS | {"pattern": pattern} | changes)
    assert (trace._cache_size(), influence._cache_size()) == before
