"""Fifty layouts made worse at random, none of which shaped the search of `blame`.

Ten programs with a good layout on a mesh of 2 x 4; a seed moves, adds or exchanges axes in up to
three of their arrays, so that devices hold no less. The good layout is the best mend known. Seeds 0
to 4 were looked at while the search was written; those here were not.
"""

import random

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

SEEDS = range(5, 10)


def layer_norm(x, scale):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def gated(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def attention(p, x):
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bqhk,bthk->bhqt", q, k))
    return jnp.einsum("bhqt,bthk,hkd->bqd", scores, v, p["o"])


def biased(p, x):
    return jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"] + p["last"]


def language(p, words):
    x = p["embed"][words]
    return jax.nn.logsumexp(layer_norm(x, p["scale"]) @ p["head"], -1)


def stack(p, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    return jax.lax.scan(layer, x, p)[0]


def experts(p, x):
    gates = jax.nn.softmax(x @ p["router"])
    inner = jnp.tanh(jnp.einsum("bd,edf->bef", x, p["up"]))
    return jnp.einsum("bef,efd,be->bd", inner, p["down"], gates)


def low_rank(p, x):
    return jax.nn.gelu(x @ p["a"] @ p["b"]) @ p["c"]


def descent(p, x):
    gradients = jax.grad(lambda p: jnp.mean(gated(p["w"], x) ** 2))(p)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, p["m"], gradients["w"])
    return {"w": jax.tree.map(lambda w, m: w - m, p["w"], moments), "m": moments}


def images(p, x):
    x = jax.nn.relu(jnp.einsum("bhwc,cf->bhwf", x, p["one"]))
    return jnp.einsum("bhwf,fc->bhwc", x, p["two"]).mean((1, 2)) @ p["head"]


def joined(p, x):
    halves = jnp.concatenate([x @ p["left"], x @ p["right"]], 1)
    return jnp.tanh(halves) @ p["down"]


W, F = 32, 64
PAIR = {"gate": ((W, F), P(None, "m")), "up": ((W, F), P(None, "m")), "down": ((F, W), P("m"))}
HEADS = {n: ((W, 4, 8), P(None, "m")) for n in "qkv"} | {"o": ((4, 8, W), P("m"))}
ROWS = P("d")
PROGRAMS = {
    gated: (PAIR, ((64, W), ROWS), ROWS),
    attention: (HEADS, ((8, 16, W), ROWS), ROWS),
    biased: (
        {"up": PAIR["up"], "bias": ((F,), P("m")), "down": PAIR["down"], "last": ((W,), P())},
        ((64, W), ROWS),
        ROWS,
    ),
    language: (
        {"embed": ((256, W), P("m")), "head": ((W, 256), P(None, "m")), "scale": ((W,), P())},
        ((8, 16), ROWS),
        ROWS,
    ),
    stack: (
        {"up": ((2, W, F), P(None, None, "m")), "down": ((2, F, W), P(None, "m"))},
        ((64, W), ROWS),
        ROWS,
    ),
    experts: (
        {
            "router": ((W, 4), P()),
            "up": ((4, W, F), P("m")),
            "down": ((4, F, W), P("m")),
        },
        ((64, W), ROWS),
        ROWS,
    ),
    low_rank: (
        {"a": ((W, 8), P()), "b": ((8, F), P(None, "m")), "c": ((F, W), P("m"))},
        ((64, W), ROWS),
        ROWS,
    ),
    descent: ({"w": PAIR, "m": PAIR}, ((64, W), ROWS), dict.fromkeys("wm", PAIR)),
    images: (
        {"one": ((W, F), P(None, "m")), "two": ((F, W), P("m")), "head": ((W, 8), P())},
        ((8, 4, 4, W), ROWS),
        ROWS,
    ),
    joined: (
        {"left": ((W, F), P()), "right": ((W, F), P()), "down": ((2 * F, W), P())},
        ((64, W), P(("d", "m"))),
        P(("d", "m")),
    ),
}


def is_row(one):
    return isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], P)


def worse(program, seed, mesh):
    """(function, good arguments, bad arguments, result shardings good and bad)."""
    params, batch, results = PROGRAMS[program]
    rows, structure = jax.tree.flatten((params, batch), is_leaf=is_row)
    chance = random.Random(f"{program.__name__} {seed}")
    changed = rows
    while changed == rows or held(changed) < held(rows):  # the good one must hold no more
        changed = mutated(rows, chance)

    def placed(rows):
        args = jax.tree.unflatten(structure, rows)
        dtype = jnp.int32 if program is language else jnp.float32
        found = jax.tree.map(
            lambda row: jax.ShapeDtypeStruct(
                row[0], jnp.float32, sharding=NamedSharding(mesh, row[1])
            ),
            args,
            is_leaf=is_row,
        )
        x = jax.ShapeDtypeStruct(found[1].shape, dtype, sharding=found[1].sharding)
        return found[0], x

    def outs(params_of):
        specs = params_of if program is descent else results
        return jax.tree.map(
            lambda row: NamedSharding(mesh, row[1] if is_row(row) else row), specs, is_leaf=is_leaf
        )

    def is_leaf(one):
        return is_row(one) or isinstance(one, P)

    bad = jax.tree.unflatten(structure, changed)[0]
    return program, placed(rows), placed(changed), outs(params), outs(bad)


SIZES = {"d": 2, "m": 4, ("d", "m"): 8, None: 1}


def held(rows):
    total = 0.0
    for shape, spec in rows:
        size = 1.0
        for n in shape:
            size *= n
        for axis in spec:
            size /= SIZES[axis]
        total += size
    return total


def mutated(rows, chance):
    changed = list(rows)
    for place in chance.sample(range(len(rows)), chance.choice((1, 1, 2, 3))):
        shape, spec = rows[place]
        entries = [*spec, *[None] * (len(shape) - len(spec))]
        for _ in range(50):
            new = entries[:]
            chance.shuffle(new)
            if chance.random() < 0.5:
                free = [axis for axis in "dm" if axis not in str(new)]
                if free and None in new:
                    new[new.index(None)] = chance.choice(free)
            if new != entries and all(n % SIZES[a] == 0 for n, a in zip(shape, new, strict=True)):
                changed[place] = (shape, P(*new))
                break
    return changed
