"""The packaged small looped models, in one form for all their layers.

Windows and output gates are switches of the reader (`Switches`), not of the program: every softmax
layer is read as a "full" one with a gate, and the switches set its window and turn the gate off.
Models that differ only in these share their compiled programs.
"""

import dataclasses
import functools
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from toolkit._compat import set_value
from toolkit.lab.kit.stored import stored_folder
from toolkit.lab.looped.reader import MAX_TOKENS, Switches
from toolkit.looped import LoopedConfig, LoopedLM, load_model

PATTERNS = {
    "two sliding windows": "window window",
    "gated delta net, full attention": "gdn full",
    "full attention twice": "full full",
}
"""Menu entry -> pattern; each was trained with and without output gate."""


@dataclasses.dataclass(frozen=True)
class SmallModel:
    """A trained model of the toolkit's own."""

    config: LoopedConfig  # as it was trained
    model: LoopedLM  # as the reader takes it: "full" for "window", and with output gates
    record: dict[str, Any]  # how it was made: configuration, corpus, environment, result

    def switches(self, window: int, has_residual_gate: bool) -> Switches:
        """The reader's switches for this model, with `window` tokens for its "window" layers."""
        windows = [window if word == "window" else MAX_TOKENS for word in self.config.layers]
        return Switches(
            jnp.asarray(windows),
            jnp.asarray(getattr(self.config, self.config.layers[-1]).output_gate),
            jnp.asarray(has_residual_gate),
        )


@functools.cache
def small_model(pattern: str, has_output_gate: bool) -> SmallModel:
    """A packaged model, cached; `pattern` is a value of `PATTERNS`."""
    name = pattern.replace(" ", "-") + "-gated" * has_output_gate
    path = stored_folder("models") / f"{name}.safetensors"
    trained = load_model(path)
    record = json.loads(path.with_suffix(".json").read_text())
    return SmallModel(trained.config, _as_read(trained), record)


def _as_read(trained: LoopedLM) -> LoopedLM:
    """The same parameters under one configuration; gates that were not trained are zero."""
    pattern = trained.config.pattern.replace("window", "full")
    options = {word: o for word, o in trained.config.options.items() if word in pattern.split()}
    config = dataclasses.replace(trained.config, pattern=pattern, options=options)
    config = config.with_options(full={"output_gate": True})
    model = nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
    known = dict(nnx.to_flat_state(nnx.state(trained, nnx.Param)))
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value = known[path][...] if path in known else np.zeros(parameter.shape, np.float32)
        set_value(parameter, jnp.asarray(value))
    return model
