"""Looped models: a decoded token at 8k context, a training step of several loops, writing text."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from toolkit.bench.harness import Case, PlannedCase
from toolkit.looped import (
    PRESETS,
    LoopedCache,
    LoopedConfig,
    LoopedLM,
    cache_bytes_per_sequence,
    cache_bytes_per_token,
    decode_step,
    prefill,
)
from toolkit.looped.decoding.generation import decode_chunk
from toolkit.measure import hardware, program_cost

CONTEXT = 8192
ROOM = 256  # more tokens than any run decodes
PUBLISHED = 2.7  # Full+GDN against the looped Transformer, batch 8 at 8k (LT2's README, on a GPU)
LOOPS = 4
TIME_A_LOOP, MEMORY_OF_ONE = 1.1, 1.3
OVERHEAD_A_TOKEN, TOKENS, TOKENS_A_DISPATCH = 0.2e-3, 256, 8  # as `toolkit generate` does
MEMORY = "compiled peak memory"


def cases(cores: int) -> Iterator[PlannedCase]:
    """Decoding, training and writing; the published ratio is LT2's."""
    yield PlannedCase(
        f"decode tiny B=8 context={CONTEXT} float32", partial(_decode_case, "tiny", 8, None)
    )
    # The pattern of five layers repeats, so five of the 21 have the ratio of all. Their cache at
    # batch 8 takes 10.7 GB in float32; that of all 21, 45 GB.
    batch = 8 if hardware().memory_bytes > 20e9 else 2
    yield PlannedCase(
        f"decode 600m, 5 layers of 21, B={batch} context={CONTEXT} float32",
        partial(_decode_case, "600m", batch, 5),
    )
    yield PlannedCase(f"training step of tiny, {LOOPS} loops, B=8 T=256", _training_case)
    yield PlannedCase(f"overhead of streaming {TOKENS} tokens, tiny hybrid", _overhead_case)


def _decode_case(size: str, batch: int, layers: int | None, name: str) -> Case:
    configs = {kind: PRESETS[f"lt2-{kind}-{size}"] for kind in ("hybrid", "linear", "looped")}
    if layers is not None:
        configs = {
            kind: dataclasses.replace(
                config, pattern=" ".join(config.layers[:layers]), vocabulary=1024
            )
            for kind, config in configs.items()
        }
    configs = {k: dataclasses.replace(c, dtype="float32") for k, c in configs.items()}

    def facts() -> Mapping[str, Mapping[str, tuple[float, str]]]:
        return {
            kind: {
                "cache a sequence": (cache_bytes_per_sequence(config, CONTEXT), "byte"),
                "growth of it a token": (cache_bytes_per_token(config), "byte"),
            }
            for kind, config in configs.items()
        }

    return Case(
        name=name,
        contenders={kind: _decoder(config, batch) for kind, config in configs.items()},
        check=_finite,
        ours="hybrid",
        targets={"looped": PUBLISHED},
        facts=facts,
    )


def _decoder(config: LoopedConfig, batch: int) -> Callable[[], jax.Array]:
    """Steps after `CONTEXT` tokens, with an unfilled cache, because its contents do not affect the
    time."""
    started = []

    def start() -> tuple[LoopedLM, LoopedCache]:
        model = LoopedLM(config, rngs=nnx.Rngs(0))
        cache = jax.jit(lambda: LoopedCache.empty(config, batch, CONTEXT + ROOM))()
        is_length = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.integer)  # noqa: E731
        return model, jax.tree.map(
            lambda leaf: jnp.full_like(leaf, CONTEXT) if is_length(leaf) else leaf, cache
        )

    def call() -> jax.Array:
        if not started:
            started.extend(start())
        logits, started[1] = decode_step(started[0], jnp.zeros(batch, jnp.int32), started[1])
        return logits

    return call


def _training_case(name: str) -> Case:
    hybrid = dataclasses.replace(PRESETS["lt2-hybrid-tiny"], remat=True)
    programs = {
        f"{loops} loop{'s' * (loops > 1)}": _Gradient(dataclasses.replace(hybrid, loops=loops))
        for loops in (LOOPS, 1)
    }
    ours, unlooped = programs

    def facts() -> Mapping[str, Mapping[str, tuple[float, str]]]:
        memory = {name: program.memory for name, program in programs.items()}
        ratio = memory[ours] / memory[unlooped]
        verdict = "reached" if ratio <= MEMORY_OF_ONE else "NOT reached"
        print(f"  memory {ratio:.2f}x that of one loop (wanted <= {MEMORY_OF_ONE}: {verdict})")
        return {name: {MEMORY: (value, "byte")} for name, value in memory.items()}

    return Case(
        name=name,
        contenders=programs,
        check=_finite,
        ours=ours,
        targets={unlooped: 1 / (TIME_A_LOOP * LOOPS)},
        note=f"wanted: at most {TIME_A_LOOP} x {LOOPS} times one loop; each loop recomputed",
        facts=facts,
    )


class _Gradient:
    """Loss and gradients of a model on fixed tokens, compiled when first needed."""

    def __init__(self, config: LoopedConfig) -> None:
        self._config = config
        self._held: list[Any] = []

    def _program(self) -> Any:
        if not self._held:
            graph, params = nnx.split(LoopedLM(self._config, rngs=nnx.Rngs(0)))
            tokens = jax.random.randint(jax.random.key(0), (8, 257), 0, self._config.vocabulary)

            def loss(params: Any, tokens: jax.Array) -> jax.Array:
                logits = nnx.merge(graph, params)(tokens[:, :-1])
                picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
                return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

            program = jax.jit(jax.value_and_grad(loss)).lower(params, tokens).compile()
            self._held = [program, params, tokens]
        return self._held[0]

    @property
    def memory(self) -> int:
        return program_cost(self._program()).resident_bytes

    def __call__(self) -> Any:
        return self._program()(*self._held[1:])


def _overhead_case(name: str) -> Case:
    """What `stream` does around its compiled program, which is told to write no token."""
    model = LoopedLM(PRESETS["lt2-hybrid-tiny"], rngs=nnx.Rngs(0))
    how = {"temperature": jnp.float32(0.8)}
    logits, cache = prefill(model, jnp.zeros((1, 4), jnp.int32), 4 + TOKENS)
    donated = [logits, cache, None, None]

    def dispatch() -> list[int]:
        seen = []
        for start in range(0, TOKENS, TOKENS_A_DISPATCH):
            tokens, *donated[:] = decode_chunk(
                model, *donated, jax.random.key(0), how, None, start, 0
            )
            seen += [int(column[0]) for column in np.asarray(tokens[:, :TOKENS_A_DISPATCH]).T]
        return seen

    return Case(
        name=name,
        contenders={"dispatches": dispatch},
        check=_nothing_written,
        ours="dispatches",
        limit=OVERHEAD_A_TOKEN * TOKENS,
        note=f"{TOKENS // TOKENS_A_DISPATCH} calls of the program that writes "
        f"{TOKENS_A_DISPATCH} tokens at a time, told to write none; "
        f"wanted below {1e3 * OVERHEAD_A_TOKEN:g} ms a token",
    )


def _nothing_written(results: Mapping[str, Any]) -> None:
    if results["dispatches"] != [0] * TOKENS:
        raise ValueError("a program that was to write nothing wrote something")


def _finite(results: Mapping[str, Any]) -> None:
    for name, result in results.items():
        if not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(result)):
            raise ValueError(f"{name!r} gave a value that is not finite")
