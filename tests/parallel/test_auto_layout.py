"""Layouts found by following programs, and by Redco's names; costs against closed forms."""

import jax
import jax.numpy as jnp
import pytest
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import PartitionSpec as P

from toolkit.measure import program_cost
from toolkit.parallel import (
    Machine,
    auto_layout,
    compare_layouts,
    layout,
    logical_layout,
    make_mesh,
    redco_layout,
)
from toolkit.parallel.causes.comparison import compiled_gradient
from toolkit.parallel.dataflow.budget import cut_further
from toolkit.parallel.dataflow.flow import WHOLE
from toolkit.parallel.dataflow.propagation import follow

BF16 = jnp.bfloat16
BATCH, TIME, WIDTH, HEADS, KEY, INNER, VOCABULARY, LAYERS = 8, 2048, 4096, 32, 128, 11008, 32000, 2


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 2, "model": 4})


def shapes(**sizes):
    return {name: jax.ShapeDtypeStruct(size, BF16) for name, size in sizes.items()}


def specs(layout):
    return {row.path: tuple(row.spec) for row in layout.placements}


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True)) * scale


def attention(x, q, k, v, o):
    split = [one.reshape(*x.shape[:2], -1, KEY) for one in (q, k, v)]
    out = jax.nn.dot_product_attention(*split, is_causal=True)
    return x + out.reshape(*x.shape[:2], -1) @ o


def language_loss(params, tokens):
    def layer(x, p):
        h = norm(x, p["n1"])
        x = attention(x, h @ p["q"], h @ p["k"], h @ p["v"], p["o"])
        h = norm(x, p["n2"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
    logits = (norm(x, params["n"]) @ params["head"]).astype(jnp.float32)
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
    return -jnp.mean(found)


def language_params(kv_heads):
    inner, grouped = HEADS * KEY, kv_heads * KEY
    layers = shapes(
        q=(LAYERS, WIDTH, inner),
        k=(LAYERS, WIDTH, grouped),
        v=(LAYERS, WIDTH, grouped),
        o=(LAYERS, inner, WIDTH),
        gate=(LAYERS, WIDTH, INNER),
        up=(LAYERS, WIDTH, INNER),
        down=(LAYERS, INNER, WIDTH),
        n1=(LAYERS, WIDTH),
        n2=(LAYERS, WIDTH),
    )
    table = shapes(embed=(VOCABULARY, WIDTH), head=(WIDTH, VOCABULARY), n=(WIDTH,))
    return {"layers": layers, **table}


TOKENS = jax.ShapeDtypeStruct((BATCH, TIME), jnp.int32)
HIDDEN = jax.ShapeDtypeStruct((BATCH, TIME, WIDTH), BF16)
COLUMN, ROW = (None, "model"), ("model",)


@pytest.mark.parametrize("kv_heads", [32, 8])
def test_a_scanned_transformer_is_cut_as_megatron_cuts_it(mesh, kv_heads):
    layout = auto_layout(language_loss, language_params(kv_heads), TOKENS, mesh)
    columns = dict.fromkeys(("q", "k", "v", "gate", "up"), (None, *COLUMN))
    stack = {**columns, "o": (None, *ROW), "down": (None, *ROW), "n1": (), "n2": ()}
    wanted = {f"layers/{name}": spec for name, spec in stack.items()}
    assert specs(layout) == wanted | {"embed": ROW, "head": COLUMN, "n": ()}
    reasons = {row.path: row.reason for row in layout.placements}
    assert reasons["layers/up"].startswith("column: the product at test_auto_layout.py:")
    assert reasons["layers/down"].endswith("sums dimension 1; one all-reduce follows")
    assert reasons["embed"].startswith("table: each device looks up its rows")
    layout.check()
    assert layout.batch == P("data")


def test_one_head_of_keys_is_not_cut_along_its_size(mesh):
    """Of queries by heads and keys by size, a compiler would sum partial scores."""
    given = {"loss_fn": language_loss, "batch": TOKENS}
    found = specs(layout(language_params(1), mesh, "tensor", **given))
    assert found["layers/q"] == (None, None, "model")
    assert not found["layers/k"]


def test_few_heads_of_keys_are_shared_and_their_queries_cut(mesh):
    """Two on four devices: each head by two devices, each of these with half of its queries."""
    found = specs(auto_layout(language_loss, language_params(2), TOKENS, mesh))
    assert found["layers/q"] == (None, *COLUMN)
    assert found["layers/o"] == found["layers/down"] == (None, *ROW)


def test_latents_stay_whole_and_heads_are_cut(mesh):
    def loss(p, x):
        h = norm(x, p["n"])
        q = norm(h @ p["q_a"], p["q_n"]) @ p["q_b"]
        latent = norm(h @ p["kv_a"], p["kv_n"])
        return jnp.mean(attention(x, q, latent @ p["k_b"], latent @ p["v_b"], p["o"]) ** 2)

    inner, rank, kv_rank = HEADS * KEY, 1536, 512
    down = {"q_a": (WIDTH, rank), "kv_a": (WIDTH, kv_rank)}
    up = {"q_b": (rank, inner), "k_b": (kv_rank, inner), "v_b": (kv_rank, inner)}
    scales = {"n": (WIDTH,), "q_n": (rank,), "kv_n": (kv_rank,)}
    params = shapes(**down, **up, **scales, o=(inner, WIDTH))
    slow = Machine(bandwidth=1e11)
    for machine in (Machine(), slow):
        found = specs(auto_layout(loss, params, HIDDEN, mesh, machine=machine))
        assert {found[name] for name in up} == {COLUMN}
        assert found["o"] == ROW
        assert all(found[name] != COLUMN for name in down)
        assert found["q_n"] == found["kv_n"] == ()
    assert {found[name] for name in down} == {()}  # where links are slow


@pytest.mark.parametrize("order", ["thirds outermost", "heads outermost"])
def test_fused_projections_are_cut_where_exchanging_their_parts_is_cheap(mesh, order):
    def loss(p, x):
        fused = x @ p["qkv"]
        if order == "thirds outermost":
            q, k, v = jnp.split(fused, 3, -1)
        else:
            parts = fused.reshape(*x.shape[:2], HEADS, 3, KEY)
            q, k, v = (parts[..., i, :] for i in range(3))
        return jnp.mean(attention(x, q, k, v, p["o"]) ** 2)

    params = shapes(qkv=(WIDTH, 3 * HEADS * KEY), o=(HEADS * KEY, WIDTH))
    found = auto_layout(loss, params, HIDDEN, mesh)
    assert specs(found) == {"qkv": COLUMN, "o": ROW}
    program = jax.make_jaxpr(loss)(params, HIDDEN)
    cuts = [(WHOLE, 0), (WHOLE, 1), (0, WHOLE)]  # o, qkv, x
    moves = [move.kind for move in follow(program, cuts, dict(mesh.shape)).moves]
    assert ("all-to-all" in moves) == (order == "thirds outermost")


def test_a_low_rank_pair_is_not_worth_its_all_reduce(mesh):
    def loss(p, x):
        return jnp.mean((x + jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)

    params = shapes(a=(WIDTH, 16), b=(16, WIDTH))
    layout = auto_layout(loss, params, HIDDEN, mesh)
    assert specs(layout) == {"a": (), "b": ()}
    assert "would cost" in layout.placements[0].reason


def test_the_modelled_moves_of_a_pair_are_the_textbooks():
    def loss(p, x):
        return jnp.mean((x + jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)

    width, inner, rows, mesh = 64, 128, 4096, {"data": 4, "model": 2}
    params = {
        "down": jax.ShapeDtypeStruct((inner, width), jnp.float32),
        "up": jax.ShapeDtypeStruct((width, inner), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    program = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(params, x)
    cuts = [(WHOLE, 0), (WHOLE, 1), (0, WHOLE)]
    wanted = [(WHOLE, WHOLE), *cuts]
    flow = follow(program, cuts, mesh, results=wanted, machine=Machine(latency=0.0))
    local = rows * width * 4 // 4
    over = {
        axis: sorted(move.bytes_sent for move in flow.moves if move.axis == axis)
        for axis in ("data", "model")
    }
    assert over["model"] == [local, local]  # once forward, once backward: 2 (N-1)/N of it
    gradient = 2 * 3 / 4 * width * inner * 4 / 2
    assert over["data"] == [6.0, gradient, gradient]
    assert flow.flops == 2 * 3 * 2 * rows * width * inner / 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axis": "tensor"}, "axis must be one of 'data', 'model'; got 'tensor'"),
        ({"axis": "data"}, "axis='data': want another axis than batch_axis"),
        ({"batch": jnp.ones((3, 4))}, r"batch: an array of shape \(3, 4\); want a first dimension"),
        ({"loss_fn": lambda p, x: x}, "loss_fn: want a function that returns one floating"),
        ({"loss_fn": lambda p, x: jnp.int32(3)}, "loss_fn: want a function that returns one floa"),
        ({"params": {"w": jnp.ones((4, 4), int)}}, "params, at 'w': got int32, want floating"),
    ],
)
def test_what_does_not_fit_is_refused(mesh, change, message):
    given = {
        "loss_fn": lambda p, x: jnp.sum(x @ p["w"]),
        "params": {"w": jnp.ones((4, 4))},
        "batch": jnp.ones((8, 4)),
        "mesh": mesh,
    }
    with pytest.raises((ValueError, TypeError), match=message):
        auto_layout(**(given | change))


NAMES = {r"(q|k|v)/kernel": ("embed", "heads"), "o/kernel": ("heads", "embed")}
RULES = (("heads", "model"), ("embed", "model"), ("embed", None))


def test_logical_axes_are_flax_s(mesh):
    """The rules in their order, an axis once per parameter; what nobody names stays whole."""
    rules = (("batch", "data"), ("mlp", "model"), ("embed", ("data", "model")), ("embed", "data"))
    names = {"up": ("embed", "mlp"), "norm": ("embed",), "odd": (None, "batch", "other")}
    sizes = {"up": (8, 8), "norm": (8,), "odd": (8, 8, 8), "free": (8,)}
    found = specs(logical_layout(shapes(**sizes), mesh, names, rules))
    for path, own in names.items():
        whole = (*found[path], *[None] * (len(own) - len(found[path])))
        assert whole == tuple(logical_to_mesh_axes(own, rules) or ())
    assert found["free"] == ()


@pytest.mark.parametrize(
    ("names", "rules", "message"),
    [
        ({"w": ("a",)}, (), r"names: 'w' names 1 dimensions, w has 2"),
        ({"w": ("a", "a")}, (), "names: 'w' names a dimension twice: a, a"),
        ({"(": ("a",)}, (), r"names: '\(' is not a regular expression"),
        ({}, (("a", "tensor"),), "rules: no axis 'tensor'; the mesh has 'data', 'model'"),
    ],
)
def test_logical_axes_that_do_not_fit_are_refused(mesh, names, rules, message):
    with pytest.raises(ValueError, match=message):
        logical_layout(shapes(w=(4, 4)), mesh, names, rules)


def test_compiled_collectives_of_what_is_found_and_of_names_side_by_side(mesh):
    """Two heads of keys and values on four devices: cut by heads, as names cut them."""

    def loss(p, x):
        q, k, v = (x @ p["attn"][name]["kernel"] for name in "qkv")
        split = [one.reshape(*x.shape[:2], -1, 16) for one in (q, k, v)]
        out = jax.nn.dot_product_attention(*split).reshape(*x.shape[:2], -1)
        return jnp.mean((x + out @ p["attn"]["o"]["kernel"]) ** 2)

    wide, narrow = (64, 64), (64, 32)  # four heads, two of keys and values
    shapes = {"q": wide, "k": narrow, "v": narrow, "o": wide}
    params = {
        "attn": {
            name: {"kernel": jax.ShapeDtypeStruct(size, jnp.float32)}
            for name, size in shapes.items()
        }
    }
    x = jax.ShapeDtypeStruct((8, 32, 64), jnp.float32)
    small = Machine(latency=0.0, flops=16 * Machine().bandwidth)
    layouts = {
        "auto": auto_layout(loss, params, x, mesh, machine=small),
        "redco": redco_layout(params, mesh),
        "logical": logical_layout(params, mesh, NAMES, RULES),
    }
    assert specs(layouts["redco"])["attn/k/kernel"] == COLUMN
    for name, spec in (("q", COLUMN), ("k", COLUMN), ("o", ROW)):
        assert specs(layouts["auto"])[f"attn/{name}/kernel"] == spec
    table = compare_layouts(loss, params, x, layouts)
    header, *rows = (line.split() for line in table.splitlines())
    assert header[0] == "layout"
    assert header[-3:] == ["sent", "parameters", "held"]
    assert [row[0] for row in rows] == ["auto", "redco", "logical"]
    assert rows[1][1:] == rows[2][1:]  # other names, the same cuts
    assert all(row[-2:] == ["12.0", "KiB"] for row in rows)
    with pytest.raises(ValueError, match="layouts is empty"):
        compare_layouts(loss, params, x, {})


# Redco's own generator, re-implemented independently: names -> shapes -> specs for four devices.
H, F, V = 64, 256, 1000


def block(**modules):
    return {name: {"kernel": jax.ShapeDtypeStruct(size, BF16)} for name, size in modules.items()}


def table(vocabulary):
    return {"embedding": jax.ShapeDtypeStruct((vocabulary, H), BF16)}


GOLDEN = {
    "llama": (
        {
            "attn": block(q_proj=(H, H), k_proj=(H, H), v_proj=(H, H), o_proj=(H, H)),
            "mlp": block(gate_proj=(H, F), up_proj=(H, F), down_proj=(F, H)),
            **block(lm_head=(H, V)),
            "embed": table(V),
            "norm": {"weight": jax.ShapeDtypeStruct((H,), BF16)},
        },
        {
            **dict.fromkeys((f"attn/{one}_proj/kernel" for one in "qkv"), COLUMN),
            "attn/o_proj/kernel": ROW,
            "mlp/gate_proj/kernel": COLUMN,
            "mlp/up_proj/kernel": COLUMN,
            "mlp/down_proj/kernel": ROW,
            "lm_head/kernel": COLUMN,
            "embed/embedding": ROW,
            "norm/weight": (),
        },
    ),
    "opt": (
        {"layer": block(fc1=(H, F), fc2=(F, H)), "self_attn": block(out_proj=(H, H))},
        {
            "layer/fc1/kernel": COLUMN,
            "layer/fc2/kernel": ROW,
            "self_attn/out_proj/kernel": ROW,
        },
    ),
    "t5": (
        {"SelfAttention": block(o=(H, H)), "ff": block(wi_0=(H, F), wo=(F, H))},
        {"SelfAttention/o/kernel": ROW, "ff/wi_0/kernel": COLUMN, "ff/wo/kernel": ROW},
    ),
    "gpt-j": (
        {"mlp": block(fc_in=(H, F), fc_out=(F, H))},
        {"mlp/fc_in/kernel": COLUMN, "mlp/fc_out/kernel": ROW},
    ),
    "gpt-2, kernels stored transposed": (
        {
            "attn": block(c_attn=(3 * H, H), c_proj=(H, H)),
            "mlp": block(c_fc=(F, H), c_proj=(H, F)),
        },
        {
            "attn/c_attn/kernel": COLUMN,
            "attn/c_proj/kernel": COLUMN,
            "mlp/c_fc/kernel": ROW,
            "mlp/c_proj/kernel": COLUMN,
        },
    ),
    "mnist cnn": (
        block(Conv_0=(3, 3, 1, 32), Conv_1=(3, 3, 32, 64), Dense_0=(3136, 256), Dense_1=(256, 10)),
        {
            "Conv_0/kernel": (None, None, None, "model"),
            "Conv_1/kernel": (None, None, "model"),
            "Dense_0/kernel": COLUMN,
            "Dense_1/kernel": ROW,
        },
    ),
    "a vocabulary that does not divide": (
        {"wte": table(50257)},
        {"wte/embedding": COLUMN},
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_redco_golden_vectors(mesh, name):
    params, wanted = GOLDEN[name]
    assert specs(redco_layout(params, mesh)) == wanted


def test_redco_cuts_latents_where_the_program_says_whole(mesh):
    params = {"attn": block(q_a_proj=(H, 32), kv_a_proj_with_mqa=(H, 32), q_b_proj=(32, H))}
    assert set(specs(redco_layout(params, mesh)).values()) == {COLUMN}
    with pytest.raises(ValueError, match="axis must be one of"):
        redco_layout(params, mesh, axis="tensor")


def test_a_memory_budget_is_held_by_the_compiled_program(mesh):
    """Where what is fastest does not fit, parameters are cut along the batch's axis as well."""

    def loss(p, x):
        def layer(x, p):
            return x + jnp.tanh(x @ p["up"]) @ p["down"], None

        return jnp.mean(jax.lax.scan(layer, x, p)[0] ** 2)

    params = {"up": jnp.zeros((8, 64, 256)), "down": jnp.zeros((8, 256, 64))}
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    small = Machine(latency=0.0, flops=16 * Machine().bandwidth)
    given = {"loss_fn": loss, "params": params, "batch": x, "mesh": mesh, "machine": small}
    fastest = auto_layout(**given)
    needs = [
        program_cost(compiled_gradient(loss, params, x, found)).resident_bytes
        for found in (fastest, cut_further(fastest, "data", {(0, 0), (1, 0)}))
    ]
    assert needs[1] < needs[0]
    assert auto_layout(**given, memory=needs[0]) == fastest
    tight = auto_layout(**given, memory=needs[0] - 1)
    assert program_cost(compiled_gradient(loss, params, x, tight)).resident_bytes < needs[0]
    with pytest.raises(ValueError, match=r"memory=1000: the least of 4 layouts compiled needs \d+"):
        auto_layout(**given, memory=1000)
    layouts = {"auto": fastest, "redco": redco_layout(params, mesh), "compiler": None}
    header, *rows = compare_layouts(loss, params, x, layouts).splitlines()
    assert "FLOPs" in header
    assert "memory" in header
    assert rows[2].split()[-2:] == ["1.00", "MiB"]  # the compiler leaves parameters whole
    with pytest.raises(ValueError, match="layouts: all are None"):
        compare_layouts(loss, params, x, {"compiler": None})
