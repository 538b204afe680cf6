"""A looped language model as a pipeline: its loops and groups of layers are the stages."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int

from toolkit._checks import checked
from toolkit._compat import module_list
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.looped.blocks import run_blocks
from toolkit.looped.decoding.cache import empty_loop
from toolkit.looped.decoding.slices import SliceCaches
from toolkit.looped.feed_forward import FEED_FORWARDS
from toolkit.looped.loops.rows import row_of
from toolkit.parallel.pipeline import Context, Pipeline
from toolkit.schedules import Schedule


class LanguagePipeline(NamedTuple):
    """A language model cut into stages.

    Attributes:
        pipeline: what runs it.
        weights: the parameters of each group of layers, for `pipeline.place`.
        shared: those of the embedding, the head, and all that is not a looped layer.
        graph: structure of the shared part.

    Example:
        >>> LanguagePipeline(pipeline=None, weights=[], shared={}, graph=None).weights
        []
    """

    pipeline: Pipeline
    weights: list[Any]
    shared: Any
    graph: Any

    def write(self, model: LoopedLM, placed: Any, shared: Any) -> None:
        """Copy placed weights and shared parameters into a model of the same configuration."""
        layers = [layer for row in self.pipeline.unplace(placed) for layer in row]
        for block, layer in zip(model.blocks, layers, strict=True):
            nnx.update(block, layer)
        nnx.update(model, shared)


@checked
def pipeline_language_model(
    model: LoopedLM, schedule: Schedule, mesh: Mesh, *,
    axis: str = "stage", data: Sequence[str] = (), layers: Sequence[int] | None = None,
    recompute: bool | Sequence[int] = False,
) -> LanguagePipeline:  # fmt: skip
    """Cut a looped model into the stages of a schedule.

    With T loops of N layers and S stages, stage s is group s mod S/T of the layers in loop
    s div S/T. Stages of one group share its parameters, and must lie on one device: as they do in
    `interleaved`, with the groups as devices and the loops as chunks. The embedding and the prelude
    come before the first stage; the coda, the head and the loss after the last. If the schedule
    cuts sequences in slices (TeraPipe), all of one length, the layers' keys, values and states go
    on from slice to slice, and their gradients back.

    Args:
        model: the model.
        schedule: of a multiple of T stages.
        mesh: the devices.
        axis: mesh axis of the pipeline.
        data: mesh axes that cut the batch.
        layers: how many layers each group has; None: as equal as possible.
        recompute: as of `Pipeline`.

    Returns:
        The pipeline, which takes batches as `pipeline_batch` makes them, and its parameters.

    Raises:
        ValueError: the model passes something between layers, loops or slices of a sequence that
            no stage passes on.

    Source: Li et al., "TeraPipe", 2021 (arXiv:2102.07988) for slices.

    Example:
        >>> from flax import nnx
        >>> from toolkit import looped, schedules
        >>> model = looped.LoopedLM(looped.LoopedConfig.tiny("full", loops=2), rngs=nnx.Rngs(0))
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], "stage")
        >>> cut = pipeline_language_model(model, schedules.interleaved(1, 4, chunks=2), mesh)
    """
    config = model.config
    for name in (
        "ladder_residual", "residual_group", "backward_loops", "random_start", "streams",
        "attention_residual", "message_rank", "recursion",
    ):  # fmt: skip
        if getattr(config, name):
            raise ValueError(f"model: {name} is {getattr(config, name)}; a pipeline wants none")
    if schedule.slices > 1:
        _check_slices(config)
    groups, rest = divmod(schedule.stages, config.loops)
    if rest or not 1 <= groups <= len(config.layers):
        raise ValueError(
            f"schedule: got {schedule.stages} stages; wanted a multiple of the {config.loops} "
            f"loops, with at most {len(config.layers)} layers each"
        )
    sizes = [len(part) for part in np.array_split(config.layers, groups)]
    sizes = sizes if layers is None else list(layers)
    if len(sizes) != groups or min(sizes) < 1 or sum(sizes) != len(config.layers):
        raise ValueError(f"layers: got {sizes}, wanted {groups} groups of {len(config.layers)}")
    ends = np.cumsum(sizes).tolist()
    parts = [nnx.split(block, nnx.Param, ...) for block in model.blocks]
    bare = nnx.clone(model)
    bare.blocks = module_list([])
    graph, shared, other = nnx.split(bare, nnx.Param, ...)
    if jax.tree.leaves([other, [part[2] for part in parts]]):
        raise ValueError("model: it has state beside its parameters, which a pipeline cannot move")
    keeps_start = config.residual_gate and groups > 1
    count = schedule.slices
    groups_of_layers = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def empty(stage: int, batch: int, capacity: int) -> tuple[Any, ...]:
        tau, group = divmod(stage, groups)
        return empty_loop(config, batch, capacity, tau)[groups_of_layers[group]]

    caches = SliceCaches(count, [functools.partial(empty, s) for s in range(schedule.stages)])
    known: dict[Any, Any] = {}

    def stage_of(tau: int, group: int) -> Any:
        """The function of a stage; stages that do the same have the same."""
        within = groups_of_layers[group]
        graphs, windows = [part[0] for part in parts[within]], config.loop_windows[tau][within]
        is_first, is_last = group == 0, group == groups - 1
        matters = (
            is_first and (config.loop_embedding or config.input_injection or keeps_start),
            is_last and (config.residual_gate or config.norm_every_loop),
        )

        def stage(rows: Any, x: Any, context: Context) -> Any:
            model, data, number = (
                nnx.merge(graph, context.shared),
                context.data,
                tau * groups + group,
            )
            x, carried = x if count > 1 else (x, [])
            before = caches.before(number, carried, data) if count > 1 else None
            row = row_of(model.loop_rows(), context.stage // groups)
            blocks = [nnx.merge(*pair) for pair in zip(graphs, rows, strict=True)]
            start = x["start"] if keeps_start and not is_first else x["h"]
            h = model.loop_input(x["h"], row.embedding, x.get("injected")) if is_first else x["h"]
            how = {"segment_ids": data.get("segment_ids"), "caches": before}
            h, after = run_blocks(blocks, h, windows=windows, **how)
            h = model.loop_output(h, row.rho, start) if is_last else h
            y = {**x, "h": h} | ({"start": start} if keeps_start else {})
            return (y, caches.after(number, carried, after, data)) if count > 1 else y

        return known.setdefault((tuple(graphs), windows, matters), stage)

    def first(shared: Any, data: dict[str, Array]) -> dict[str, Array]:
        model = nnx.merge(graph, shared)
        h = model.embedding(data["tokens"])
        h, _ = run_blocks(model.prelude, h, segment_ids=data.get("segment_ids"))
        x = {"h": h} | ({"injected": h} if config.input_injection else {})
        return x | ({"start": jnp.zeros_like(h)} if keeps_start else {})

    def last(shared: Any, x: dict[str, Array], data: dict[str, Array]) -> Array:
        model = nnx.merge(graph, shared)
        h, _ = run_blocks(
            model.coda, model.leave(x["h"], x.get("injected")), segment_ids=data.get("segment_ids")
        )
        targets = jnp.maximum(data["targets"], 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(model.head(h), targets)
        return jnp.sum(losses * data["share"].astype(losses.dtype))

    weights = [[part[1] for part in parts[group]] for group in groups_of_layers]
    pipeline = Pipeline(
        [stage_of(*divmod(s, groups)) for s in range(schedule.stages)],
        first=first, last=last, weights=weights, schedule=schedule, mesh=mesh, axis=axis,
        data=data, tied=[s % groups for s in range(schedule.stages)], recompute=recompute,
        carried=caches.start if count > 1 else None,
    )  # fmt: skip
    return LanguagePipeline(pipeline, weights, shared, graph)


@checked
def pipeline_batch(
    batch: tuple[Int[Array, "batch time"], ...], microbatches: int, slices: int = 1
) -> dict[str, Array]:
    """A batch cut into microbatches, with each token's share of the mean loss.

    The sum of the microbatches' losses is then `next_byte_loss` of the batch, however many tokens
    of a microbatch count.

    Args:
        batch: inputs and targets [batch, time], and for packed documents segment ids; targets below
            0 do not count then.
        microbatches: how many, a divisor of the batch.
        slices: of each sequence, a divisor of the time; those of a microbatch follow one another.

    Returns:
        Arrays [microbatches slices, batch / microbatches, time / slices]; with slices also
        "continues", whether the document before the slice goes on in it.

    Example:
        >>> tokens = jnp.zeros((4, 8), int)
        >>> pipeline_batch((tokens, tokens), microbatches=2)["share"].shape
        (2, 2, 8)
    """
    inputs, targets, *packed = batch
    if microbatches < 1 or inputs.shape[0] % microbatches:
        raise ValueError(
            f"microbatches: got {microbatches}, wanted a divisor of the batch {inputs.shape[0]}"
        )
    if slices < 1 or inputs.shape[1] % slices:
        raise ValueError(f"slices: got {slices}, wanted a divisor of {inputs.shape[1]} tokens")
    counts = jnp.broadcast_to(targets >= 0, targets.shape) if packed else jnp.ones(targets.shape)
    found = {"tokens": inputs, "targets": targets, "share": counts / counts.sum()}
    found |= {"segment_ids": packed[0]} if packed else {}
    rows, time = inputs.shape[0] // microbatches, inputs.shape[1] // slices

    def cut(array: Array) -> Array:
        parts = array.reshape(microbatches, rows, slices, -1).swapaxes(1, 2)
        return parts.reshape(microbatches * slices, rows, -1)

    made = {name: cut(array) for name, array in found.items()}
    if slices == 1:
        return made
    ids = packed[0] if packed else jnp.zeros_like(inputs)
    goes_on = ids[:, time::time] == ids[:, time - 1 : -1 : time]
    return made | {"continues": cut(jnp.pad(goes_on, ((0, 0), (1, 0))))[..., 0]}


def _check_slices(config: LoopedConfig) -> None:
    """Refuse what sees more than a slice, and is in no cache."""
    for name in ("prelude_layers", "coda_layers"):
        if layers := getattr(config, name):
            raise ValueError(
                f"schedule: {name} {layers} run outside of the stages, which pass their caches "
                "from slice to slice; want slices of 1, or all layers in the loops"
            )
    for word in config.feed_forward_words:
        if not FEED_FORWARDS[word].can_cut_time:
            raise ValueError(
                f"schedule: {word!r} layers sort the tokens of whole sequences; want slices of 1"
            )
