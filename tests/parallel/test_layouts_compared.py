"""Layouts that are found against those that names give: what they cost and what they send."""

import importlib
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from toolkit.measure import collectives
from toolkit.parallel import Machine, auto_layout, make_mesh, redco_layout
from toolkit.parallel.causes.comparison import compiled_gradient
from toolkit.parallel.dataflow.flow import WHOLE, cut_of
from toolkit.parallel.dataflow.propagation import follow

BF16, KEY = jnp.bfloat16, 128
WIDTH, INNER, GROUPED, FEED = 1024, 16 * KEY, 2 * KEY, 4096


def kernels(*, layers=(), **sizes):
    return {
        name: {"kernel": jax.ShapeDtypeStruct((*layers, *size), BF16)}
        for name, size in sizes.items()
    }


def mixed(x, attn, mlp):
    """Attention and a feed-forward layer; their projections fused, of low rank, or one by one."""
    a, f = ({name: one["kernel"] for name, one in part.items()} for part in (attn, mlp))
    if "c_attn" in a:
        q, k, v = jnp.split(x @ a["c_attn"], [INNER, INNER + GROUPED], -1)
    elif "kv_a_proj" in a:
        q, latent = x @ a["q_proj"], x @ a["kv_a_proj"]
        k, v = latent @ a["k_b_proj"], latent @ a["v_b_proj"]
    else:
        q, k, v = (x @ a[f"{one}_proj"] for one in "qkv")
    q, k, v = (one.reshape(*x.shape[:2], -1, KEY) for one in (q, k, v))
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + out.reshape(*x.shape[:2], -1) @ a["o_proj"]
    if "gate_up_proj" in f:
        gate, up = jnp.split(x @ f["gate_up_proj"], 2, -1)
    else:
        gate, up = x @ f["gate_proj"], x @ f["up_proj"]
    return x + (jax.nn.silu(gate) * up) @ f["down_proj"]


ONE_BY_ONE = {
    "q_proj": (WIDTH, INNER),
    "k_proj": (WIDTH, GROUPED),
    "v_proj": (WIDTH, GROUPED),
    "o_proj": (INNER, WIDTH),
}
GATED = {
    "gate_proj": (WIDTH, FEED),
    "up_proj": (WIDTH, FEED),
    "down_proj": (FEED, WIDTH),
}
PROJECTIONS = {
    "few heads of keys": (kernels(**ONE_BY_ONE), kernels(**GATED)),
    "fused": (
        kernels(c_attn=(WIDTH, INNER + 2 * GROUPED), o_proj=(INNER, WIDTH)),
        kernels(gate_up_proj=(WIDTH, 2 * FEED), down_proj=(FEED, WIDTH)),
    ),
    "low rank": (
        kernels(
            q_proj=(WIDTH, INNER),
            kv_a_proj=(WIDTH, 512),
            k_b_proj=(512, INNER),
            v_b_proj=(512, INNER),
            o_proj=(INNER, WIDTH),
        ),
        kernels(**GATED),
    ),
    "scanned": (kernels(layers=(2,), **ONE_BY_ONE), kernels(layers=(2,), **GATED)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PROJECTIONS)
def test_what_is_found_sends_no_more_than_what_names_say(case):
    """Modelled seconds and compiled bytes, against Redco's rules."""
    mesh = make_mesh({"data": 2, "model": 4})

    def loss(p, x):
        if case == "scanned":
            return jnp.mean(jax.lax.scan(lambda x, p: (mixed(x, **p), None), x, p)[0] ** 2)
        return jnp.mean(mixed(x, **p) ** 2)

    params = dict(zip(("attn", "mlp"), PROJECTIONS[case], strict=True))
    x = jax.ShapeDtypeStruct((32, 256, WIDTH), BF16)
    program, axes = jax.make_jaxpr(jax.value_and_grad(loss))(params, x), list(mesh.shape)
    seconds, sent = [], []
    for layout in (auto_layout(loss, params, x, mesh), redco_layout(params, mesh)):
        cuts = [cut_of(row.spec, len(row.shape), axes) for row in layout.placements]
        given = [*cuts, cut_of(layout.batch, x.ndim, axes)]
        flow = follow(program, given, dict(mesh.shape), results=[(WHOLE, WHOLE), *cuts])
        seconds.append(flow.seconds(Machine()))
        found = collectives(compiled_gradient(loss, params, x, layout))
        sent.append(sum(collective.total_bytes_sent for collective in found))
    assert seconds[0] <= seconds[1]
    assert sent[0] <= sent[1]


@pytest.mark.nightly
def test_the_tables_of_the_page_are_those_of_their_command(monkeypatch):
    """All but FLOPs and memory, which tests compile otherwise than users do."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs")
    layouts = importlib.import_module("layouts")
    assert (*layouts.MESH.values(), layouts.KEY, layouts.BUDGET) == (2, 4, 16, 0.95)
    params, x = layouts.shapes(64, 256, 4, 2, ())  # as `searched` has them; `budgeted`: 128, 512
    assert x.shape == (8, 32, 64)
    assert params["attention"]["q"]["kernel"].shape == (64, 4 * 16)

    def counted(text):
        rows = [
            [cell.strip() for cell in line.split("|")]
            for table in layouts.PLACE.findall(text)
            for line in table.splitlines()
            if not layouts.is_theirs(line)
        ]
        memory = re.compile(r", `memory=\d+`")
        return [[memory.sub(" within", row[1]), *row[2:-5], *row[-3:]] for row in rows]

    page = layouts.PAGE.read_text()
    assert len(rows := counted(page)) == 5 + 6
    assert counted(layouts.with_tables(page)) == rows
