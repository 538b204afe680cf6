"""Parcae's checkpoints, held against numbers that its authors' modelling file computed.

That file (`parcae_lm/models/parcae/parcae.py`, commit dee8363) ran in float32 on these tensors and
tokens, from the state zero.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.looped import (
    LoopedLM,
    decode_step,
    load_checkpoint,
    load_model,
    parameter_count,
    prefill,
    save_checkpoint,
    save_model,
)

CLOSE = 1e-5  # of the largest logit
SETTINGS: dict[str, Any] = {
    "_class_name": "ParcaeConfig", "vocab_size": 50, "padded_vocab_size": 50, "n_embd": 48,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 40,
    "recurrent_embedding_dimension": 48, "recurrent_intermediation_embedding_dimension": 40,
    "norm_class_name": "RMSNorm", "norm_eps": 1e-3, "mlp_class_name": "BaseMLP",
    "nonlin_name": "ReLU2", "qk_norm": True, "prelude_norm": True, "tie_embeddings": True,
    "injection_type": "diagonal", "n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 2,
    "n_layers_in_coda": 2, "mean_recurrence": 3, "mean_backprop_depth": 2,
    "init_strategy": "scaled", "state_init": "like-init", "rope_settings": {"rope_base": 50000},
    "logit_softcap": None,
}  # fmt: skip
LAYERS = [f"{stack}.{layer}" for stack in ("prelude", "core_block", "coda") for layer in (0, 1)]
TOKENS = np.random.default_rng(0).integers(0, 50, (2, 11))
WANTED = {
    3: (0.08492038, 4.796835, -3.159078, -4.394969, 0.09569338, 2.785247, -5.364327, -1.659603),
    5: (1.140271, 4.557837, -4.180626, -2.646002, -0.02124419, 3.797337, -4.969879, -0.3325386),
}
"""The first four logits after the last token of each row, by number of loops."""
TEXT = (
    (1, 27, 27, 27, 27, 27, 27, 27, 27, 27, 27, 27, 12, 12, 1, 27, 27, 27, 27, 27),
    (12,) * 20,
)
"""What follows each row after three loops, by the largest logit."""


def tensors() -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (50, 48), "transformer.C.weight": (48, 48),
        "transformer.adapter.A_log": (48,), "transformer.adapter.dt_bias": (48,),
        "transformer.adapter.B": (48, 48), "transformer.ln_f.weight": (48,),
        "transformer.ln_prelude.weight": (48,),
    }  # fmt: skip
    for place, layer in enumerate(LAYERS):
        here = f"transformer.{layer}."
        shapes |= {f"{here}attn.c_{part}.weight": (48, 48) for part in ("q", "k", "v", "proj")}
        shapes |= {f"{here}norm_{number}.weight": (48,) for number in (1, 2)}
        shapes |= {f"{here}mlp.fc.weight": (40, 48), f"{here}mlp.proj.weight": (48, 40)}
        if place % 2:
            shapes[f"{here}attn.ve_gate.weight"] = (4, 32)
            shapes[f"value_embeds.{place}.weight"] = (50, 48)
    draw, found = np.random.default_rng(7), {}
    for name, shape in sorted(shapes.items()):
        is_scale = "norm_" in name or "ln_" in name
        found[name] = (is_scale + 0.3 * draw.normal(size=shape)).astype(np.float32)
    return found


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path)


def write(folder, **changes):
    from safetensors.numpy import save_file

    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SETTINGS | changes))
    return folder


def difference(model, loops):
    call = jax.jit(lambda model, tokens: model(tokens, loops=loops))
    found = np.asarray(call(model, jnp.asarray(TOKENS)))[:, -1, :4]
    wanted = np.reshape(WANTED[loops], (2, 4))
    return np.abs(found - wanted).max() / np.abs(wanted).max()


def test_logits_and_text_are_those_of_the_authors(folder):
    model = load_checkpoint(folder)
    assert model.config.pattern == model.config.prelude == "full value_embedding"
    assert parameter_count(model.config) == sum(tensor.size for tensor in tensors().values())
    for loops in (3, 5):
        assert difference(model, loops) < CLOSE
    table = model.coda[1].mixer.table.embedding
    table[...] = jnp.roll(table[...], 1, axis=0)  # of other tokens
    assert difference(model, 3) > 100 * CLOSE
    save_model(load_checkpoint(folder), folder / "ours")
    model, text, step = load_model(folder / "ours"), [], jax.jit(decode_step)
    logits, cache = prefill(model, jnp.asarray(TOKENS), 32)
    for _ in TEXT[0]:
        text.append(np.argmax(logits, axis=-1))
        logits, cache = step(model, jnp.asarray(text[-1]), cache)
    np.testing.assert_array_equal(np.transpose(text), TEXT)


def test_what_is_written_reads_back_to_the_bit(folder, tmp_path):
    from safetensors.numpy import load_file

    model, place = load_checkpoint(folder), tmp_path / "written"
    save_checkpoint(model, place, style="parcae")
    settings = json.loads((place / "config.json").read_text())
    assert {name: settings[name] for name in SETTINGS} == SETTINGS
    written, read = load_file(place / "model.safetensors"), tensors()
    assert written.keys() == read.keys()
    for name, tensor in read.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
    assert load_checkpoint(place).config == model.config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"injection_type": "add"}, "injection_type 'add'; known is 'diagonal'"),
        ({"norm_class_name": "LayerNorm"}, "norm_class_name 'LayerNorm'; known is 'RMSNorm'"),
        ({"recurrent_embedding_dimension": 64}, "recurrent_embedding_dimension other than that"),
        ({"n_layers_in_coda": None}, "does not say 'n_layers_in_coda'"),
        ({"n_layers_in_coda": 3}, "value embedding or its gate alone"),
        ({"init_strategy": "takase"}, "init_strategy 'takase'; known are 'scaled'"),
        ({"rope_settings": {"use_rope": False}}, "rope_settings .*; known are plain ones"),
    ],
)
def test_what_is_not_this_model_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_checkpoint(write(tmp_path, **changes))


def test_such_a_layer_wants_the_tokens(folder):
    block = load_checkpoint(folder).blocks[1]
    with pytest.raises(ValueError, match="called without tokens; call the model itself"):
        block(jnp.zeros((1, 3, 48)))
    assert isinstance(load_checkpoint(folder), LoopedLM)
