"""Loops that stop early: the same values as a model that runs all loops and picks the same exit."""

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


@pytest.mark.parametrize("pattern", ["full", pytest.param("window full", marks=pytest.mark.slow)])
def test_a_row_does_not_depend_on_the_others(pattern):
    options = {"window": {"sliding_window": 4}} if "window" in pattern else {}
    model, tokens = build(pattern, options=options), some_tokens()
    together = generate(model, tokens, 9, exit="gate:0.8")
    for row in range(3):
        alone = generate(model, tokens[row : row + 1], 9, exit="gate:0.8")
        np.testing.assert_array_equal(alone[0], together[row])


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


def test_skipped_loops_are_not_computed():
    runs: list[int] = []

    class Counted(LoopedLM):
        def loop(self, *args: Any, **how: Any) -> Any:
            jax.debug.callback(lambda: runs.append(1))
            return super().loop(*args, **how)

    model: Any = Counted(build().config, rngs=nnx.Rngs(0))
    tokens = some_tokens(batch=2)
    for rule, loops in (("gate:1e-30", 1), ("gate:1", LOOPS), ("kl:1e30", 2)):
        _, cache = prefill(model, tokens, 32)
        jax.effects_barrier()
        runs.clear()
        logits, _, _ = decode_until_exit(model, tokens[:, 0], cache, exit=rule)
        jax.block_until_ready(logits)
        jax.effects_barrier()
        assert len(runs) == loops


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
