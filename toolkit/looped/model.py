"""The looped language model: one stack of layers, run several times over the same positions."""

import functools
from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit._compat import module_list
from toolkit.experts import RoutingStatistics
from toolkit.looped.blocks import Block, run_blocks
from toolkit.looped.config import LoopedConfig
from toolkit.looped.feed_forward import MIXTURES
from toolkit.looped.layers import Embedding, linear, norm_layer, read_out
from toolkit.looped.loops.depth import check_call, reconfigured, run_alike, start_noise
from toolkit.looped.loops.injection import DiagonalInjection
from toolkit.looped.loops.rows import LoopRow, run_rows
from toolkit.looped.recursion.routing import Router, recursive_loop
from toolkit.looped.residual import Pass
from toolkit.looped.residual.groups import GroupResidual
from toolkit.looped.sequences import check_sequences


class LoopedLM(nnx.Module):
    """Language model whose N physical layers run T times with shared parameters.

        h^(0)   = Embedding(tokens)
        h^(tau) = F_N( ... F_1(h^(tau-1)) ) + rho_tau * h^(tau-1)          tau = 1..T
        logits  = Embedding^T RMSNorm(h^(T))

    Loops communicate through the residual stream only: every mixer starts each loop from an empty
    state. (Passing the final state to the next loop would let early positions see late ones.) Only
    rho [T, width] is not shared; it starts at zero.

    The configuration may add, in this order: a prelude that makes e of h^(0), after which the loops
    may start from noise; input injection, where F_1 reads adapter([h, e]) and h is h^(tau-1) plus
    the loop's embedding; the norm after every loop; a coda after the last. With `message_rank`
    every loop starts from the prelude's output instead, and reads messages of the loop before.

    A model is a pytree and an ordinary argument of `jax.jit` and `jax.grad`.

    Attributes:
        config: the sizes.
        embedding: token table, also the output head unless that has a table of its own.
        unembedding: the output head's table [vocabulary, width], or None.
        head_bias: [vocabulary], or None.
        prelude, blocks, coda: the physical layers before, in and after the loops.
        rho: per-loop residual gate [loops, width], or None.
        loop_embedding: per-loop addition [loops, width], or None.
        adapter: what reads the state and the injected input, or None.
        leaving: projection of what the loops make, before the coda, or None.
        exit_gate: projection whose sigmoid is the chance to stop, or None.
        router: how many loops each token takes, or None.
        group_residual: shares of the inputs of groups of layers, or None.
        norm: final norm.

    Source: LT2, "Linear-Time Looped Transformers", architecture section; see `LoopedConfig` for
        the switches.

    Example:
        >>> from flax import nnx
        >>> config = LoopedConfig.tiny("gdn full", loops=2, width=16, heads=2)
        >>> model = LoopedLM(config, rngs=nnx.Rngs(0))
        >>> model(jnp.zeros((1, 5), int)).shape
        (1, 5, 256)
    """

    def __init__(self, config: LoopedConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, dtype = config.width, config.compute_dtype
        none = nnx.data(None)
        per_loop = jnp.zeros((config.loops, width))
        draw = nnx.initializers.normal
        table = draw(config.embedding_std or width**-0.5)
        sizes, how = (config.vocabulary, width), {"dtype": dtype, "rngs": rngs}
        of_norm = {"epsilon": config.norm_epsilon, **how}
        norm = norm_layer(config.norm, width, **of_norm) if config.embedding_norm else None
        own = {"scale": config.embedding_scale, "norm": norm, "embedding_init": table}
        self.embedding = Embedding(*sizes, **own, **how)
        words = iter(config.feed_forward_words)
        prelude, looped, coda = (
            [(layer, next(words)) for layer in layers]
            for layers in (config.prelude_layers, config.layers, config.coda_layers)
        )

        def stack(layers: list[tuple[str, str]], name: str) -> Any:
            return module_list(
                [
                    Block(
                        word, config, rngs=rngs, feed_forward=fed, stack=name,
                        depth=(place, len(layers)),
                    )
                    for place, (word, fed) in enumerate(layers)
                ]
            )  # fmt: skip

        self.blocks = stack(looped, "blocks")
        self.rho = nnx.Param(per_loop) if config.residual_gate else none
        self.norm = norm_layer(config.norm, width, **of_norm)
        self.prelude = stack(prelude, "prelude")
        self.coda = stack(coda, "coda")
        self.loop_embedding = nnx.Param(per_loop) if config.loop_embedding else none
        self.adapter: Any = none
        if config.input_injection and config.injection == "diagonal":
            self.adapter = DiagonalInjection(width)
        elif config.input_injection:
            self.adapter = linear(2 * width, width, dtype, rngs, std=(2 * width) ** -0.5)
        self.leaving = (
            linear(width, width, dtype, rngs, std=width**-0.5) if config.coda_projection else none
        )
        self.exit_gate = nnx.Linear(width, 1, rngs=rngs) if config.exit_gate else none
        self.router: Any = Router(config, rngs=rngs) if config.recursion else none
        group = config.residual_group
        self.group_residual = GroupResidual(len(config.layers), group) if group else none
        is_tied, made = config.tied_embedding, draw(width**-0.5)
        self.unembedding = none if is_tied else nnx.Param(made(rngs.params(), sizes))
        has_bias = config.head_bias
        self.head_bias = nnx.Param(jnp.zeros(config.vocabulary)) if has_bias else none

    @overload
    def __call__(
        self, tokens: Array, *, segment_ids: Array | None = None,
        return_loops: Literal[False] = ..., loops: int | Array | None = None,
        key: Array | None = None,
    ) -> Array: ...  # fmt: skip
    @overload
    def __call__(
        self, tokens: Array, *, segment_ids: Array | None = None, return_loops: Literal[True],
        loops: int | Array | None = None, key: Array | None = None,
    ) -> tuple[Array, Array]: ...  # fmt: skip
    def __call__(
        self, tokens: Int[Array, "batch time"], *,
        segment_ids: Int[Array, "batch time"] | None = None, return_loops: bool = False,
        loops: int | Int[Array, ""] | None = None, key: Array | None = None,
    ):  # fmt: skip
        """Logits of the next token at every position.

        The loops are one `lax.scan`, so the program does not grow with their number. Loops that
        differ in their windows are unrolled (see `run_loops`).

        Args:
            tokens: whole numbers below the vocabulary.
            segment_ids: document number of each position of a packed sequence; documents do not see
                each other.
            return_loops: also return the hidden state after each loop.
            loops: how often the layers run (None: as configured), if all loops are alike; a traced
                number needs `backward_loops`, see `draw_loops`.
            key: random key for the start of the loops in a model with `random_start`; without it
                they start from zero, the mean.

        Returns:
            float32 logits [batch, time, vocabulary]; with `return_loops` also the hidden states
            [loops, batch, time, width], to be read through `head` (before a coda, if there is
            one).

        Cost: about 2 FLOPs per parameter, token and loop (without the embedding), three times that
            with the backward pass, plus the mixers.

        Source: LT2, architecture section.
        """
        h, hidden, _ = self._run(
            tokens, segment_ids=segment_ids, return_loops=return_loops, loops=loops, key=key
        )
        return (self.head(h), hidden) if return_loops else self.head(h)

    def last_hidden(
        self,
        tokens: Int[Array, "batch time"],
        *,
        segment_ids: Int[Array, "batch time"] | None = None,
    ) -> Float[Array, "batch time width"]:
        """The head's input before its norm; arguments as of a call."""
        return self._run(tokens, segment_ids=segment_ids)[0]

    def with_routing(
        self,
        tokens: Int[Array, "batch time"],
        *,
        segment_ids: Int[Array, "batch time"] | None = None,
    ) -> tuple[Float[Array, "batch time width"], tuple[RoutingStatistics, ...]]:
        """`last_hidden`, and what the routers did; arguments as of a call.

        The statistics come one for each "moe" layer of prelude, loops and coda, with arrays
        [loops, batch, ...], where layers outside of the loops count as one loop. They add up: over
        loops and sequences with `toolkit.experts.pooled_statistics(statistics, 2)`.
        """
        if not MIXTURES & {*self.config.feed_forward_words}:
            raise ValueError(
                f"feed_forwards is {self.config.feed_forwards!r}; a model with routing has a "
                '"moe" layer.'
            )
        h, _, routing = self._run(tokens, segment_ids=segment_ids, return_routing=True)
        return h, tuple(routing or ())

    def _run(
        self, tokens, *, segment_ids, return_loops=False, loops=None, key=None, return_routing=False
    ):
        check_sequences(self.config, tokens, segment_ids)
        check_call(
            self.config, loops, key, return_loops=return_loops, return_routing=return_routing
        )
        if isinstance(loops, int):
            model = reconfigured(self, loops=loops)
            how = {"segment_ids": segment_ids, "return_loops": return_loops, "key": key}
            return model._run(tokens, **how)
        how = {"segment_ids": segment_ids, "return_routing": return_routing, "tokens": tokens}
        injected, before = run_blocks(self.prelude, self.embedding(tokens), **how)
        within = ()
        start = self.start(injected, key)
        if self.config.backward_loops is None:

            def body(tau, h, row):
                h, other = self.loop(h, *row, tau=tau, injected=injected, **how)
                return h, (hidden_of(h) if return_loops else None, other)

            h, kept = self.run_loops(body, start, remat=self.config.remat)
            states, within = zip(*kept, strict=True)
            hidden = jnp.stack(states) if return_loops else None
        else:

            def loop(shared, h):
                model, injected = shared
                how = {"segment_ids": segment_ids, "tokens": tokens}
                return model.loop(h, None, injected=injected, **how)[0]

            h, hidden = run_alike(
                loop,
                (self, injected),
                start,
                self.config.loops if loops is None else loops,
                backward=self.config.backward_loops,
                remat=self.config.remat,
            )
            hidden = None if hidden is None else hidden_of(hidden)
        h, after = run_blocks(self.coda, self.leave(h, injected), **how)
        if not return_routing:
            return h, hidden, None
        once = jax.tree.map(lambda x: x[None], (before, after))
        return h, hidden, (*once[0], *jax.tree.map(lambda *x: jnp.stack(x), *within), *once[1])

    def start(
        self, injected: Any, key: Array | None = None, *, length: Int[Array, "batch"] | None = None
    ) -> Any:
        """What the first loop is given: the stream, or what loops hand on in its place.

        `length` is the number of tokens of each row before these.
        """
        config = self.config
        if config.recursion is not None:
            return self.router.start(injected, length)
        if config.message_rank is not None:
            return Pass.before(injected, len(config.layers) // (config.attention_residual or 1))
        return start_noise(key, injected) if config.random_start else injected

    def leave(self, h: Any, injected: Any) -> Any:
        """What the coda or the head reads after the last loop."""
        if self.config.message_rank is not None:
            return h.for_coda(injected)
        h = hidden_of(h)
        h = self.norm(h) if self.config.norm_before_coda else h
        return h if self.leaving is None else self.leaving(h)

    def run_loops(
        self, body: Callable[[int, Any, LoopRow], tuple[Any, Any]], h: Any, *, remat: bool = False
    ) -> tuple[Any, tuple[Any, ...]]:
        """Run body(loop, h, row) for every loop, as `run_rows`; its other results come per loop."""
        return run_rows(self.config, self.loop_rows(), body, h, remat=remat)

    def loop(
        self, h: Any, rho: Float[Array, "width"] | None,
        embedding: Float[Array, "width"] | None = None, *,
        tau: int = 0, injected: Any = None, segment_ids: Int[Array, "batch time"] | None = None,
        caches: tuple[Any, ...] | None = None, return_routing: bool = False,
        tokens: Int[Array, "..."] | None = None,
    ) -> tuple[Any, tuple[Any, ...] | None]:  # fmt: skip
        """One pass of a sequence or of one token through all layers, plus rho times its input."""
        run = functools.partial(
            run_blocks,
            self.blocks,
            windows=self.config.loop_windows[tau],
            residual=self.group_residual,
            return_routing=return_routing,
        )
        where = {"segment_ids": segment_ids, "caches": caches}
        if self.config.recursion is not None:

            def through(h: Array, **how: Any) -> tuple[Array, Any]:
                return run(self.loop_input(h, embedding, None), **how)

            return recursive_loop(self.router, through, h, **where)
        run = functools.partial(run, tokens=tokens, **where)
        if self.config.message_rank is not None:
            state, caches = run(injected, before=h)
            return Pass.after(injected, state), caches
        out, caches = run(self.loop_input(h, embedding, injected))
        return self.loop_output(out, rho, h), caches

    def loop_input(self, h: Any, embedding: Any, injected: Any) -> Any:
        """What the layers of a loop read of the stream."""
        h = h if embedding is None else h + embedding
        return h if self.adapter is None else self.adapter(jnp.concatenate([h, injected], axis=-1))

    def loop_output(self, out: Any, rho: Any, start: Any) -> Any:
        """The stream after a loop that began with `start`."""
        out = out if rho is None else out + rho * start
        return self.norm(out) if self.config.norm_every_loop else out

    def loop_rows(self) -> LoopRow:
        """The per-loop parameters in the compute type: arrays [loops, width] or None."""
        dtype = self.config.compute_dtype
        own = (self.rho, self.loop_embedding)
        return LoopRow(*(None if rows is None else rows[...].astype(dtype) for rows in own))

    def head(self, h: Float[Array, "... width"]) -> Float[Array, "... vocabulary"]:
        """Logits in float32: the final norm, unless it closed the last loop, then the head."""
        bias = None if self.head_bias is None else self.head_bias[...]
        return read_out(*self.head_inputs(h), bias, self.config.head_soft_cap)

    def head_inputs(
        self, h: Float[Array, "... width"]
    ) -> tuple[Float[Array, "... width"], Float[Array, "vocabulary width"]]:
        """The operands of the head: h after the final norm and times `head_scale`; the table."""
        table = self.embedding.embedding if self.unembedding is None else self.unembedding
        h = h if self.config.norm_every_loop else self.norm(h)
        scale = self.config.head_scale
        h = h if scale == 1 else h * jnp.asarray(scale, h.dtype)
        return h, table[...].astype(self.config.compute_dtype)


def hidden_of(h: Any) -> Float[Array, "... width"]:
    """The stream in what a loop hands on."""
    return h if isinstance(h, jax.Array) else h.h
