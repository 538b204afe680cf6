"""Decoding that stops looping: a token runs through further loops only until a rule is satisfied.

A token that stops after loop e still needs keys and values in the caches of the later loops, for
the tokens that do not stop. They are copies of those of loop e, layer by layer, as in Huginn, whose
later tokens read the deepest state that an earlier one has. A copy costs one write of a token's
keys and values per layer and skipped loop, and no product with a parameter. Running the skipped
loops later would be exact, and would save nothing.

A loop is skipped, in fact and not by a mask, when all rows of the batch have stopped; the result of
a row does not depend on the others.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from toolkit._checks import checked
from toolkit.looped.blocks import run_blocks
from toolkit.looped.config import LoopedConfig
from toolkit.looped.decoding.cache import LoopedCache
from toolkit.looped.loops.rows import row_of
from toolkit.looped.mixing.unwritten import UnwrittenCache, written
from toolkit.looped.model import LoopedLM

COPIED = ("full", "window")
"""Layers whose caches can take a copy; a recurrent state cannot leave a token out."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExitRule:
    """When a row stops looping; made by `exit_rule`.

    Attributes:
        threshold: of the rule.
        kind: "gate" or "kl".
    """

    threshold: float | Array
    kind: Literal["gate", "kl"] = dataclasses.field(metadata={"static": True})


def exit_rule(words: str, config: LoopedConfig) -> ExitRule:
    """A rule in words, such as "gate:0.9" or "kl:5e-4", for a model of this configuration."""
    kind, _, number = words.partition(":")
    try:
        threshold = float(number)
    except ValueError:
        threshold = float("nan")
    highest = {"gate": 1.0, "kl": float("inf")}.get(kind)
    if highest is None or not 0 < threshold <= highest or threshold == float("inf"):
        raise ValueError(f'exit is {words!r}; want "gate:p" with p in (0, 1], or "kl:e", e > 0')
    if kind == "gate" and not config.exit_gate:
        raise ValueError(f'exit is {words!r}, and the model has no exit gate; "kl:e" needs none')
    if config.recursion is not None:
        raise ValueError(f"exit is {words!r}, and recursion {config.recursion!r} decides already")
    if config.coda:  # also that of loops with messages
        raise ValueError(f"exit reads logits after every loop, and coda {config.coda!r} follows")
    if other := sorted({*config.layers} - {*COPIED}):
        raise ValueError(
            f"exit: the state of {other[0]!r} layers cannot leave loops out; want layers out of "
            f"{', '.join(COPIED)}"
        )
    if any(getattr(config, word).quantised_cache for word in {*config.layers}):
        raise ValueError("exit: quantised caches have factors per loop; want quantised_cache=False")
    return ExitRule(threshold, kind)  # type: ignore[arg-type]


@checked
def decode_until_exit(
    model: LoopedLM, token: Int[Array, "batch"], cache: LoopedCache, *, exit: str
) -> tuple[Float[Array, "batch vocabulary"], LoopedCache, Int[Array, "batch"]]:
    """`decode_step` whose loops end early, row by row.

        "gate:p"    after the first loop with p_1 + ... + p_t >= p, of `exit_probabilities`
        "kl:e"      after the first loop with KL(P_t || P_(t-1)) < e, of the next token's
                    distributions by loop

    Args:
        model: the model, whose loops have layers of softmax attention.
        token: one token per sequence.
        cache: from `prefill`, which runs all loops, or an earlier step; consumed.
        exit: the rule; "gate:1" runs all loops.

    Returns:
        float32 logits after the loop at which each row stopped, the cache with copies in the loops
        that were skipped (see the module's text), and the number of loops of each row.

    Cost: a step with as many loops as the row that runs longest; "kl" also runs the head after
        every loop.

    Source: Zhu et al., "Scaling Latent Reasoning via Looped Language Models" (Ouro), 2025, for
        "gate"; Geiping et al. (Huginn), 2025, section 6.1, for "kl" and the copies.

    Example:
        >>> from flax import nnx
        >>> config = LoopedConfig.tiny(loops=3, width=16, heads=2, exit_gate=True)
        >>> model = LoopedLM(config, rngs=nnx.Rngs(0))
        >>> cache = LoopedCache.empty(config, batch=1, capacity=8)
        >>> decode_until_exit(model, jnp.array([7]), cache, exit="gate:1.0")[2].tolist()
        [3]
    """
    return _decode(model, token, cache, exit_rule(exit, model.config))


def append_until_exit(
    model: LoopedLM, tokens: Int[Array, "batch"], cache: LoopedCache, rule: ExitRule
) -> tuple[Float[Array, "batch vocabulary"], LoopedCache, Int[Array, "batch"]]:
    """`decode_until_exit` without checks, to be called inside compiled programs."""
    h, before = run_blocks(
        model.prelude, model.embedding(tokens), caches=cache.prelude, tokens=tokens
    )
    injected, rows, loops, progress = h, model.loop_rows(), [], None
    h, finished = model.start(injected), jnp.zeros(tokens.shape, bool)
    made: Any = None  # the token's keys and values, by layer
    count = jnp.zeros(tokens.shape, jnp.int32)
    for tau, caches in enumerate(cache.loops):
        unwritten = tuple(map(UnwrittenCache, caches))

        def run(h, made, tau=tau, unwritten=unwritten, finished=finished):
            row = row_of(rows, tau)
            how = {"caches": unwritten, "tokens": tokens}
            new, own = model.loop(h, *row, tau=tau, injected=injected, **how)
            keeps = lambda old, new: jnp.where(_beside(finished, new), old, new)  # noqa: E731
            return (new, own) if made is None else jax.tree.map(keeps, (h, made), (new, own))

        count += ~finished
        if made is None:
            h, made = run(h, made)
        else:
            h, made = jax.lax.cond(finished.all(), lambda *kept: kept, run, h, made)
        windows = model.config.loop_windows[tau]
        loops.append(
            tuple(
                written(cache, token, is_ring=window is not None)
                for cache, token, window in zip(caches, made, windows, strict=True)
            )
        )
        if tau + 1 < len(cache.loops):
            stops, progress = _stops(model, h, rule, progress)
            finished |= stops
    return model.head(h), LoopedCache(tuple(loops), before, cache.coda), count


_decode = jax.jit(append_until_exit, donate_argnames="cache")


def _stops(model, h, rule, progress) -> tuple[Bool[Array, "batch"], Any]:
    """Whether a row stops after this loop, and what the rule keeps for the next."""
    if rule.kind == "gate":
        # Stayed: the probability of going on past every loop so far, in logarithms.
        stayed, total = (0.0, 0.0) if progress is None else progress
        score = model.exit_gate(h.astype(jnp.promote_types(h.dtype, jnp.float32)))[..., 0]
        total += jnp.exp(stayed + jax.nn.log_sigmoid(score))
        # A threshold of 1 runs all loops, whatever rounding makes of the sum.
        stops = (total >= rule.threshold) & (rule.threshold < 1)
        return stops, (stayed + jax.nn.log_sigmoid(-score), total)
    logs = jax.nn.log_softmax(model.head(h))
    if progress is None:
        return jnp.zeros(h.shape[:1], bool), logs
    return (jnp.exp(logs) * (logs - progress)).sum(-1) < rule.threshold, logs


def _beside(rows, array):
    """[batch] with the axes of an array [batch, ...]."""
    return rows.reshape(-1, *(1,) * (array.ndim - 1))
