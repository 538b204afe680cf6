"""Parcae's loop, held against numbers that its authors' modelling file computed.

That file (`parcae_lm/models/parcae/parcae.py` of sandyresearch/parcae, commit dee8363) ran in
float32 on these numbers and tokens, from the state zero and with tables of values that are zero.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import LoopedConfig, LoopedLM, decode_step, parameter_count, prefill

CLOSE = 2e-5  # of the largest logit recorded
WIDTH, HEADS, FED = 32, 4, 32
LAYERS = {"prelude.0": "prelude.0", "core_block.0": "blocks.0", "core_block.1": "blocks.1"}
LAYERS["coda.0"] = "coda.0"
SHAPES = {
    **{f"attn.c_{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "proj")},
    "mlp.fc.weight": (2 * FED, WIDTH), "mlp.proj.weight": (WIDTH, FED),
    "norm_1.weight": (WIDTH,), "norm_2.weight": (WIDTH,),
}  # fmt: skip
OUTSIDE = {
    "adapter.A_log": (WIDTH,), "adapter.B": (WIDTH, WIDTH), "adapter.dt_bias": (WIDTH,),
    "C.weight": (WIDTH, WIDTH), "ln_f.weight": (WIDTH,), "ln_prelude.weight": (WIDTH,),
    "wte.weight": (50, WIDTH),
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 50, (2, 11))
WANTED = {
    3: (1.50053, -0.003846927, 0.5797466, -1.245492, 0.6725068, 2.161291, 0.3580215, -0.4575039),
    5: (1.031758, -0.2082873, 0.5150365, -1.503371, 0.6965894, 2.052876, 0.04619455, -0.4966526),
}
"""The first four logits after the last token of each row, by number of loops."""


def tensors() -> dict[str, np.ndarray]:
    shapes = {f"{layer}.{name}": shape for layer in LAYERS for name, shape in SHAPES.items()}
    draw, found = np.random.default_rng(7), {}
    for name, shape in sorted((shapes | OUTSIDE).items()):
        is_norm = "norm" in name or "ln_" in name
        scale = 0.3 if len(shape) == 1 else shape[-1] ** -0.5
        found[name] = (is_norm + scale * draw.normal(size=shape)).astype(np.float32)
    return found


def build(**changes: Any) -> LoopedLM:
    how: dict[str, Any] = {
        "vocabulary": 50, "width": WIDTH, "heads": HEADS, "feed_forward": FED, "prelude": "full",
        "pattern": "full full", "coda": "full", "loops": 3, "residual_gate": False,
        "norm_epsilon": 1e-5, "rope_theta": 50_000.0, "input_injection": True,
        "injection": "diagonal", "prelude_norm": True, "coda_projection": True,
        "random_start": True,
    }  # fmt: skip
    model = LoopedLM(LoopedConfig(**how | changes), rngs=nnx.Rngs(0))
    given, (width, size) = tensors(), (WIDTH, WIDTH // HEADS)
    halves = np.arange(width).reshape(HEADS, size // 2, 2).swapaxes(1, 2).ravel()

    def give(parameter: Any, array: np.ndarray) -> None:
        assert parameter.shape == array.shape
        parameter[...] = jnp.asarray(array)

    give(model.embedding.embedding, given["wte.weight"])
    give(model.norm.scale, given["ln_f.weight"])
    give(model.adapter.log_rate, given["adapter.A_log"])
    give(model.adapter.step_bias, given["adapter.dt_bias"])
    give(model.adapter.kernel, given["adapter.B"].T)
    if model.leaving is not None:
        give(model.leaving.kernel, given["C.weight"].T)
    if model.prelude[-1].end_norm is not None:
        give(model.prelude[-1].end_norm.scale, given["ln_prelude.weight"])
    for theirs, ours in LAYERS.items():
        stack, place = ours.split(".")
        block = getattr(model, stack)[int(place)]
        layer = {name: given[f"{theirs}.{name}"] for name in SHAPES}
        # Their rotary pairs are neighbours.
        give(block.mixer.query.kernel, layer["attn.c_q.weight"][halves].T)
        give(block.mixer.key.kernel, layer["attn.c_k.weight"][halves].T)
        give(block.mixer.value.kernel, layer["attn.c_v.weight"].T)
        give(block.mixer.output.kernel, layer["attn.c_proj.weight"].T)
        gate, up = np.split(layer["mlp.fc.weight"].T, 2, axis=1)
        give(block.feed_forward.gate.kernel, gate)
        give(block.feed_forward.up.kernel, up)
        give(block.feed_forward.down.kernel, layer["mlp.proj.weight"].T)
        give(block.mixer_norm.scale, layer["norm_1.weight"])
        give(block.feed_forward_norm.scale, layer["norm_2.weight"])
    return model


def test_logits_are_those_of_the_authors():
    model, tokens = build(), jnp.asarray(TOKENS)

    def difference(model: LoopedLM, loops: int) -> float:
        found, wanted = np.asarray(model(tokens, loops=loops)), np.reshape(WANTED[loops], (2, 4))
        return np.abs(found[:, -1, :4] - wanted).max() / np.abs(wanted).max()

    for loops in (3, 5):
        assert difference(model, loops) < CLOSE
    for switch in ("prelude_norm", "coda_projection"):  # without either it is another function
        assert difference(build(**{switch: False}), 3) > 100 * CLOSE
    model.adapter.log_rate[...] += 0.1
    assert difference(model, 3) > 100 * CLOSE


@pytest.mark.slow
def test_steps_learn_and_decode_as_other_loops_do():
    model, tokens = build(loops=2, random_start=False), jnp.asarray(TOKENS)
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert parameter_count(model.config) == count

    def loss(model: LoopedLM) -> tuple[jax.Array, jax.Array]:
        logits = model(tokens)
        return jnp.mean(jnp.square(logits)), logits

    gradient, wanted = jax.jit(jax.grad(loss, has_aux=True))(model)
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    assert [jax.tree_util.keystr(path) for path, leaf in leaves if not jnp.any(leaf)] == []
    _, cache = prefill(model, tokens[:, :9], 16)
    for place in (9, 10):
        logits, cache = decode_step(model, tokens[:, place], cache)
        np.testing.assert_allclose(logits, wanted[:, place], rtol=2e-5, atol=2e-5)


def test_no_state_grows_without_bound():
    """Whatever the parameters are, what is left of a state shrinks."""
    adapter = build().adapter
    adapter.log_rate[...] = jnp.linspace(-6, 6, WIDTH)
    adapter.step_bias[...] = jnp.linspace(6, -6, WIDTH)
    h, none = jnp.ones((1, WIDTH)), jnp.zeros((1, WIDTH))
    kept = adapter(jnp.concatenate([h, none], axis=-1))
    assert ((kept > 0) & (kept < 1)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"injection": "additive", "input_injection": True}, "injection"),
        ({"injection": "diagonal"}, "without input_injection"),
        ({"prelude_norm": True}, "prelude_norm without prelude"),
        ({"coda_projection": True}, "coda_projection without coda"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LoopedConfig.tiny(**changes)
