"""Decoding that stops looping: a token runs through further loops only until a rule is satisfied.

A token that stops after loop e still needs keys and values in the caches of the later loops, for
the tokens that do not stop. They are copies of those of loop e, layer by layer, as in Huginn, whose
later tokens read the deepest state that an earlier one has. A copy costs one write of a token's
keys and values per layer and skipped loop, and no product with a parameter. Running the skipped
loops later would be exact, and would save nothing.

Rows that have stopped are left out, in fact and not by a mask: a loop runs on the whole batch, a
half or a quarter of it, the smallest that holds all rows that go on, and not at all when none does.
The result of a row does not depend on the others.
"""

import dataclasses
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from toolkit._checks import checked
from toolkit._pytrees import register_dataclass
from toolkit.looped.blocks import run_blocks
from toolkit.looped.config import LoopedConfig
from toolkit.looped.decoding.cache import LoopedCache
from toolkit.looped.loops.rows import row_of
from toolkit.looped.mixing.unwritten import UnwrittenCache, written
from toolkit.looped.model import LoopedLM

PARTS = (1, 2, 4)
"""A loop runs on the batch divided by one of these. More would follow the rows that go on more
closely, and each takes as long to compile as a step of the whole batch."""

COPIED = ("full", "window")
"""Layers whose caches can take a copy; a recurrent state cannot leave a token out."""


@register_dataclass
@dataclasses.dataclass(frozen=True)
class ExitRule:
    """When a row stops looping; made by `exit_rule`."""

    threshold: float | Array  # of the rule
    kind: Literal["gate", "kl"] = dataclasses.field(metadata={"static": True})  # "gate" or "kl"


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

    Cost: FLOPs of the loops that each row runs, but for the rows that fill up a half or a quarter
        of the batch, which also copies the keys and values of its rows; parameters are read once
        per loop of the row that runs longest. "kl" runs the head after every loop. The program
        compiles as many sizes of batch: a half and a quarter take as long as the whole.

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


class _State(NamedTuple):
    """What a step knows of its rows after a loop; every array begins with batch."""

    h: Array  # the stream after the last loop that a row ran
    made: Any  # the token's keys and values in that loop, by layer
    progress: Any  # what the rule keeps from loop to loop
    finished: Bool[Array, "batch"]  # whether a row runs no further loop


def append_until_exit(
    model: LoopedLM, tokens: Int[Array, "batch"], cache: LoopedCache, rule: ExitRule, *,
    has_ended: Bool[Array, "batch"] | None = None,
) -> tuple[Float[Array, "batch vocabulary"], LoopedCache, Int[Array, "batch"]]:  # fmt: skip
    """`decode_until_exit` without checks, to be called inside compiled programs.

    Rows whose text `has_ended` run no loop: their logits, and what their caches take in, mean
    nothing.
    """
    injected, before = run_blocks(
        model.prelude, model.embedding(tokens), caches=cache.prelude, tokens=tokens
    )
    inputs, h = {"tokens": tokens, "injected": injected}, model.start(injected)
    batch, windows, rows = len(tokens), model.config.loop_windows, model.loop_rows()

    def run(state, caches, inputs, tau, like):
        """Loop `tau`, which is traced; its windows are those of loop `like`."""
        how = {"caches": tuple(map(UnwrittenCache, caches)), **inputs}
        h, made = model.loop(state.h, *row_of(rows, tau), tau=like, **how)
        return _State(h, made, *_stops(model, h, rule, state.progress, tau))

    def run_whole(like, state, tau):
        new = run(state, cache.loops[like], inputs, tau, like)
        return jax.tree.map(partial(_unless, state.finished), state, new)

    def run_few(size, alike, state, tau):
        goes_on = ~state.finished
        chosen = jnp.argsort(state.finished)[:size]  # those that go on, and others to fill up
        rank = jnp.minimum(jnp.cumsum(goes_on) - 1, size - 1)  # of a row among those that go on
        pick = partial(jax.tree.map, lambda x: x[chosen])
        reads = [partial(pick, cache.loops[loop]) for loop in alike]
        caches = jax.lax.switch(jnp.searchsorted(jnp.array(alike), tau), reads)
        new = run(pick(state), caches, pick(inputs), tau, alike[0])
        put = lambda old, new: _unless(state.finished, old, new[rank])  # noqa: E731
        return jax.tree.map(put, state, new)

    # The whole batch reads the caches where they are, and has a branch for each loop. Fewer rows
    # are copied out, and loops with the same windows share a branch.
    branches = [lambda state, tau: state, *(partial(run_whole, tau) for tau in range(len(windows)))]
    sizes = sorted({-(-batch // parts) for parts in PARTS})
    table = np.zeros((len(sizes) + 1, len(windows)), np.int32)  # the branch, by size and loop
    table[-1] = 1 + np.arange(len(windows))
    for size, column in zip(sizes[:-1], table[1:-1], strict=True):
        for kind in dict.fromkeys(windows):
            alike = [tau for tau, own in enumerate(windows) if own == kind]
            column[alike] = len(branches)
            branches.append(partial(run_few, size, alike))

    def body(carry, tau):
        state, count = carry
        number = jnp.searchsorted(jnp.array([0, *sizes]), jnp.sum(~state.finished))
        ran = jax.lax.switch(jnp.array(table)[number, tau], branches, state, tau)
        return (ran, count + ~state.finished), ran.made

    finished = jnp.zeros(batch, bool) if has_ended is None else has_ended
    state = _State(h, None, None, finished)
    shapes = jax.eval_shape(partial(run, like=0), state, cache.loops[0], inputs, 0)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    start = state._replace(h=h, finished=finished), jnp.zeros(batch, jnp.int32)
    (state, count), made = jax.lax.scan(body, start, jnp.arange(len(windows)))
    loops = tuple(
        tuple(
            written(layer, token, is_ring=window is not None)
            for layer, token, window in zip(layers, row_of(made, tau), windows[tau], strict=True)
        )
        for tau, layers in enumerate(cache.loops)
    )
    logits = model.head(state.h) if rule.kind == "gate" else state.progress
    return logits, LoopedCache(loops, before, cache.coda), count


_decode = jax.jit(append_until_exit, donate_argnames="cache")


def _stops(model, h, rule, progress, tau) -> tuple[Any, Bool[Array, "batch"]]:
    """What the rule keeps for the next loop, and whether a row stops after this one."""
    if rule.kind == "gate":
        # Stayed: the probability of going on past every loop so far, in logarithms.
        stayed, total = (0.0, 0.0) if progress is None else progress
        score = model.exit_gate(h.astype(jnp.promote_types(h.dtype, jnp.float32)))[..., 0]
        total += jnp.exp(stayed + jax.nn.log_sigmoid(score))
        # A threshold of 1 runs all loops, however the sum is rounded.
        stops = (total >= rule.threshold) & (rule.threshold < 1)
        return (stayed + jax.nn.log_sigmoid(-score), total), stops
    logits = model.head(h)
    logs, past = map(jax.nn.log_softmax, (logits, logits if progress is None else progress))
    return logits, ((jnp.exp(logs) * (logs - past)).sum(-1) < rule.threshold) & (tau > 0)


def _unless(rows, old, new):
    """`old` in these rows, `new` in the others."""
    return jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 1)), old, new)
