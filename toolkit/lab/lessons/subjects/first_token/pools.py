"""Two devices, of which one reads prompts and one writes, and what a learner's hand-over does."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from toolkit.lab.lessons.drawing import draw_matrices
from toolkit.lab.lessons.outline import Show, WrongAnswer, ask_array
from toolkit.looped import (
    LoopedCache,
    LoopedConfig,
    LoopedLM,
    cache_bytes_per_sequence,
    decode_step,
    generate,
    pad_prompts,
    prefill,
)

PROMPTS = (b"The state ", b"A model that", b"def read(")
WRITTEN, CAPACITY = 8, 32


class Handed(NamedTuple):
    """A cache in the memory of the device that reads or of the one that writes."""

    cache: LoopedCache
    is_sent: bool


class Machines:
    """A device that reads prompts and one that writes, and a count of what they were asked."""

    def __init__(self) -> None:
        config = LoopedConfig.tiny("full", loops=1, width=32, heads=2)
        self.model = LoopedLM(config, rngs=nnx.Rngs(0))
        self.reads, self.steps = 0, 0
        self._batch = LoopedCache.empty(self.model.config, len(PROMPTS), CAPACITY)
        self._tokens = jnp.zeros(len(PROMPTS), jnp.int32)

    def read(self, prompt: bytes) -> tuple[int, Handed]:
        """The first token after a prompt, and its cache, in the reader's memory."""
        self.reads += 1
        tokens, lengths = pad_prompts([prompt])
        logits, cache = prefill(self.model, tokens, CAPACITY, lengths=lengths)
        return int(logits.argmax()), Handed(cache, is_sent=False)

    def send(self, handed: Handed) -> Handed:
        """The cache in the writer's memory."""
        return Handed(jax.device_put(handed.cache, self._tokens.sharding), is_sent=True)

    def insert(self, row: int, handed: Handed, token: int) -> None:
        """Put a cache and the last token into a row of the writer's batch."""
        if not handed.is_sent:
            raise WrongAnswer("The cache is in the reader's memory: send it first.")
        self._batch = self._batch.insert(jnp.array([row]), handed.cache)
        self._tokens = self._tokens.at[row].set(token)

    def step(self) -> list[int]:
        """The next token of every row."""
        self.steps += 1
        if self.steps >= WRITTEN:
            raise WrongAnswer(f"{self.steps} steps; one writes a token of every row.")
        logits, self._batch = decode_step(self.model, self._tokens, self._batch)
        self._tokens = logits.argmax(-1).astype(jnp.int32)
        return self._tokens.tolist()


def judge_pools(pools: Callable[..., Any], show: Show) -> str:
    """Run the learner's two pools on prompts; refuse texts other than those of one machine."""
    machines = Machines()
    acts = machines.read, machines.send, machines.insert, machines.step
    texts = ask_array(pools, (len(PROMPTS), WRITTEN), list(PROMPTS), WRITTEN, *acts)
    tokens, lengths = pad_prompts(PROMPTS)
    wanted = np.asarray(generate(machines.model, tokens, WRITTEN, lengths=lengths))
    show(draw_matrices(texts, wanted, xlabel="token", ylabel="request", title="alone"))
    if machines.reads > len(PROMPTS):
        raise WrongAnswer(f"{machines.reads} prompts were read; the cache is there to go on from.")
    if (texts[:, :-1] == wanted[:, 1:]).all():
        raise WrongAnswer("The first token is missing: reading the prompt gives it.")
    if not (texts == wanted).all():
        raise WrongAnswer("These are not the texts that each prompt gets alone.")
    size = len(PROMPTS) * cache_bytes_per_sequence(machines.model.config, CAPACITY)
    return f"Right: {len(PROMPTS)} caches, {size:,} bytes, were sent; the texts are the same."
