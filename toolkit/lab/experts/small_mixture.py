"""Two small mixtures of experts trained on text, and the decisions of their routers.

`python -m toolkit.lab.experts.small_mixture` trains them anew, which takes some minutes, and stores
them with their routers' logits for held-out text.
"""

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from toolkit.experts import router_logits
from toolkit.looped import LoopedConfig, LoopedLM, load_model
from toolkit.measure.stored import stored_folder
from toolkit.parallel.experts.dispatch import expert_slots

LAYERS, EXPERTS, CHOSEN = 2, 8, 2
CONFIG = LoopedConfig.tiny(
    "full full", loops=1, width=48, residual_gate=False, feed_forwards="moe",
    options={"moe": {"experts": EXPERTS, "chosen": CHOSEN, "hidden": 24, "scores": "sigmoid"}},
)  # fmt: skip
BALANCE = {"plain": 0.0, "balanced": 0.02}
"""Weight of the balance loss in training, by the model's name."""
STEPS, BATCH, TIME, RATE = 600, 16, 128, 4e-3
WINDOWS = 32  # of held-out text, `TIME` bytes each
LOGITS = "logits.safetensors"


@functools.cache
def small_mixture(name: str) -> LoopedLM:
    """The stored model of a name in `BALANCE`."""
    return load_model(stored_folder("experts") / f"{name}.safetensors")


def record_of(name: str) -> dict[str, Any]:
    """The record of its training."""
    return json.loads((stored_folder("experts") / f"{name}.json").read_text(encoding="utf-8"))


def logits_of_text(name: str, text: bytes) -> Float[np.ndarray, "layers time experts"]:
    """The routers' logits for a text, padded so that one program serves every length."""
    padded = np.zeros(-(-len(text) // TIME) * TIME, np.int32)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    found = _logits(small_mixture(name), jnp.asarray(padded)[None])
    return np.asarray(found)[:, 0, : len(text)]


@functools.cache
def held_out_logits(name: str) -> Float[np.ndarray, "layers time experts"]:
    """The stored logits for `WINDOWS` windows of held-out text, one after the other."""
    from safetensors.numpy import load_file

    return load_file(stored_folder("experts") / LOGITS)[name].astype(np.float32)


@jax.jit
def _logits(
    model: LoopedLM, tokens: Int[Array, "batch time"]
) -> Float[Array, "layers batch time experts"]:
    h, found = model.embedding(tokens), []
    for block in model.blocks:
        mixed, _ = block.mix(h)
        read = block.feed_forward_norm(h + mixed)
        found.append(router_logits(read, block.feed_forward.router.kernel[...]))
        h = block.finish(h, mixed)
    return jnp.stack(found)


def main(folder: Path) -> None:
    """Train both models, and store them with the logits of held-out text."""
    from safetensors.numpy import save_file

    from toolkit.language import TrainingRun, export_language_model, train_language_model
    from toolkit.training import evaluation_batches, load_corpus

    corpus, logits = load_corpus("prose"), {}
    windows, _ = evaluation_batches(corpus.split()[1], WINDOWS, TIME, 1)
    for name, balance in BALANCE.items():
        how = {"steps": STEPS, "batch": BATCH, "sequence_length": TIME, "learning_rate": RATE}
        run = TrainingRun(CONFIG, "prose", balance=balance, **how)
        with tempfile.TemporaryDirectory() as directory:
            train_language_model(run, Path(directory) / "run", corpus=corpus)
            export_language_model(Path(directory) / "run", folder / f"{name}.safetensors")
        model = load_model(folder / f"{name}.safetensors")
        found = np.asarray(_logits(model, windows[0])).reshape(LAYERS, -1, EXPERTS)
        logits[name] = found.astype(np.float16)
    save_file(logits, folder / LOGITS)


def kept_pairs(
    experts: Int[np.ndarray, "tokens chosen"], devices: int, capacity: float
) -> tuple[Bool[np.ndarray, "tokens chosen"], int]:
    """The pairs that experts with a capacity take, and their slots for each device.

    Each of `devices` has an equal part of the tokens in their order, the last one perhaps less; an
    expert takes the first pairs of each, as in `toolkit.parallel.experts.sharded_mixture`.
    """
    tokens, chosen = experts.shape
    each = -(-tokens // devices)
    slots = min(each, expert_slots(each * chosen, EXPERTS, capacity))
    is_kept = np.zeros(experts.shape, bool)
    for first in range(0, tokens, each):
        part = experts[first : first + each].ravel()
        before = np.cumsum(part[:, None] == np.arange(EXPERTS), axis=0)
        rank = before[np.arange(len(part)), part] - 1
        is_kept[first : first + each] = (rank < slots).reshape(-1, chosen)
    return is_kept, slots


if __name__ == "__main__":
    main(Path(sys.argv[1]))
