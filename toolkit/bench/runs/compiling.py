"""How long a gradient takes to trace and compile, and to run: layers with experts beside dense ones,
and layers that repeat traced once beside all of them traced."""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from toolkit.bench.harness import Case, PlannedCase, bound
from toolkit.language import next_byte_loss
from toolkit.looped import LoopedConfig, LoopedLM

DEPTHS, WIDTH, BATCH, TIME = (2, 8), 64, 2, 64
EXPERTS = {"experts": 32, "chosen": 4, "hidden": 32, "shared_hidden": 32}
TOLERANCE = 1e-5  # of the losses with and without a scan
FED = {"dense": "swiglu", "experts": "moe"}
SCANNED, UNROLLED = ", scanned", ", unrolled"
COMPILING = "processor time to trace and compile"


def cases(cores: int) -> Iterator[PlannedCase]:
    """Few layers and many; no program is taken from a cache on disk."""
    del cores  # XLA takes all
    jax.config.update("jax_enable_compilation_cache", False)
    for depth in DEPTHS:
        name = f"gradient of {depth} layers of {WIDTH}, B={BATCH} T={TIME} float32"
        yield PlannedCase(name, partial(compile_case, depth))


def compile_case(depth: int, name: str) -> Case:
    """Four programs, each traced and compiled once, which does not depend on what else runs."""
    contenders: dict[str, Callable[[], Any]] = {}
    facts: dict[str, Mapping[str, tuple[Any, ...]]] = {}
    batch = (jnp.zeros((BATCH, TIME), jnp.int32),) * 2
    for kind, word in FED.items():
        config = LoopedConfig.tiny(
            " ".join(["full"] * depth), width=WIDTH, residual_gate=False, feed_forwards=word,
            options={"moe": EXPERTS} if word == "moe" else {},
        )  # fmt: skip
        graph, params = nnx.split(LoopedLM(config, rngs=nnx.Rngs(0)))
        for how, is_scanned in ((SCANNED, True), (UNROLLED, False)):
            loss = partial(next_byte_loss, graph, scan_layers=is_scanned)
            jax.clear_caches()
            start = time.process_time()
            program = jax.jit(jax.value_and_grad(loss)).lower(params, batch).compile()
            facts[kind + how] = {COMPILING: (time.process_time() - start, "s", "measured")}
            contenders[kind + how] = bound(program, (params, batch))
    note = "{chosen} of {experts} experts of {hidden}, and a shared one".format(**EXPERTS)
    how = {"ours": "experts" + SCANNED, "note": note, "facts": lambda: facts}
    return Case(name, contenders, _same_losses, **how)


def _same_losses(results: Mapping[str, Any]) -> None:
    """A scan changes no loss."""
    for kind in FED:
        scanned, unrolled = (float(results[kind + how][0]) for how in (SCANNED, UNROLLED))
        if not abs(scanned - unrolled) <= TOLERANCE * abs(unrolled):
            raise ValueError(f"{kind}: a scan has loss {scanned:.6f}, and no scan {unrolled:.6f}")
