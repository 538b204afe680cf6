"""Training steps whose layout has one fault, by seed: thirty that `blame` is graded on.

Each is a good layout (tensor parallel, data parallel, or fully sharded) in which one thing lies
wrongly; `good` is the same without the fault.
"""

import random
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

KINDS = (
    "a weight transposed",
    "a contraction cut on one side",
    "moments replicated",
    "the vocabulary gathered for the loss",
    "an activation gathered",
    "the batch cut along time",
    "a missing constraint",
)
BATCH, TIME = 16, 8


@dataclass(frozen=True)
class Case:
    """A step with its arguments and result shardings, with the fault and without."""

    kind: str
    step: Any
    arguments: tuple
    results: Any
    good: tuple


def bad_layout(seed, mesh_of):
    """The case of a seed; `mesh_of(axes)` makes meshes."""
    chance = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    model = chance.choice((2, 4))
    mesh = mesh_of({"data": 8 // model, "model": model})
    width, inner, vocabulary = (chance.choice(sizes) for sizes in ((32, 64), (96, 128), (256, 320)))
    layers = chance.choice((1, 2))
    shapes = {
        "embed": (vocabulary, width),
        "head": (width, vocabulary),
        "layers": [{"up": (width, inner), "down": (inner, width)} for _ in range(layers)],
    }
    specs = {
        "embed": P(None, None),
        "head": P(None, "model"),
        "layers": [{"up": P(None, "model"), "down": P("model", None)} for _ in range(layers)],
    }
    layer = chance.randrange(layers)
    moments, batch, logits, hidden = specs, P("data", None), P("data", None, "model"), None
    if kind == "a weight transposed":
        specs = moments = changed(specs, layer, chance.choice(("up", "down")), chance, swap=True)
    elif kind == "a contraction cut on one side":
        # Both of a pair by rows: the first then sums over devices what is whole on them.
        specs = moments = changed(specs, layer, "up", chance, spec=P("model", None))
    elif kind == "moments replicated":
        moments = changed(specs, layer, chance.choice(("up", "down")), chance, spec=P())
    elif kind == "the vocabulary gathered for the loss":
        logits = P("data", None, None)
    elif kind == "an activation gathered":
        hidden = chance.choice((P("data", None, None), P(None, None, "model")))
    elif kind == "the batch cut along time":
        batch = P(None, "data")
    else:  # a table cut along its width: looked up, it is cut as the batch would be
        specs = moments = {**specs, "embed": P(None, "data")}
    embedded = P("data", None, None) if kind == "a missing constraint" else None
    step = make_step(mesh, logits, hidden, None)
    good = make_step(mesh, P("data", None, "model"), None, embedded)
    right = {**specs, "layers": [{"up": P(None, "model"), "down": P("model", None)}] * layers}
    wrong = placed(mesh, shapes, specs, moments, batch)
    return Case(kind, step, *wrong, (good, *placed(mesh, shapes, right, right, P("data", None))))


def changed(specs, layer, name, chance, *, swap=False, spec=None):
    layers = [dict(one) for one in specs["layers"]]
    spec = P(*reversed(layers[layer][name])) if swap else spec
    layers[layer][name] = spec
    return {**specs, "layers": layers}


def placed(mesh, shapes, specs, moments, batch):
    """Arguments (params, moments, tokens) and the shardings of (params, moments, loss)."""
    is_leaf = lambda one: isinstance(one, tuple)  # noqa: E731

    def arrays(specs):
        return jax.tree.map(
            lambda shape, spec: jax.ShapeDtypeStruct(
                shape, jnp.float32, sharding=NamedSharding(mesh, spec)
            ),
            shapes,
            specs,
            is_leaf=is_leaf,
        )

    tokens = jax.ShapeDtypeStruct((BATCH, TIME), jnp.int32, sharding=NamedSharding(mesh, batch))
    params, moments = arrays(specs), arrays(moments)
    outs = jax.tree.map(lambda one: one.sharding, (params, moments))
    return (params, moments, tokens), (*outs, NamedSharding(mesh, P()))


def make_step(mesh, logits_spec, hidden_spec, embedded_spec):
    def hold(x, spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def loss(params, tokens):
        x = params["embed"][tokens]
        if embedded_spec is not None:
            x = hold(x, embedded_spec)
        for layer in params["layers"]:
            inner = jnp.tanh(x @ layer["up"])
            if hidden_spec is not None:
                inner = hold(inner, hidden_spec)
            x = x + inner @ layer["down"]
        logits = x @ params["head"]
        logits = hold(logits, logits_spec)
        wanted = jax.nn.one_hot(tokens, logits.shape[-1])
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * wanted, -1))

    def step(params, moments, tokens):
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments, value

    return step
