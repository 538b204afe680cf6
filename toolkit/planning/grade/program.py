"""The train step that the model of memory and time describes, with explicit communication.

One layer of a looped model is one `Block` of `toolkit.looped`, run inside `jax.shard_map` at the
sizes one chip sees (heads / tensor, hidden / tensor). Layers are stacked and scanned, so that the
program, and the time to compile it, do not grow with depth.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array

from toolkit._checks import checked
from toolkit.looped import LoopedConfig
from toolkit.parallel import Layout, make_mesh
from toolkit.parallel.axes import axes_of
from toolkit.planning.grade.forward import local_loss
from toolkit.planning.grade.pipelined import STAGE, pipelined
from toolkit.planning.memory.placing import (
    BATCH_AXES,
    layout_of,
    optimizer_specs,
    parameters,
    placed,
    specs_of,
)
from toolkit.planning.model_checks import check_model
from toolkit.planning.strategy import Strategy
from toolkit.planning.time.compiled_work import UPDATE

ALL = (*BATCH_AXES, "tensor")


class Program(NamedTuple):
    """A train step on a mesh; nothing is allocated.

    Attributes:
        loss: (params, (inputs, targets)) -> mean cross-entropy, for `training.make_train_step`; its
            gradient communicates as `Strategy` says.
        layout: the layout of the parameters.
        params: the parameters' shapes; "blocks" holds runs of stacked groups of layers.
        step: (params, optimiser state, batch) -> the same after one update of AdamW, and the loss.
        arguments: shapes of the arguments of `step`, with their shardings.

    Example:
        >>> from toolkit.looped import LoopedConfig
        >>> config = LoopedConfig.tiny("full full", width=64, residual_gate=False)
        >>> program = train_program(config, Strategy(fsdp=2), batch=2, sequence_length=16)
        >>> program.arguments[0]["embedding"].sharding.shard_shape((256, 64))
        (128, 64)
    """

    loss: Callable[..., Array]
    layout: Layout
    params: Any
    step: Callable[..., Any]
    arguments: tuple[Any, ...]

    def compile(self) -> jax.stages.Compiled:
        """Compile the step for the mesh's devices, which need not exist."""
        # Donated, as in training.
        return jax.jit(self.step, donate_argnums=(0, 1)).lower(*self.arguments).compile()


@checked
def train_program(
    config: LoopedConfig,
    strategy: Strategy,
    *,
    batch: int,
    sequence_length: int,
    devices: Sequence[Any] | None = None,
) -> Program:
    """Build the train step of a model under a strategy, without allocating anything.

    Args:
        config: the model.
        strategy: how it is sharded.
        batch: global batch size in sequences.
        sequence_length: tokens per sequence.
        devices: the chips, possibly those of a TPU topology (None: the first of `jax.devices()`).

    Source: Shoeybi et al., "Megatron-LM", 2019 (vocabulary in parallel); Korthikanti et al., 2022.

    Example:
        >>> from toolkit.looped import LoopedConfig
        >>> config = LoopedConfig.tiny("full", width=64, residual_gate=False)
        >>> program = train_program(config, Strategy(), batch=1, sequence_length=8)
        >>> sorted(program.params)
        ['blocks', 'embedding', 'norm']
    """
    check_model(config, strategy, batch, sequence_length)
    check_built(config, strategy)
    there = list(jax.devices() if devices is None else devices)
    if len(there) < strategy.chips:
        raise ValueError(
            f"devices: the strategy takes {strategy.chips}, and there are {len(there)}"
        )
    axes = {name: getattr(strategy, name) for name in ("data", "fsdp", "tensor")}
    if strategy.pipeline > 1:
        axes = {STAGE: strategy.pipeline, **axes}
    mesh = _mesh(axes, there[: strategy.chips])
    graphs, shapes, local_shapes = parameters(config, strategy)
    specs = specs_of(strategy, shapes, local_shapes)
    loss = _loss(config, strategy, mesh, graphs, specs)
    optimizer = optax.adamw(1e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    layout = layout_of(mesh, shapes, specs)
    moments = jax.eval_shape(optimizer.init, shapes)
    cut = optimizer_specs(strategy, moments, shapes, specs)

    def step(params, state, tokens):
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        with jax.named_scope(UPDATE):
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        place = functools.partial(placed, mesh)
        kept = jax.tree.map(lax.with_sharding_constraint, (params, state), place((specs, cut)))
        return *kept, value

    tokens = jax.ShapeDtypeStruct((batch, sequence_length), jnp.int32)
    given = ((shapes, moments, (tokens, tokens)), (specs, cut, (layout.batch,) * 2))
    arguments = jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        given[0],
        placed(mesh, given[1]),
    )
    return Program(loss, layout, shapes, step, arguments)


def check_built(config, strategy):
    """Refuse what is modelled but not built."""
    if words := strategy.modelled_only:
        raise ValueError(f"strategy: {words} is modelled, not built; want it off")
    options = dict(config.options)
    if "moe" in options and options["moe"].choice_bias:
        raise ValueError(
            "moe.choice_bias: the program has no step for it; it is modelled, not built: want False"
        )
    for word, own in options.items():
        for name in ("output_bias", "biases"):
            is_cut = word != "moe" or strategy.expert == 1
            if getattr(own, name, False) and strategy.tensor > 1 and is_cut:
                raise ValueError(
                    f"{word}.{name}: every chip of tensor {strategy.tensor} would add it; it is "
                    "modelled, not built: nearest that works: tensor 1"
                )


def _mesh(axes, devices):
    try:
        return make_mesh(axes, devices=devices)
    except NotImplementedError:  # not a product of the torus's axes: the devices as listed
        grid = np.array(devices).reshape(tuple(axes.values()))
        return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def own_gradients(config, strategy, graphs, specs, through_stages=None):
    """(params, tokens, tables) -> a chip's part of the loss and of its gradients."""
    local = functools.partial(local_loss, config, strategy, graphs, specs)

    def value_and_gradients(params, tokens, tables):
        def total(params, tokens):
            return local(params, *tokens)

        if through_stages is not None:
            return through_stages(params, tokens, tables)
        if strategy.microbatches == 1:
            return jax.value_and_grad(total)(params, tokens)
        parts = jax.tree.map(lambda x: x.reshape(strategy.microbatches, -1, *x.shape[1:]), tokens)

        def add(carry, part):
            found = jax.value_and_grad(total)(params, part)
            return jax.tree.map(jnp.add, carry, found), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        return lax.scan(add, zeros, parts)[0]

    return value_and_gradients


def _loss(config, strategy, mesh, graphs, specs):
    """A loss that computes its gradient in the same `shard_map`."""
    through_stages, tables, table_specs = None, {}, {}
    if strategy.pipeline > 1:
        through_stages, tables, table_specs = pipelined(config, strategy, graphs, specs)
    own = own_gradients(config, strategy, graphs, specs, through_stages)

    def value_and_gradients(params, tokens, tables):
        value, gradients = own(params, tokens, tables)
        gradients = jax.tree.map(lambda g, spec: summed(g, spec, mesh, ALL), gradients, specs)
        return over(BATCH_AXES, mesh, value), gradients

    both = jax.shard_map(
        value_and_gradients,
        mesh=mesh,
        in_specs=(specs, (PartitionSpec(BATCH_AXES),) * 2, table_specs),
        out_specs=(PartitionSpec(), specs),
        check_vma=False,
    )

    @jax.custom_vjp
    def loss(params, tokens):
        return both(params, tokens, tables)[0]

    def forward(params, tokens):
        return both(params, tokens, tables)

    def backward(gradients, cotangent):
        return jax.tree.map(lambda g: g * cotangent, gradients), None

    loss.defvjp(forward, backward)
    return loss


def summed(gradient, spec, mesh, axes):
    """The sum of a gradient over those of the axes that do not cut it."""
    used = {axis for axes in axes_of(spec) for axis in axes}
    return over([axis for axis in axes if axis not in used], mesh, gradient)


def over(axes, mesh, value):
    """Sum over the axes with several chips; a sum over one chip would be a copy."""
    axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)
    return lax.psum(value, axes) if axes else value
