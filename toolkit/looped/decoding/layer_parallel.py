r"""Drafts whose layers run in parallel, and whose cache is made exact after every round (EasySpec).

Consecutive layers of a loop form groups. All mixers of a group read the group's input h, each on a
device of its own; the feed-forward layers still follow one another:

    o_i = mixer_i(norm(h)), i in the group;      x <- h;  for each i: x += o_i;  x += mlp_i(norm(x))

The input of every layer of a group but the first is approximate, and with it the keys and values
that it leaves behind. After the verification one exact pass of the draft over the tokens of the
round rewrites them (calibration), in place of the step that would read the last draft. The first
layer of the model stays alone, because nothing costs more acceptance than to approximate it. The
text is the exact model's whatever the draft.

Source: EasySpec, 2025 (arXiv:2502.02493); that feed-forward layers stay serial is our reading.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from toolkit._checks import check_fields
from toolkit._pytrees import register_dataclass
from toolkit.looped.blocks import Block, run_blocks
from toolkit.looped.decoding.cache import LoopedCache
from toolkit.looped.decoding.steps import append, prefill
from toolkit.looped.loops.rows import row_of
from toolkit.looped.model import LoopedLM
from toolkit.parallel.axes import check_auto_axes

AXIS = "layer"


@dataclass(frozen=True)
class ParallelLayers:
    """A draft for `generate_speculatively` that runs its layers in groups.

    Attributes:
        model: of softmax layers.
        size: layers of a group; 1 is the exact draft.
        mesh: with an axis "layer" of that size, whose devices compute a layer each; None computes
            them one after the other, with the same result.
        is_calibrated: whether the cache is made exact after every round.

    Cost: per drafted token the mixers of a group take the time of one; per round a pass of the
        draft over its tokens instead of a step. On a mesh the caches of a group are laid out anew
        in every step, which a serving system would avoid.

    Source: EasySpec, 2025 (arXiv:2502.02493).

    Example:
        >>> from flax import nnx
        >>> config = LoopedConfig.tiny("full full full", loops=1, width=16, heads=2)
        >>> model = LoopedLM(config, rngs=nnx.Rngs(0))
        >>> draft = ParallelLayers(model, size=2)
        >>> generate_speculatively(model, draft, jnp.array([[5, 3]]), 4).tokens.shape
        (1, 4)
    """

    model: LoopedLM
    size: int
    mesh: Mesh | None = None
    is_calibrated: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        config, block = self.model.config, self.model.blocks[0]
        if self.size < 1:
            raise ValueError(f"size: got {self.size}, wanted at least 1 layer")
        if self.mesh is not None and self.mesh.shape.get(AXIS) != self.size:
            raise ValueError(f"mesh: got {dict(self.mesh.shape)}, wanted {AXIS!r}: {self.size}")
        if self.mesh is not None:
            check_auto_axes(self.mesh)
        words = {*config.layers, *config.prelude_layers, *config.coda_layers}
        has_more = block.connections is not None or block.is_ladder or config.recursion is not None
        is_windowed = any(w is not None for windows in config.loop_windows for w in windows)
        if words != {"full"} or has_more or is_windowed or self.model.group_residual is not None:
            raise ValueError(
                f"model: got layers {config.pattern!r}; wanted 'full' ones on a plain stream"
            )

    def propose(self) -> Callable[..., tuple[Array, Any]]:
        """The draft's step, for `speculate`: the same object for the same groups and mesh."""
        return _proposer(self.size, self.mesh, self.is_calibrated)

    def cache(
        self, prompt: Int[Array, "batch time"], lengths: Any, capacity: int, drafts: int
    ) -> Any:
        """The draft's own cache after the prompt."""
        cache = prefill(self.model, prompt, capacity, lengths=lengths)[1]
        if not self.is_calibrated:
            return cache
        batch = prompt.shape[0]
        none = jnp.zeros((batch, drafts + 1), jnp.int32)
        return Calibrated(cache, None, none, jnp.zeros(batch, jnp.int32), 0)


@register_dataclass
@dataclass(frozen=True)
class Calibrated:
    """A draft's cache that is exact up to the last round, and rough in it."""

    exact: LoopedCache  # without the tokens of the last round
    rough: LoopedCache | None  # what the steps of this round write, or None between rounds
    tokens: Int[Array, "batch drafts"]  # that the draft was given in the last round
    count: Int[Array, "batch"]  # of those the ones that were kept
    step: int = field(metadata={"static": True})  # of this round

    def restore(self, passed: Sequence[Any], count: Int[Array, "batch"]) -> "Calibrated":
        """The cache between rounds: what is rough is dropped, what was kept is read later."""
        return dataclasses.replace(self, rough=None, count=count, step=0)


def parallel_step(
    model: LoopedLM, token: Int[Array, "batch"], cache: LoopedCache, size: int,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "batch vocabulary"], LoopedCache]:  # fmt: skip
    """One token through layers in groups of `size`: what `decode_step` computes if that is 1."""
    injected, before = run_blocks(model.prelude, model.embedding(token), caches=cache.prelude)
    h, rows, loops = model.start(injected), model.loop_rows(), []
    for tau, caches in enumerate(cache.loops):
        rho, embedding = row_of(rows, tau)
        x, new = model.loop_input(h, embedding, injected), list[Any]()
        # The model's first layer is exact.
        alone = int(tau == 0 and not model.config.prelude_layers)
        starts = [*range(alone), *range(alone, len(caches), size)]
        for start, end in zip(starts, [*starts[1:], len(caches)], strict=True):
            blocks = model.blocks[start:end]
            mixed, own = _mixed(blocks, x, caches[start:end], mesh)
            for block, each in zip(blocks, mixed, strict=True):
                x = block.finish(x, each)
            new += own
        if model.blocks[-1].end_norm is not None:
            x = model.blocks[-1].end_norm(x)
        h = model.loop_output(x, rho, h)
        loops.append(tuple(new))
    h, after = run_blocks(model.coda, model.leave(h, injected), caches=cache.coda)
    return model.head(h), LoopedCache(tuple(loops), before, after)


def _mixed(
    blocks: Sequence[Block], h: Array, caches: Sequence[Any], mesh: Mesh | None
) -> tuple[Sequence[Array], Sequence[Any]]:
    """The mixers' outputs for one input, each on a device of its own if the group is whole."""
    if mesh is None or len(blocks) < mesh.shape[AXIS]:
        pairs = [block.mixer.step(block.mixer_input(h), cache)
                 for block, cache in zip(blocks, caches, strict=True)]  # fmt: skip
        mixed, new = zip(*pairs, strict=True)
        return mixed, new
    graph, states = nnx.split(blocks[0])[0], [nnx.split(block)[1] for block in blocks]
    weights, kept = (jax.tree.map(lambda *x: jnp.stack(x), *parts) for parts in (states, caches))

    def own(weights: Any, cache: Any, h: Array) -> tuple[Array, Any]:
        weights, cache = (jax.tree.map(lambda x: x[0], each) for each in (weights, cache))
        block = nnx.merge(graph, weights)
        mixed, cache = block.mixer.step(block.mixer_input(h), cache)
        return mixed[None], jax.tree.map(lambda x: x[None], cache)

    cut = PartitionSpec(AXIS)
    mixed, new = jax.shard_map(
        own, mesh=mesh, in_specs=(cut, cut, PartitionSpec()), out_specs=(cut, cut), check_vma=False
    )(weights, kept, h)
    # The outputs are gathered: every device runs the feed-forward layers of the whole group.
    mixed = jax.lax.with_sharding_constraint(
        mixed, jax.sharding.NamedSharding(mesh, PartitionSpec())
    )
    return mixed, [jax.tree.map(lambda x, at=at: x[at], new) for at in range(len(blocks))]


@functools.cache
def _proposer(size: int, mesh: Mesh | None, is_calibrated: bool) -> Callable[..., Any]:
    def rough(model: LoopedLM, token: Array, cache: LoopedCache) -> tuple[Array, LoopedCache]:
        return parallel_step(model, token, cache, size, mesh)

    def calibrated(model: LoopedLM, token: Array, cache: Calibrated) -> tuple[Array, Calibrated]:
        step, last = cache.step, cache.tokens.shape[1] - 1
        exact, now = cache.exact, cache.rough
        if step == 0:
            length = exact.length + cache.count
            now = exact = append(model, cache.tokens, exact, every=True)[1].truncate(length)
        tokens = cache.tokens.at[:, step].set(token)
        logits = jnp.zeros((len(token), model.config.vocabulary))
        if step < last:  # what follows the last draft is read by the next calibration
            assert now is not None
            logits, now = rough(model, token, now)
        return logits, Calibrated(exact, now, tokens, cache.count, step + 1)

    return calibrated if is_calibrated else rough
