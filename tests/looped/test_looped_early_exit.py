"""Loops that stop early: the same values as a model that runs all loops and picks the same exit."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.attention import softmax_attention
from toolkit.looped import (
    LoopedConfig,
    LoopedLM,
    decode_step,
    decode_until_exit,
    exit_loop,
    exit_probabilities,
    generate,
    prefill,
    stream,
    with_loops,
)
from toolkit.looped.decoding.early_exit import append_until_exit, exit_rule

CLOSE: Any = {"rtol": 2e-5, "atol": 2e-5}
LOOPS, PROMPT = 4, 5


def build(pattern="full full", seed=0, **fields) -> Any:
    sizes = {"vocabulary": 40, "width": 16, "heads": 2, "exit_gate": True, "residual_gate": False}
    config = LoopedConfig.tiny(pattern, LOOPS, **(sizes | {"norm_every_loop": True} | fields))
    model: Any = LoopedLM(config, rngs=nnx.Rngs(seed))
    model.exit_gate.kernel[...] *= 3  # so that tokens differ in when they stop
    return model


def some_tokens(batch=3, time=17) -> Any:
    return jax.random.randint(jax.random.key(1), (batch, time), 0, 40)


def reference(model, tokens, threshold, shares=True):
    """The equation without caches: all loops of all tokens, of which those that have stopped keep
    their state, and the keys and values of their last loop. `shares=False` gives them those that
    the later loops would make."""
    h = model.embedding(tokens)
    batch, time = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(time), tokens.shape)
    stops = jnp.full(tokens.shape, LOOPS - 1)
    is_prompt, held, states = jnp.arange(time)[None] < PROMPT, {}, []
    for tau in range(LOOPS):
        goes_on, new = (is_prompt | (tau <= stops))[..., None], h
        for number, block in enumerate(model.blocks):
            q, k, v = block.mixer._project(block.mixer_norm(new), positions)
            if tau and shares:
                k, v = (
                    jnp.where(goes_on[..., None], *pair)
                    for pair in zip((k, v), held[number], strict=True)
                )
            held[number] = k, v
            out, _ = softmax_attention(q, k, v)
            new = block.finish(new, block.mixer.output(out.reshape(batch, time, -1)))
        new = model.norm(new) if model.config.norm_every_loop else new
        h = jnp.where(goes_on, new, h)
        states.append(h)
        if tau + 1 < LOOPS:  # loops to come do not change whether a token has stopped
            rest = [h] * (LOOPS - tau - 1)
            chosen = exit_loop(exit_probabilities(model, jnp.stack(states + rest)), threshold)
            stops = jnp.where((stops == LOOPS - 1) & (chosen == tau), tau, stops)
    return model.head(h), stops + 1


@pytest.mark.parametrize(
    "fields", [{}, pytest.param({"norm_every_loop": False}, marks=pytest.mark.slow)]
)
def test_values_are_those_of_a_model_that_runs_all_loops(fields):
    model, tokens = build(**fields), some_tokens()
    wanted, counts = map(np.asarray, reference(model, tokens, 0.8))
    others, _ = map(np.asarray, reference(model, tokens, 0.8, shares=False))
    _, cache = prefill(model, tokens[:, :PROMPT], 17)
    found, loops, differs = [], [], 0.0
    for place in range(PROMPT, 17):
        logits, cache, count = decode_until_exit(model, tokens[:, place], cache, exit="gate:0.8")
        np.testing.assert_allclose(logits, wanted[:, place], **CLOSE)
        differs = max(differs, np.abs(logits - others[:, place]).max())
        found.append(logits)
        loops.append(np.asarray(count))
    np.testing.assert_array_equal(np.stack(loops, axis=1), counts[:, PROMPT:])
    assert len({*np.ravel(loops).tolist()}) >= 3
    assert any(len({*count.tolist()}) > 1 for count in loops)  # rows of one step differ
    assert differs > 100 * CLOSE["atol"]  # the policy of the caches shows in the values


@pytest.mark.parametrize("rule", ["gate:0.8", pytest.param("kl:0.05", marks=pytest.mark.nightly)])
def test_a_row_among_others_is_what_it_is_alone(rule):
    """Alone it is the whole batch, among eight one of a gathered quarter or half: grouped heads,
    sinks, rings, loops of different windows and prompts of different lengths."""
    full = {"sinks": True, "key_value_heads": 1}
    fields = {"options": {"full": full, "window": {"sliding_window": 4}}}
    model = build("window full", windows="full -> 8 -> 8 -> full", **fields)
    tokens, lengths = some_tokens(batch=8), jnp.array([17, 3, 9, 17, 1, 12, 5, 16])
    written = generate(model, tokens, 6, exit=rule, lengths=lengths)
    _, cache = prefill(model, tokens, 32, lengths=lengths)
    singles, counts = [cache._by_layer(partial(row_alone, row)) for row in range(8)], []
    for place in range(6):
        token = written[:, place]
        logits, cache, count = decode_until_exit(model, token, cache, exit=rule)
        for row, single in enumerate(singles):
            own, singles[row], loops = decode_until_exit(
                model, token[row : row + 1], single, exit=rule
            )
            np.testing.assert_allclose(logits[row], own[0], **CLOSE)
            assert loops == count[row]
        if place < 5:
            np.testing.assert_array_equal(logits.argmax(-1), written[:, place + 1])
        counts.append(count)
    for row, single in enumerate(singles):
        jax.tree.map(
            lambda x, y, row=row: np.testing.assert_allclose(x[row], y[0], **CLOSE), cache, single
        )
    going_on = {int((count > tau).sum()) for count in counts for tau in range(1, LOOPS)}
    assert all(going_on & sizes for sizes in ({1, 2}, {3, 4}, {5, 6, 7}))


def row_alone(row, layer):
    return jax.tree.map(lambda x: x[row : row + 1], layer)


@pytest.mark.slow
def test_rows_whose_text_ended_run_no_loop():
    model, tokens = build(), some_tokens(batch=2)
    free = np.asarray(generate(model, tokens, 8, exit="gate:0.8"))
    stop = int(free[0, 1])
    wanted = free.copy()
    for row in wanted:
        if stop in row.tolist():
            row[row.tolist().index(stop) :] = stop
    found = generate(model, tokens, 8, exit="gate:0.8", stop_token=stop)
    np.testing.assert_array_equal(found, wanted)
    _, cache = prefill(model, tokens, 32)
    append, rule = jax.jit(append_until_exit), exit_rule("gate:1", model.config)
    both, ended = jnp.zeros(2, bool), jnp.array([True, False])
    every, _, _ = append(model, tokens[:, 0], cache, rule, has_ended=both)
    logits, _, loops = append(model, tokens[:, 0], cache, rule, has_ended=ended)
    assert loops.tolist() == [0, LOOPS]
    np.testing.assert_allclose(logits[1], every[1], **CLOSE)


@pytest.mark.slow
def test_the_ends_of_the_rules_are_known_models():
    options = {"full": {"sinks": True, "key_value_heads": 1, "logits_soft_cap": 2.0}}
    model, tokens = build(options=options), some_tokens(batch=2)
    every = generate(model, tokens, 12)
    np.testing.assert_array_equal(generate(model, tokens, 12, exit="gate:1"), every)
    np.testing.assert_array_equal(generate(model, tokens, 12, exit="kl:1e-30"), every)
    written = np.stack(list(stream(model, tokens, 12, exit="gate:1")), axis=1)
    np.testing.assert_array_equal(written, every)
    # A rule that always stops after the first loop is the model with one loop, and one of "kl",
    # which compares two, the model with two.
    for rule, loops in (("gate:1e-30", 1), ("kl:1e30", 2)):
        few = with_loops(model, loops)
        _, cache = prefill(model, tokens, 32)
        _, own = prefill(few, tokens, 32)
        for place in range(3):
            logits, cache, count = decode_until_exit(model, tokens[:, place], cache, exit=rule)
            wanted, own = decode_step(few, tokens[:, place], own)
            np.testing.assert_allclose(logits, wanted, **CLOSE)
            assert count.tolist() == [loops] * 2


def test_rows_that_stopped_are_not_computed():
    runs: list[int] = []

    class Counted(LoopedLM):
        def loop(self, h: Any, *args: Any, **how: Any) -> Any:
            jax.debug.callback(lambda: runs.append(len(h)))
            return super().loop(h, *args, **how)

    plain, batch = build(), 8
    model: Any = Counted(plain.config, rngs=nnx.Rngs(0))
    model.exit_gate.kernel[...] *= 3
    tokens = some_tokens(batch=batch)
    needed = ran = by_whole_batches = 0
    for threshold in (1e-30, 0.6, 0.7, 0.8, 0.9, 1):
        _, cache = prefill(plain, tokens, 32)
        jax.effects_barrier()
        runs.clear()
        _, _, loops = decode_until_exit(model, tokens[:, 0], cache, exit=f"gate:{threshold}")
        loops = np.asarray(loops)
        jax.effects_barrier()
        going_on = [int((loops > tau).sum()) for tau in range(loops.max())]
        assert runs == [min(size for size in (2, 4, 8) if size >= rows) for rows in going_on]
        needed, ran = needed + loops.sum(), ran + sum(runs)
        by_whole_batches += batch * loops.max()
    assert ran <= 1.2 * needed < by_whole_batches / 1.3


@pytest.mark.parametrize(
    ("rule", "fields", "message"),
    [
        ("gate", {}, "exit is 'gate'; want \"gate:p\" with p in"),
        ("gate:1.5", {}, "exit is 'gate:1.5'; want"),
        ("kl:-1", {}, "exit is 'kl:-1'; want"),
        ("kl:nan", {}, "exit is 'kl:nan'; want"),
        ("entropy:1", {}, "exit is 'entropy:1'; want"),
        ("gate:0.5", {"exit_gate": False}, "the model has no exit gate"),
        ("gate:0.5", {"pattern": "gdn full"}, "the state of 'gdn' layers cannot leave loops out"),
        ("kl:1", {"coda": "full", "exit_gate": False, "norm_every_loop": False}, "and coda 'full'"),
        ("kl:1", {"options": {"full": {"quantised_cache": True}}}, "exit: quantised caches have"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rule, fields, message):
    sizes = {"vocabulary": 40, "width": 16, "heads": 2, "exit_gate": True, "pattern": "full"}
    model = LoopedLM(LoopedConfig.tiny(**(sizes | {"loops": 2} | fields)), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        generate(model, some_tokens(), 2, exit=rule)


def test_exits_and_sparse_reading_exclude_each_other():
    with pytest.raises(ValueError, match=r"exit is 'gate:0\.5' and sparse 'window:4'"):
        generate(build(), some_tokens(), 2, exit="gate:0.5", sparse="window:4")
