"""Pipelines run: loss and gradients of one device in float64; messages and memory as planned."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from float64 import enable_x64
from jax.sharding import PartitionSpec as P

from toolkit.measure import collectives
from toolkit.parallel import make_mesh
from toolkit.parallel.pipeline import Context, Pipeline, module_stages
from toolkit.parallel.pipeline.partition import partition
from toolkit.schedules import (
    breadth_first,
    dual_pipe_v,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)

pytestmark = pytest.mark.usefixtures("not_cached")

TOLERANCE = 1e-12  # float64
MEMORY = 0.15
WIDTH, WORDS, MICROBATCHES, BATCH, TIME = 8, 11, 4, 2, 3
SLOW = (gpipe, interleaved, breadth_first, zero_bubble_h1, zero_bubble_h2, zero_bubble_v)
MAKERS = [one_forward_one_backward, *(pytest.param(make, marks=pytest.mark.slow) for make in SLOW)]


@pytest.fixture(autouse=True)
def _float64():
    with enable_x64(True):
        yield


def stage(w, x, context):
    """A residual block within documents: the mean of a document's tokens so far, then an MLP."""
    ids = context.data["document"]
    seen = (ids[:, :, None] == ids[:, None, :]) & jnp.tri(ids.shape[1], dtype=bool)
    x = x + (seen / seen.sum(-1, keepdims=True)).astype(x.dtype) @ x
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def first(shared, data):
    return shared["table"][data["tokens"]]


def last(shared, x, data):
    logits = x @ shared["table"].T
    losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(
        logits, data["targets"][..., None], -1
    ).squeeze(-1)
    return jnp.sum(losses * (data["document"] >= 0))


def example(stages, batch=BATCH):
    """Rows of weights, shared parameters, and packed documents with padding (document -1)."""
    up, down, table, tokens = jax.random.split(jax.random.key(0), 4)
    draw = partial(jax.random.normal, dtype=jnp.float64)
    ups, downs = (draw(key, (stages, WIDTH, WIDTH)) / 3 for key in (up, down))
    text = jax.random.randint(tokens, (MICROBATCHES, batch, TIME + 1), 0, WORDS)
    ids = jnp.arange(MICROBATCHES * batch * TIME).reshape(MICROBATCHES, batch, TIME) // 2 % 5 - 1
    data = {"tokens": text[..., :-1], "targets": text[..., 1:], "document": ids}
    weights = [{"up": a, "down": b} for a, b in zip(ups, downs, strict=True)]
    return weights, {"table": draw(table, (WORDS, WIDTH))}, data


def mesh_of(**axes):
    return make_mesh(axes, devices=jax.devices()[: int(jnp.prod(jnp.array(list(axes.values()))))])


def plain(stages, first, last, tied=None):
    """The loss on one device, microbatch by microbatch."""

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1))
    def loss(weights, shared, batch):
        total = 0
        for i in range(jax.tree.leaves(batch)[0].shape[0]):
            data = jax.tree.map(lambda a, i=i: a[i], batch)
            x = first(shared, data)
            for s, function in enumerate(stages):
                x = function(weights[tied[s] if tied else s], x, Context(data, shared, s))
            total += last(shared, x, data)
        return total

    return loss


def distance(found, wanted):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(jnp.max(jnp.abs(a - b) / (1 + jnp.abs(b)))) for a, b in pairs)


def outcome(pipeline, weights, shared, batch, specs=None):
    loss, (rows, rest) = jax.jit(pipeline)(pipeline.place(weights, specs), shared, batch)
    return loss, (pipeline.unplace(rows), rest)


@pytest.mark.parametrize("make", [dual_pipe_v, *MAKERS])
def test_every_schedule_gives_the_gradients_of_one_device(make):
    """With packed documents; the messages counted in the compiled program."""
    schedule = make(2, MICROBATCHES)
    weights, shared, batch = example(schedule.stages)
    wanted = plain([stage] * schedule.stages, first, last)(weights, shared, batch)
    how = {"first": first, "last": last, "schedule": schedule, "mesh": mesh_of(stage=2)}
    run = Pipeline(stage, weights=weights, recompute=(1,), **how)
    assert distance(outcome(run, weights, shared, batch), wanted) < TOLERANCE
    other = [*weights[1:], weights[0]]  # control: the order of the stages matters
    assert distance(outcome(run, other, shared, batch)[0], wanted[0]) > 1e-3
    compiled = jax.jit(run).lower(run.place(weights), shared, batch).compile()
    sent = [c for c in collectives(compiled) if c.kind == "collective-permute"]
    activation = BATCH * TIME * WIDTH * 8
    assert sum(c.count for c in sent) == run.program.permutes >= run.program.messages / 2
    assert sum(c.operand_bytes * c.count for c in sent) == run.program.permutes * activation
    assert all(c.is_count_exact for c in sent)


def test_the_program_does_not_grow_with_the_microbatches():
    lines = []
    for m in (4, 32):
        weights, shared, batch = example(2)
        batch = jax.tree.map(lambda a, m=m: jnp.concatenate([a] * (m // 4)), batch)
        schedule, mesh = zero_bubble_h1(2, m), mesh_of(stage=2)
        run = Pipeline(stage, first=first, last=last, weights=weights, schedule=schedule, mesh=mesh)
        lines.append(jax.jit(run).lower(run.place(weights), shared, batch).as_text().count("\n"))
    assert lines[0] == lines[1]


@pytest.mark.slow
def test_data_and_tensor_axes_of_one_mesh():
    weights, shared, batch = example(2, batch=4)
    wanted = plain([stage] * 2, first, last)(weights, shared, batch)
    schedule = zero_bubble_h1(2, MICROBATCHES)
    how = {"first": first, "last": last, "schedule": schedule, "weights": weights}
    run = Pipeline(stage, mesh=mesh_of(stage=2, data=2, tensor=2), data=["data"], **how)
    specs = {"up": P(None, "tensor"), "down": P("tensor", None)}
    assert distance(outcome(run, weights, shared, batch, specs), wanted) < TOLERANCE
    assert run.place(weights, specs)["up"].sharding.spec == P("stage", None, "tensor")


@pytest.mark.slow
def test_stages_of_any_kind():
    """Functions and weights that differ, tied weights, activations that are pytrees, and a shared
    parameter that only some stages read."""

    def double(w, x, context):
        h, start = x["h"], x["start"]
        return {"h": h * w["scale"] + context.shared["gate"] * start, "start": h}

    def mixed(w, x, context):
        h = jnp.sin(x["h"] @ w["a"]) @ w["b"]
        return {"h": h + (context.stage + 1) * x["start"], "start": x["start"]}

    weights, shared, batch = example(1)
    shared["gate"] = jnp.linspace(0.1, 1.0, WIDTH)
    scale = {"scale": jnp.linspace(1.0, 2.0, WIDTH)}
    rows = [scale, {"a": weights[0]["up"], "b": weights[0]["down"]}]
    begin = lambda shared, data: {"h": first(shared, data), "start": 2 * first(shared, data)}  # noqa: E731
    close = lambda shared, x, data: last(shared, x["h"] + x["start"], data)  # noqa: E731
    schedule, tied, functions = interleaved(2, MICROBATCHES), (0, 1, 0, 1), [double, mixed] * 2
    wanted = plain(functions, begin, close, tied)(rows, shared, batch)
    how = {"schedule": schedule, "mesh": mesh_of(stage=2), "weights": rows, "tied": tied}
    run = Pipeline(functions, first=begin, last=close, **how)
    assert len(run.kinds) == 2
    assert distance(outcome(run, rows, shared, batch), wanted) < TOLERANCE


def test_a_chain_of_modules_and_a_checkpoint_under_another_schedule():
    class Layer(nnx.Module):
        def __init__(self, seed):
            rngs = nnx.Rngs(seed)
            self.norm = nnx.LayerNorm(WIDTH, param_dtype=jnp.float64, rngs=rngs)
            self.inner = nnx.Linear(WIDTH, WIDTH, param_dtype=jnp.float64, rngs=rngs)

        def __call__(self, x):
            return x + jax.nn.gelu(self.inner(self.norm(x)))

    layers = [Layer(seed) for seed in range(2)]
    stages, weights = module_stages(layers)
    assert stages[0] is stages[1]
    _, shared, batch = example(1)
    wanted = plain(stages, first, last)(weights, shared, batch)
    how = {"first": first, "last": last, "weights": weights}
    one = Pipeline(stages, schedule=zero_bubble_h1(2, MICROBATCHES), mesh=mesh_of(stage=2), **how)
    assert distance(outcome(one, weights, shared, batch), wanted) < TOLERANCE
    other = Pipeline(stages, schedule=interleaved(1, 4), mesh=mesh_of(stage=1), **how)
    moved = other.unplace(other.place(one.unplace(one.place(weights))))
    assert distance(moved, weights) == 0
    with pytest.raises(ValueError, match=r"modules: .*count of stage 0 is no parameter"):
        module_stages([nnx.Dropout(0.5, rngs=nnx.Rngs(0))])


@pytest.mark.slow
def test_memory_of_the_compiled_program_is_the_schedules():
    """What waits has its places and no copy: beside them is only what one task takes, whose size a
    pipeline with few microbatches shows."""
    width, time = 16, 2048

    def deep(w, x, _):
        for up, down in w:
            x = x + jnp.tanh(x @ up) @ down
        return x

    def measured(schedule, recompute):
        matrix = jnp.ones((width, width), jnp.float32)
        weights = [[(matrix, matrix)] * 2] * schedule.stages
        run = Pipeline(
            deep, first=lambda _, data: data, last=lambda _, x, data: jnp.sum(x**2),
            weights=weights, schedule=schedule, mesh=mesh_of(stage=2), recompute=recompute,
        )  # fmt: skip
        batch = jnp.ones((schedule.microbatches, 1, time, width), jnp.float32)
        placed = run.place(weights)
        compiled = jax.jit(run).lower(placed, (), batch).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes, run.bytes_waiting(placed, (), batch)

    for recompute in (False, True):
        took, waits = measured(one_forward_one_backward(2, 3), recompute)
        for schedule in (gpipe(2, 12), one_forward_one_backward(2, 12), interleaved(2, 12, 3)):
            found, wanted = measured(schedule, recompute)
            assert abs(found - (wanted + took - waits)) < MEMORY * wanted, schedule.name
            if schedule.name == "GPipe":
                assert abs(found - took) > MEMORY * wanted  # control: the figure moves


def test_the_halves_of_a_backward_pass_share_its_work():
    def block(w, x, rest):
        (h,) = x
        for a, b in zip(w[::2], w[1::2], strict=True):
            h = h + jax.jit(lambda h, a=a: jnp.tanh(h @ a))(h) @ b * rest[0]
        return [h]

    keys = jax.random.split(jax.random.key(1), 6)
    w = [jax.random.normal(key, (WIDTH, WIDTH)) for key in keys[:4]]
    x, dy, rest = [jnp.ones((5, WIDTH))], [jax.random.normal(keys[5], (5, WIDTH))], [jnp.ones(())]
    y, pull = jax.vjp(lambda w, x: block(w, x, rest), w, x)
    wanted = pull(dy)

    def flops(f, *given):
        costs = jax.jit(f).lower(*given).compile().cost_analysis()
        assert costs is not None
        return costs["flops"]

    product = 2 * 5 * WIDTH * WIDTH
    for recompute, again in ((False, 0), (True, 4)):
        cut = partition(block, w, x, rest, recompute=recompute)
        found, kept = cut.forward(w, x, rest)
        assert len(kept) == (1 if recompute else 4)  # the input of every product
        dx, early, split = cut.input_gradient(w, rest, kept, dy)
        dw = cut.weight_gradient(w, rest, split)
        assert early == [None] * 4
        assert len(split) == 8  # of every product its input and its output's gradient
        assert distance((found, dw, dx), (y, *wanted)) < TOLERANCE
        assert distance(cut.backward(w, rest, kept, dy), wanted[::-1]) < TOLERANCE
        assert flops(cut.weight_gradient, w, rest, split) == 4 * product
        most = flops(cut.input_gradient, w, rest, kept, dy)
        assert (4 + again) * product >= most - 1000 >= (2 + again) * product


@pytest.mark.slow
def test_what_is_converted_is_kept_once_and_narrow():
    """Both norms of a stream, and its residual, wait as the one bfloat16 array that they read."""

    def block(w, x, _):
        wide = x[0].astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x[0].astype(jnp.float32) ** 2, -1, keepdims=True))
        return [x[0] + (wide * scale).astype(jnp.bfloat16) @ w[0]]

    w, x = [jnp.eye(WIDTH, dtype=jnp.bfloat16)], [jnp.ones((5, WIDTH), jnp.bfloat16)]
    cut = partition(block, w, x, [], recompute=False)
    large = [(a.shape, a.dtype) for a in cut.kept if a.size >= x[0].size]
    assert large == [((5, WIDTH), jnp.bfloat16)]
    _, kept = cut.forward(w, x, [])
    wanted = jax.vjp(lambda w, x: block(w, x, []), w, x)[1](x)
    found = cut.backward(w, [], kept, x)
    assert distance(found, wanted[::-1]) == 0


def test_halves_gather_together_what_a_whole_backward_pass_gathers():
    """The gradient of a sum over chips, once gathered, waits whole for that of the weights."""

    def block(w, x, _):
        whole = jax.lax.all_gather(x[0], "tensor", tiled=True)
        return [jax.lax.psum_scatter(whole @ w[0], "tensor", tiled=True)]

    def gathers(is_whole):
        def both_passes(w, x):
            cut = partition(block, [w], [x], [], recompute=False)
            _, kept = cut.forward([w], [x], [])
            if is_whole:
                return cut.backward([w], [], kept, [x])
            dx, _, split = cut.input_gradient([w], [], kept, [x])
            assert sorted(a.shape for a in split) == [(3, WIDTH), (6, WIDTH)]
            return dx, cut.weight_gradient([w], [], split)

        given = jnp.ones((WIDTH, WIDTH)), jnp.ones((6, WIDTH))
        specs = {"in_specs": (P(), P("tensor")), "out_specs": P("tensor")}
        run = jax.shard_map(both_passes, mesh=mesh_of(tensor=2), check_vma=False, **specs)
        return str(jax.make_jaxpr(run)(*given)).count("all_gather[")

    assert gathers(is_whole=False) == gathers(is_whole=True) == 3  # x twice, its gradient once


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mesh": {"other": 2}}, "'stage' is none of them"),
        ({"mesh": {"stage": 4}}, "'1F1B' has 2 devices, and axis 'stage' of the mesh 4"),
        ({"data": ["stage"]}, "data: got axis 'stage', along which the stages lie"),
        (
            {"mesh": {"stage": 2, "data": 4}, "data": ["data"]},
            r"batch: got int64\[4, 2, 3\], wanted a multiple of 4 devices along data",
        ),
        ({"recompute": (5,)}, "recompute: got stage 5, the schedule has 2"),
        ({"stage": [stage]}, "stage: got 1 functions for 2 stages"),
        ({"rows": 1}, "weights: got 1 rows, wanted 2"),
        ({"schedule": gpipe(2, 4, slices=2)}, "sequences in 2 slices"),
        ({"schedule": gpipe(2, 3)}, "wanted 3 microbatches in the first dimension"),
        ({"last": lambda shared, x, data: x}, "wanted a scalar"),
        ({"first": lambda shared, data: data["tokens"]}, "activations must be floating"),
        ({"stage": lambda w, x, _: x[..., :2]}, "a stage returns float64.* wanted the same shapes"),
        ({"integers": True}, "shared: got int64, wanted floating arrays"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(change, words):
    weights, shared, batch = example(2)
    how = {
        "schedule": one_forward_one_backward(2, MICROBATCHES), "first": first, "last": last,
        "stage": stage, "weights": weights[: change.pop("rows", 2)],
    }  # fmt: skip
    shared = {"n": jnp.arange(3)} if change.pop("integers", False) else shared
    how |= {**change, "mesh": mesh_of(**change.get("mesh", {"stage": 2}))}

    def trace():
        run = Pipeline(how.pop("stage"), **how)
        jax.eval_shape(run, run.place(weights), shared, batch)

    with pytest.raises(ValueError, match=words) as error:
        trace()
    assert "\n" not in str(error.value)
