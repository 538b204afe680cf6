"""Stored numbers of accepted drafts by row and round, because compiling takes a minute.

`python -m toolkit.lab.sparsity.stored_acceptance` writes it anew.
"""

import functools
import json
from typing import Any

import numpy as np
from jaxtyping import Int

from toolkit.lab.kit.stored import stored_folder

FILE = "acceptance.json"
SYSTEMS = {"HATA": "hata:48", "Quest": "quest:48", "a window": "window:48"}
PROMPTS = (64, 80, 96, 112, 128, 144)  # tokens of the rows' prompts
LENGTH, DRAFTS = 48, 4


@functools.cache
def stored() -> dict[str, Any]:
    """The whole record."""
    return json.loads((stored_folder("sparsity") / FILE).read_text(encoding="utf-8"))


def kept_by_round(system: str) -> Int[np.ndarray, "rounds rows"]:
    """Drafts that each row kept, -1 in rounds after its end."""
    return np.array(stored()["kept"][system])


def main() -> None:
    """Write with every system's drafts, and check the text against dense decoding's."""
    import jax.numpy as jnp

    from toolkit.language import load_language_model
    from toolkit.looped import generate, generate_speculatively
    from toolkit.measure import environment
    from toolkit.training import load_corpus

    model = load_language_model(stored_folder("models") / "full-full.safetensors")
    _, held_out = load_corpus("prose").split()
    rows = [held_out[1000 * n : 1000 * n + PROMPTS[-1]] for n in range(len(PROMPTS))]
    prompts, lengths = jnp.asarray(np.stack(rows), jnp.int32), jnp.asarray(PROMPTS, jnp.int32)
    dense = np.asarray(generate(model, prompts, LENGTH, lengths=lengths))
    kept = {}
    for name, words in SYSTEMS.items():
        how = {"drafts": DRAFTS, "lengths": lengths, "sparse": words}
        found = generate_speculatively(model, model, prompts, LENGTH, **how)
        if (np.asarray(found.tokens) != dense).any():
            raise RuntimeError(f"drafts of {name} changed the text")
        kept[name] = found.by_round.tolist()
    record = {**environment(), "command": "python -m toolkit.lab.sparsity.stored_acceptance"}
    path = stored_folder("sparsity") / FILE
    path.write_text(json.dumps({"environment": record, "kept": kept}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
