"""Tiny random models of Hugging Face transformers, and the comparison of ours with them.

Their code runs in PyTorch without kernels, in float32.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from toolkit.looped import (
    decode_step,
    load_checkpoint,
    load_model,
    prefill,
    save_checkpoint,
    save_model,
)

TOLERANCE = 1e-5  # relative to the largest logit
TIME, WRITTEN = 13, 20
IDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 60}


def made(name, sizes, config="Config"):
    """A random model of theirs, by the name of its class, with weights far from initial ones."""
    import torch
    import transformers

    settings = getattr(transformers, name + config)(**sizes)
    settings._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(settings).eval()
    generator = torch.Generator().manual_seed(0)
    computed = ("inv_freq", "slope_rate", "_decay")
    with torch.no_grad():
        for key, parameter in model.state_dict().items():
            if parameter.dtype.is_floating_point and not key.endswith(computed):
                is_scale = parameter.ndim == 1 and not key.endswith(("A_log", "bias"))
                spread = 0.2 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_((parameter if is_scale else 0.0) + spread)
    return model


def described(folder, **settings):
    """Change settings of a config.json; "absent" takes one out."""
    file = folder / "config.json"
    changed = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({name: v for name, v in changed.items() if v != "absent"}))


def some_tokens(time=TIME):
    return np.random.default_rng(0).integers(0, 60, (2, time))


def logits_of(theirs, tokens):
    import torch

    with torch.no_grad():
        return theirs(torch.tensor(tokens)).logits.numpy()


def error_of(model, tokens, wanted):
    """The largest difference of our logits, relative to the largest of theirs."""
    found = np.asarray(jax.jit(type(model).__call__)(model, tokens))
    assert np.std(wanted) > 0.3
    return np.abs(found - wanted).max() / np.abs(wanted).max()


def parameters(model):
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): np.asarray(variable[...]) for path, variable in flat}


def assert_same_parameters(model, other):
    ours, theirs = parameters(model), parameters(other)
    assert list(ours) == list(theirs)
    for path, array in ours.items():
        np.testing.assert_array_equal(theirs[path], array, err_msg=path)


def assert_writes_their_text(model, theirs, tokens):
    """The tokens that both choose, ours with a cache and theirs without."""
    step = jax.jit(decode_step)
    logits, cache = prefill(model, jnp.asarray(tokens), TIME + WRITTEN)
    for _ in range(WRITTEN):
        best = logits_of(theirs, tokens)[:, -1].argmax(-1)
        np.testing.assert_array_equal(np.argmax(logits, axis=-1), best)
        tokens = np.concatenate([tokens, best[:, None]], axis=1)
        logits, cache = step(model, jnp.asarray(best), cache)


def check_reading(theirs, folder):
    """What we read has their logits and, once more written and read by us, writes their text."""
    model, tokens = load_checkpoint(folder), some_tokens()
    assert error_of(model, tokens, logits_of(theirs, tokens)) <= TOLERANCE
    save_model(model, folder / "ours")
    assert_writes_their_text(load_model(folder / "ours"), theirs, tokens)
    return model


def check_there_and_back(theirs, folder, style):
    """`check_reading`, and what we write is read by transformers and, to the bit, by us."""
    import transformers

    model, tokens = check_reading(theirs, folder), some_tokens()
    save_checkpoint(model, folder / "back", style=style, settings=IDS)
    back = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "back", attn_implementation="eager"
    ).eval()
    assert type(back) is type(theirs)
    assert error_of(model, tokens, logits_of(back, tokens)) <= TOLERANCE
    again = load_checkpoint(folder / "back")
    assert_same_parameters(model, again)
    return model, again
