"""The looped language model: one stack of layers, run several times over the same positions."""

import functools
from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.looped.blocks import Block
from toolkit.looped.config import LoopedConfig


class LoopedLM(nnx.Module):
    """Language model whose N physical layers run T times with shared parameters.

        h^(0)   = Embedding(tokens)
        h^(tau) = F_N( ... F_1(h^(tau-1)) ) + rho_tau * h^(tau-1)          tau = 1..T
        logits  = Embedding^T RMSNorm(h^(T))

    Loops communicate through the residual stream only: every mixer starts each loop from an
    empty state. (Handing the state at the end of the text to the next loop would let early
    positions see late ones.) rho, [T, width], is all that is not shared; it starts at zero.

    A module is a pytree, so `jax.jit` and `jax.grad` take the model as an ordinary argument.

    Attributes:
        config: the sizes.
        embedding: token table, also the output head.
        blocks: the physical layers.
        rho: per-loop residual gate [loops, width], or None.
        norm: final RMSNorm.

    Source: LT2, "Linear-Time Looped Transformers", architecture section.
    """

    def __init__(self, config: LoopedConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(
            config.vocabulary,
            config.width,
            embedding_init=nnx.initializers.normal(config.width**-0.5),
            dtype=config.compute_dtype,
            rngs=rngs,
        )
        self.blocks = nnx.List([Block(word, config, rngs=rngs) for word in config.layers])
        self.rho = (
            nnx.Param(jnp.zeros((config.loops, config.width)))
            if config.residual_gate
            else nnx.data(None)
        )
        self.norm = nnx.RMSNorm(
            config.width, epsilon=config.norm_epsilon, dtype=config.compute_dtype, rngs=rngs
        )

    @overload
    def __call__(
        self, tokens: Array, *, segment_ids: Array | None = None, return_loops: Literal[False] = ...
    ) -> Array: ...
    @overload
    def __call__(
        self, tokens: Array, *, segment_ids: Array | None = None, return_loops: Literal[True]
    ) -> tuple[Array, Array]: ...
    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        *,
        segment_ids: Int[Array, "batch time"] | None = None,
        return_loops: bool = False,
    ):
        """Logits of the next token at every position.

        The loops are one `lax.scan`: the program does not grow with their number. Loops that
        differ in their windows are written out, one after another (see `run_loops`).

        Args:
            tokens: whole numbers below the vocabulary.
            segment_ids: document number of each position of a packed sequence; tokens of
                different documents never meet.
            return_loops: also return the hidden state after each loop.

        Returns:
            float32 logits [batch, time, vocabulary]; with `return_loops` also the hidden states
            [loops, batch, time, width], to be read through `head`.

        Raises:
            ValueError: if tokens or segment_ids have the wrong shape or type.

        Cost: about 2 FLOPs a parameter, token and loop (embedding aside), three times that
            with the backward pass, plus the mixers' own cost.

        Source: LT2, architecture section.
        """
        check_tokens(tokens)
        if segment_ids is not None and segment_ids.shape != tokens.shape:
            raise ValueError(
                f"segment_ids have shape {segment_ids.shape}, tokens {tokens.shape}; "
                "they must be equal."
            )

        def body(tau, h, rho):
            h, _ = self.loop(h, rho, tau=tau, segment_ids=segment_ids)
            return h, (h if return_loops else None)

        h, loops = self.run_loops(body, self.embedding(tokens), remat=self.config.remat)
        return (self.head(h), jnp.stack(loops)) if return_loops else self.head(h)

    def run_loops(
        self,
        body: Callable[[int, Array, Array | None], tuple[Array, Any]],
        h: Float[Array, "... width"],
        *,
        remat: bool = False,
    ) -> tuple[Float[Array, "... width"], tuple[Any, ...]]:
        """Run a function for every loop: by `lax.scan` where all are alike, else written out.

        Args:
            body: (loop from 0, hidden states, its residual gate) -> (hidden states, anything);
                of loops that are alike it is given the first one's number.
            h: hidden states before the first loop.
            remat: recompute each loop in the backward pass. Loops that differ are then a scan
                too, over a `lax.switch`: XLA for CPUs would merge the recomputation of loops
                written out with their first computation, and keep the memory.

        Returns:
            The hidden states after the last loop, and what each loop returned beside them.
        """
        config, gates = self.config, self.residual_gates()
        if config.loops_differ and not remat:
            results = []
            for tau in range(config.loops):
                h, result = body(tau, h, None if gates is None else gates[tau])
                results.append(result)
            return h, tuple(results)
        first = [config.loop_windows.index(windows) for windows in config.loop_windows]
        kinds = sorted(set(first))

        def one(h, which):
            kind, rho = which
            branches = [functools.partial(body, tau) for tau in kinds]
            return jax.lax.switch(kind, branches, h, rho)

        if remat:
            one = jax.checkpoint(one, prevent_cse=False)
        which = jnp.array([kinds.index(tau) for tau in first])
        h, stacked = jax.lax.scan(one, h, (which, gates))
        return h, tuple(
            jax.tree.map(lambda leaf, tau=tau: leaf[tau], stacked) for tau in range(config.loops)
        )

    def loop(
        self,
        h: Float[Array, "batch time width"],
        rho: Float[Array, "width"] | None,
        *,
        tau: int = 0,
        segment_ids: Int[Array, "batch time"] | None = None,
        caches: tuple[Any, ...] | None = None,
    ) -> tuple[Float[Array, "batch time width"], tuple[Any, ...] | None]:
        """One pass through all physical layers, plus rho times its input.

        Args:
            h: hidden states.
            rho: this loop's residual gate, or None.
            tau: the loop, from 0; only windows that differ by loop make a difference.
            segment_ids: documents of a packed sequence.
            caches: one a physical layer, to continue from; None in training.

        Returns:
            The new hidden states, and the caches that follow (None without caches).
        """
        new_caches = []
        start = h
        for block, window, cache in zip(
            self.blocks,
            self.config.loop_windows[tau],
            caches or [None] * len(self.blocks),
            strict=True,
        ):
            h, cache = block(h, segment_ids=segment_ids, cache=cache, window=window)
            new_caches.append(cache)
        return _gated(h, rho, start), None if caches is None else tuple(new_caches)

    def loop_step(
        self,
        h: Float[Array, "batch width"],
        rho: Float[Array, "width"] | None,
        caches: tuple[Any, ...],
        *,
        tau: int = 0,
    ) -> tuple[Float[Array, "batch width"], tuple[Any, ...]]:
        """`loop` for one token.

        Args:
            h: hidden state of the token.
            rho: this loop's residual gate, or None.
            caches: one a physical layer.
            tau: the loop, from 0.

        Returns:
            The new hidden state, and the caches with the token in them.
        """
        new_caches = []
        start = h
        windows = self.config.loop_windows[tau]
        for block, window, cache in zip(self.blocks, windows, caches, strict=True):
            h, cache = block.step(h, cache, window=window)
            new_caches.append(cache)
        return _gated(h, rho, start), tuple(new_caches)

    def residual_gates(self) -> Float[Array, "loops width"] | None:
        """rho in the compute type, one row a loop; None without residual gate."""
        return None if self.rho is None else self.rho[...].astype(self.config.compute_dtype)

    def head(self, h: Float[Array, "... width"]) -> Float[Array, "... vocabulary"]:
        """Logits of hidden states: final norm, then the transposed embedding, in float32.

        Args:
            h: hidden states after any loop.

        Returns:
            float32 logits.
        """
        table = self.embedding.embedding[...].astype(self.config.compute_dtype)
        return jnp.einsum("...d,vd->...v", self.norm(h), table, preferred_element_type=jnp.float32)


def check_tokens(tokens: Int[Array, "batch time"]) -> None:
    """Refuse anything but a non-empty [batch, time] array of whole numbers.

    Args:
        tokens: what a caller passed.

    Raises:
        ValueError: if the shape or the type is wrong.
    """
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens are {tokens.dtype}{list(tokens.shape)}; "
            "they must be whole numbers of shape [batch, time]."
        )
    if 0 in tokens.shape:
        raise ValueError(f"tokens of shape {tokens.shape} are empty; at least one is needed.")


def _gated(h, rho, start):
    return h if rho is None else h + rho * start
