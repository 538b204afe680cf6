"""Ladder residual: each part reads the stream without what the part just before it adds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import LoopedConfig, LoopedLM, decode_step, prefill
from toolkit.measure.programs import read_program
from toolkit.parallel import layout, make_mesh


def test_a_ladder_is_its_equation_in_parallel_and_token_by_token():
    config = LoopedConfig.tiny("full full", width=16, heads=2, ladder_residual=True, vocabulary=20)
    model = LoopedLM(config, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 20, (2, 6)))
    # x_i = part_i(x_(i-2)) + x_(i-1): the sum of part i - 1 over devices may run meanwhile.
    before = last = model.embedding(tokens)
    for block in model.blocks:
        parts = (
            lambda x, b=block: b.mixer(b.mixer_norm(x))[0],
            lambda x, b=block: b.feed_forward(b.feed_forward_norm(x)),
        )
        for part in parts:
            before, last = last, part(before) + last
    wanted = model.head(last)
    np.testing.assert_allclose(model(tokens), wanted, rtol=1e-5, atol=1e-5)
    logits, cache = prefill(model, tokens[:, :5], 8)
    np.testing.assert_allclose(logits, wanted[:, 4], rtol=1e-5, atol=1e-5)
    stepped, _ = decode_step(model, tokens[:, 5], cache)
    np.testing.assert_allclose(stepped, wanted[:, 5], rtol=1e-5, atol=1e-5)
    plain = LoopedLM(dataclasses.replace(config, ladder_residual=False), rngs=nnx.Rngs(0))
    assert float(jnp.abs(plain(tokens) - wanted).max()) > 1e-3


@pytest.mark.parametrize(("is_ladder", "in_a_row"), [(False, 5), (True, 3)])
def test_sums_over_devices_wait_for_every_second_one_only(is_ladder: bool, in_a_row: int):
    """The embedding's, and of two blocks four: the longest chain of the compiled program."""
    config = LoopedConfig.tiny("full full", width=16, heads=2, ladder_residual=is_ladder)
    graph, params = nnx.split(LoopedLM(config, rngs=nnx.Rngs(0)))
    mesh = make_mesh({"model": 2}, devices=jax.devices()[:2])
    placed = layout(params, mesh, "tensor").apply(params)
    run = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens))
    program = run.lower(placed, jnp.zeros((2, 6), int)).compile()
    computations, entry, _ = read_program(program.as_text() or "")
    chain: dict[str, int] = {}
    for one in computations[entry]:
        before = max((chain.get(name, 0) for name in one.operand_names), default=0)
        chain[one.name] = before + (one.opcode == "all-reduce")
    assert max(chain.values()) == in_a_row
