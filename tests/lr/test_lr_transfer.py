"""Transfer of rates: the published table, the coordinate check, and usual rates that fail it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.lr import ModelOfWidth, coordinate_check, transfer, transferred_weights

SMALL, WIDTHS = 32, (64, 128, 256, 512)
FLAT, STEEP = 0.2, 0.3  # slopes that count as none, and at least that of the control
RATES = {"adam": 1e-3, "sgd": 0.1, "muon": 1e-2}


def weights(width, seed=1):
    keys = jax.random.split(jax.random.key(seed), 6)
    square = [jax.random.normal(key, (width, width)) * width**-0.5 for key in keys[:2]]
    return {
        "embed": jax.random.normal(keys[2], (16, width)) / 4,
        "bias": jnp.zeros(width),
        "hidden": square,
        "head": jax.random.normal(keys[3], (width, 8)) * width**-0.5,
        "narrow": jax.random.normal(keys[4], (width, 24)) * width**-0.5,
        "wide": jax.random.normal(keys[5], (24, width)) * 24**-0.5,
        "temperature": jnp.ones(1),
    }


def activations(params, x):
    h = jax.nn.relu(x @ params["embed"] + params["bias"])
    seen = {"first": h}
    for number, matrix in enumerate(params["hidden"]):
        h = seen[f"hidden {number}"] = jax.nn.relu(2**0.5 * h @ matrix)
    # A few channels in between, such as keys of a fixed number of heads, or a router.
    narrow = seen["narrow"] = h @ params["narrow"]
    h = seen["wide again"] = h + jax.nn.relu(narrow) @ params["wide"]
    return seen | {"logits": h @ params["head"] * params["temperature"]}


def network(width, optimizer="adam", is_moved=True):
    """A network of one width, with the moved rates or the usual ones."""
    draws = jax.random.split(jax.random.key(2))
    x = jax.random.normal(draws[0], (32, 16))
    labels = jax.random.randint(draws[1], (32,), 0, 8)
    small, params = weights(SMALL, 0), weights(width)
    moved = transfer(small, params, width=width / SMALL, optimizer=optimizer)
    as_muon = {"hidden": optax.contrib.MuonDimensionNumbers()}
    tuned = {
        "adam": optax.adam(RATES["adam"]),
        "sgd": optax.sgd(RATES["sgd"]),
        "muon": optax.contrib.muon(
            RATES["muon"], muon_weight_dimension_numbers=jax.tree.map(as_muon.get, moved.roles)
        ),
    }[optimizer]
    if is_moved:
        params = transferred_weights(small, params)
        tuned = optax.chain(tuned, moved.scale_rates())
    seen = lambda params: activations(params, x)  # noqa: E731
    return ModelOfWidth(params, tuned, lambda p: loss_of(seen(p), labels), seen)


def loss_of(seen, labels):
    return optax.softmax_cross_entropy_with_integer_labels(seen["logits"], labels).mean()


def test_factors_are_those_of_the_table():
    shapes = {
        "embedding": ((100, 8), (100, 32)), "gain": ((8,), (32,)), "head": ((8, 100), (32, 100)),
        "up": ((8, 16), (32, 128)), "query": ((8, 2, 4), (32, 8, 4)),
        "out": ((2, 4, 8), (8, 4, 32)),
        "stack": ((3, 8, 8), (3, 32, 32)), "positions": ((7,), (7,)),
        "key": ((8, 2, 4), (32, 2, 4)), "bias": ((2, 4), (8, 4)),
    }  # fmt: skip
    small, large = (
        {name: jax.ShapeDtypeStruct(pair[at], jnp.float32) for name, pair in shapes.items()}
        for at in (0, 1)
    )
    kinds = {
        "fixed": ["positions"],
        "input": ["bias", "embedding", "gain"],
        "output": ["head", "key"],
        "hidden": ["out", "query", "stack", "up"],
    }
    adam = transfer(small, large, width=4)
    assert adam.roles == {name: role for role, names in kinds.items() for name in names}
    assert {name for name, rate in adam.rates.items() if rate == 1} == {
        *kinds["fixed"], *kinds["input"],
    }  # fmt: skip
    assert {adam.rates[name] for name in (*kinds["output"], *kinds["hidden"])} == {1 / 4}
    assert adam.decays == {name: 1 / rate for name, rate in adam.rates.items()}
    assert (adam.logits, adam.residual, adam.epsilon) == (1 / 4, 1.0, 1 / 4)
    sgd = transfer(small, large, width=4, optimizer="sgd").rates
    wanted = {"fixed": 1.0, "input": 4.0, "output": 1 / 4, "hidden": 1.0}
    assert sgd == {n: wanted[role] for role, names in kinds.items() for n in names} | {"up": 2.0}
    # sqrt(out / in) grows by sqrt 2, and optax multiplies by as much itself.
    assert transfer(small, large, width=4, optimizer="muon").rates["up"] == pytest.approx(1.0)
    # The transposed tree of torch gives the same.
    turned = [{"up": jnp.ones(shape[::-1])} for shape in shapes["up"]]
    assert transfer(*turned, width=4, input_axis="last").rates == {"up": 1 / 4}


def torch_tree(width):
    """Weights [output, input], but an embedding [vocabulary, width], as torch has them."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(width)
    parts = torch.nn.ModuleDict({
        "wte": torch.nn.Embedding(100, width),
        "wpe": torch.nn.Embedding(16, width),
        "blocks": torch.nn.ModuleList([torch.nn.Linear(width, 4 * width) for _ in range(2)]),
        "head": torch.nn.Linear(width, 100),
    })  # fmt: skip
    return {name: jnp.asarray(w.detach().numpy()) for name, w in parts.named_parameters()}


TORCH = {"wte.weight": "input", "wpe.weight": "input", "head.weight": "output"}


def test_an_embedding_of_torch_is_told_from_a_head_by_name():
    trees = torch_tree(8), torch_tree(32)
    moved = transfer(*trees, width=4, input_axis="last", roles=TORCH)
    wanted = dict.fromkeys(trees[0], "input") | {"head.weight": "output", "head.bias": "fixed"}
    wanted |= {f"blocks.{number}.weight": "hidden" for number in range(2)}
    assert moved.roles == wanted
    assert {name for name, rate in moved.rates.items() if rate == 1 / 4} == {
        "head.weight", "blocks.0.weight", "blocks.1.weight",
    }  # fmt: skip
    resized = transferred_weights(*trees, input_axis="last", roles=TORCH)
    deviations = {name: float(jnp.std(resized[name]) / jnp.std(trees[0][name])) for name in TORCH}
    assert deviations == pytest.approx(
        {"wte.weight": 1, "wpe.weight": 1, "head.weight": 1 / 4}, rel=0.05
    )
    for name in TORCH:
        rest = {other: role for other, role in TORCH.items() if other != name}
        for call in (functools.partial(transfer, width=4), transferred_weights):
            with pytest.raises(ValueError, match=f"roles: {name} may be embedding or head; wanted"):
                call(*trees, input_axis="last", roles=rest)


def test_a_role_is_of_all_weights_whose_path_ends_so_and_the_longest_end_decides():
    def tree(width):
        layer = {"router": {"kernel": jnp.ones((width, 4))}}
        return {"layers": [layer, layer], "my_router": {"kernel": jnp.ones((width, 4))}}

    roles = {"layers/1/router/kernel": "output", "router/kernel": "input"}
    for given in (roles, dict(reversed(roles.items()))):
        moved = transfer(tree(8), tree(32), width=4, roles=given).roles
        first, second = moved["layers"]
        assert first["router"] == {"kernel": "input"}
        assert second["router"] == moved["my_router"] == {"kernel": "output"}


def test_the_role_is_that_of_the_weights_own_name_not_of_its_modules():
    sizes = (8, 32)
    trees = [{name: {"kernel": jnp.ones((n, 3))} for name in ("log_scale", "bias")} for n in sizes]
    moved = transfer(*trees, width=4)
    assert moved.roles == {name: {"kernel": "output"} for name in ("log_scale", "bias")}
    trees = [{"upscale": jnp.ones((n, 3)), "q_bias": jnp.ones((n, 3))} for n in sizes]
    assert transfer(*trees, width=4).roles == {"upscale": "output", "q_bias": "input"}
    # In the state of a module of flax the last name is that of the variable's value.
    states = [nnx.state(nnx.LinearGeneral(6, (n, 3), rngs=nnx.Rngs(0)), nnx.Param) for n in sizes]
    paths = jax.tree_util.tree_leaves_with_path(transfer(*states, width=4).roles)
    assert {path[0].key: role for path, role in paths} == {"bias": "input", "kernel": "output"}


def test_batch_horizon_and_depth():
    tree = {"w": jnp.ones((4, 4))}
    same = transfer(tree, tree, width=1, depth=8, batch=4, tokens=32)
    assert same.rates["w"] == pytest.approx(2 * 32**-0.32)
    assert same.decays["w"] == 1.0  # by width alone
    assert (same.residual, same.epsilon) == (1 / 8, 1 / 8)
    assert transfer(tree, tree, width=1, batch=4, optimizer="sgd").rates["w"] == 4.0


def test_gradients_fall_with_the_depth_in_sub_layers_alone():
    """Why Adam's epsilon has two factors, and why SGD has no rule for the depth."""
    width = 32
    keys = jax.random.split(jax.random.key(0), 66)
    draw = lambda key, *shape: jax.random.normal(key, shape) * width**-0.5  # noqa: E731
    embed, head = draw(keys[0], 16, width), draw(keys[1], width, 8)

    def sizes(depth):
        blocks = [draw(key, width, width) for key in keys[2 : 2 + depth]]
        moved = transfer({"w": jnp.ones(2)}, {"w": jnp.ones(2)}, width=1, depth=depth / 4)

        def loss(params):
            h = params["embed"]
            for matrix in params["blocks"]:
                h = h + moved.residual * jax.nn.relu(h @ matrix) / 2
            return loss_of({"logits": h @ params["head"]}, jnp.arange(16) % 8)

        found = jax.grad(loss)({"embed": embed, "blocks": blocks, "head": head})
        found["blocks"] = found["blocks"][0]
        return {name: float(jnp.std(x)) for name, x in found.items()}, moved.epsilon

    (few, _), (many, epsilon) = sizes(4), sizes(64)
    falls = {name: many[name] / few[name] for name in few}
    assert falls == pytest.approx({"embed": 1, "blocks": epsilon, "head": 1}, rel=0.3)


def test_decay_keeps_its_product_with_the_rate():
    small, large = ({"w": jnp.ones((n, n)), "b": jnp.ones(n)} for n in (4, 16))
    moved = transfer(small, large, width=4)
    decay = optax.chain(moved.add_decayed_weights(0.1), moved.scale_rates())
    zeros = jax.tree.map(jnp.zeros_like, large)
    updates, _ = decay.update(zeros, decay.init(large), large)
    jax.tree.map(lambda u: np.testing.assert_allclose(u, 0.1, rtol=1e-6), updates)
    with pytest.raises(ValueError, match="params: got None"):
        decay.update(zeros, decay.init(large))


@pytest.mark.parametrize("optimizer", RATES)
def test_activations_move_as_far_at_every_width(optimizer):
    moved = coordinate_check(lambda width: network(width, optimizer), WIDTHS).slopes
    usual = coordinate_check(lambda width: network(width, optimizer, is_moved=False), WIDTHS).slopes
    read = ("narrow", "logits")  # whose part from the start fades with the width
    assert max(abs(moved[name]) for name in moved if name not in read) < FLAT, moved
    assert all(-0.4 < moved[name] < FLAT for name in read), moved
    # Muon's updates have the right size at any width by themselves, but not Adam's of the others.
    control = read if optimizer == "muon" else ("hidden 0", *read)
    assert min(usual[name] for name in control) > STEEP, usual


def test_a_looped_model_moves_as_far_at_every_width():
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 64)

    def model(width, logits=1.0):
        sizes = {"width": width, "heads": width // 8, "vocabulary": 64, "embedding_std": 0.1}
        config = LoopedConfig.tiny("full full", loops=2, head_scale=logits, **sizes)
        return nnx.split(LoopedLM(config, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def build(width, is_moved):
        small = nnx.to_pure_dict(model(16)[1])
        params = nnx.to_pure_dict(model(width)[1])
        moved = transfer(small, params, width=width / 16)
        graph, state, rest = model(width, moved.logits if is_moved else 1.0)
        optimizer = optax.adam(1e-3)
        if is_moved:
            params = transferred_weights(small, params)
            optimizer = optax.chain(optimizer, moved.scale_rates())

        def seen(params):
            nnx.replace_by_pure_dict(state, params)
            lm = nnx.merge(graph, state, rest)
            stream = lm.last_hidden(tokens)
            return {"stream": stream, "logits": lm.head(stream)}

        loss = lambda p: -jax.nn.log_softmax(seen(p)["logits"])[..., 0].mean()  # noqa: E731
        return ModelOfWidth(params, optimizer, loss, seen)

    moved = coordinate_check(lambda width: build(width, True), (32, 64, 128)).slopes
    usual = coordinate_check(lambda width: build(width, False), (32, 64, 128)).slopes
    assert abs(moved["stream"]) < FLAT < STEEP < usual["stream"], (moved, usual)
    assert moved["logits"] < FLAT < STEEP < usual["logits"], (moved, usual)


def test_the_picture_names_every_slope():
    check = coordinate_check(network, (32, 64), steps=1)
    texts = [text.get_text() for text in check.draw().axes[0].get_legend().get_texts()]
    assert [text.split(":")[0] for text in texts] == [*check.changes]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: transfer({"w": jnp.ones(2)}, {"w": jnp.ones(4)}, width=3), "nothing grows by 3"),
        (lambda: transfer([jnp.ones(2)], [jnp.ones(2)] * 2, width=1), "its tree differs"),
        (lambda: transfer(jnp.ones((2, 2)), jnp.ones(4), width=2), "has 2 axes, in large it has 1"),
        (lambda: transfer(jnp.ones((2, 2, 2)), jnp.ones((4, 4, 4)), width=2), "3 axes of"),
        (lambda: transfer(jnp.ones(2), jnp.ones(4), width=2, tokens=0), "tokens: got 0"),
        (
            lambda: transfer(jnp.ones(2), jnp.ones(4), width=2, depth=2, optimizer="sgd"),
            "depth: got 2 with 'sgd', wanted 1, or 'adam' or 'muon'",
        ),
        (
            lambda: transfer(*[{"w": jnp.ones(2)}] * 2, width=1, roles={"v": "input"}),
            r"roles: 'v' is 'input', wanted input or output of \['w'\]",
        ),
        (
            lambda: transfer(*[{"w": jnp.ones(2)}] * 2, width=1, roles={"w": "hidden"}),
            "roles: 'w' is 'hidden', wanted input or output of ",
        ),
        (lambda: coordinate_check(network, [64]), "widths: got"),
        (lambda: coordinate_check(network, [32, 64], steps=0), "steps must be at least 1; got 0"),
        (lambda: coordinate_check(network, [32, 64], steps=10**12), "steps must be below"),
    ],
)
def test_bad_input_is_refused_in_a_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
