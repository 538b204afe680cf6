"""Latent attention on simulated devices: the same numbers, the bytes and collectives it says."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from latent_layers import distance, drawn, small, stream

from toolkit import checking
from toolkit.attention.latent import (
    LatentCache,
    LatentWeights,
    calibration_latents,
    fold,
    mla,
    mla_step,
    principal_basis,
    slice_latents,
    tpla_reference,
)
from toolkit.measure import collectives
from toolkit.parallel import make_mesh
from toolkit.parallel.axes import sum_of_parts
from toolkit.parallel.latent import decode_step, hand_over, place_slices, prefill

B, T, PROMPT = 2, 12, 8


@pytest.fixture(autouse=True)
def double():
    with enable_x64(True):
        yield


def layer(slices, **how):
    config = small()
    weights, x = drawn(config), stream(config, B, T)
    folded = fold(weights, principal_basis(calibration_latents(x, weights, config)))
    return config, folded, slice_latents(folded, slices, **how), x


def mesh_of(rows, columns):
    return make_mesh({"latent": rows, "heads": columns}, devices=jax.devices()[: rows * columns])


def decoded(config, folded, sliced, x, mesh, scheme, steps=2, capacity=T + 4, **how):
    """Outputs of the tokens after the prompt, and the last cache."""
    placed = place_slices(sliced, mesh, scheme=scheme, layout=how.get("layout", "plain"))
    _, cache = prefill(x[:, :PROMPT], folded, config, mesh=mesh, capacity=capacity)
    cache = hand_over(cache, placed, mesh, scheme=scheme)
    step, ys = partial(decode_step, config=config, mesh=mesh, scheme=scheme, **how), []
    for t in range(PROMPT, PROMPT + steps):
        y, cache = step(x[:, t], placed, cache)
        ys.append(y)
    return jnp.stack(ys, axis=1), cache


@pytest.mark.parametrize(
    ("mesh", "scheme", "how"),
    [
        ((1, 8), "mla", {}),
        pytest.param((2, 4), "tpla", {"norm": "sliced"}, marks=pytest.mark.nightly),
        ((4, 2), "tpla", {"norm": "exact", "layout": "lean"}),
        ((2, 2), "tpla", {"norm": "exact", "softmax": "summed"}),
        pytest.param((8, 1), "tpla", {"norm": "exact"}, marks=pytest.mark.nightly),
        ((1, 4), "dcp", {}),
        ((2, 4), "tpla+dcp", {"norm": "exact"}),
    ],
)
def test_devices_together_compute_the_equation(mesh, scheme, how):
    shares = np.linspace(2, 1, mesh[0]) / np.linspace(2, 1, mesh[0]).sum()
    config, folded, sliced, x = layer(mesh[0], shares=shares)
    ys, cache = decoded(config, folded, sliced, x, mesh_of(*mesh), scheme, **how)
    softmax = how.get("softmax", "sliced")
    norm = how.get("norm", "exact")
    wanted = tpla_reference(x, sliced, config, norm=norm, softmax=softmax, prompt=PROMPT)
    assert distance(ys, wanted[:, PROMPT : PROMPT + 2]) < 1e-12
    if mesh[0] == 1 or softmax == "summed":
        assert distance(ys, mla(x, folded, config)[0][:, PROMPT : PROMPT + 2]) < 1e-12
    # Bytes per device are what the formula says.
    tokens = (T + 4) // (mesh[1] if scheme.endswith("dcp") else 1)
    size = config.latent_size // mesh[0] + config.rope_size
    held = sum(
        array.addressable_shards[0].data.nbytes for array in (cache.latents, cache.rope_keys)
    )
    assert held == B * tokens * size * 8


def test_shared_features_are_scored_everywhere_and_owned_once():
    config, folded, sliced, x = layer(4, shared=4)
    ys, cache = decoded(config, folded, sliced, x, mesh_of(4, 2), "tpla", steps=1)
    wanted = tpla_reference(x, sliced, config, norm="exact", prompt=PROMPT)
    assert distance(ys, wanted[:, PROMPT : PROMPT + 1]) < 1e-12
    assert cache.latents.addressable_shards[0].data.shape[2] == 4 + 12 // 4


def test_grouped_and_branched_models_are_their_own_graphs():
    config, folded, sliced, x = layer(2)
    own = jnp.asarray(np.kron(np.eye(2), np.ones((8, 4))))[..., None]
    grouped = replace(folded, key_up=folded.key_up * own, value_up=folded.value_up * own)
    sliced = slice_latents(grouped, 2)
    ys, _ = decoded(config, grouped, sliced, x, mesh_of(2, 2), "gla", steps=1)
    assert distance(ys, mla(x, grouped, config)[0][:, PROMPT : PROMPT + 1]) < 1e-12

    branches = slice_latents(folded, 4)
    growth = (config.width / 4) ** 0.5
    grown = replace(
        branches, key_up=branches.key_up * growth, value_up=branches.value_up * growth / 2
    )
    wanted = tpla_reference(x, grown, config, prompt=PROMPT)[:, PROMPT : PROMPT + 1]
    ys, _ = decoded(config, folded, branches, x, mesh_of(4, 2), "mlra", steps=1, norm="sliced")
    assert distance(ys, wanted) < 1e-12


def found(function, *arguments):
    """(kind, bytes) of the collectives of a compiled program."""
    compiled = jax.jit(function).lower(*arguments).compile()
    return sorted((c.kind, c.bytes) for c in collectives(compiled))


@pytest.mark.parametrize(
    ("mesh", "scheme", "how"),
    [
        ((1, 4), "mla", {}),
        ((2, 2), "tpla", {"norm": "sliced"}),
        ((2, 2), "tpla", {"norm": "exact"}),
        ((2, 2), "tpla", {"norm": "sliced", "layout": "lean"}),
        ((1, 4), "dcp", {}),
        ((2, 2), "tpla", {"norm": "sliced", "softmax": "summed"}),
    ],
)
def test_collectives_are_those_of_the_table(mesh, scheme, how):
    config, _, sliced, x = layer(mesh[0])
    devices, heads, rows = mesh_of(*mesh), config.heads, mesh[0]
    k, item = devices.size, 8
    placed = place_slices(sliced, devices, scheme=scheme, layout=how.get("layout", "plain"))
    empty = LatentCache.empty(B, 16, config.rope_size, 8, x.dtype)
    cache = hand_over(empty, placed, devices, scheme=scheme)
    step = partial(decode_step, config=config, mesh=devices, scheme=scheme, **how)
    query, value = config.key_size + config.rope_size, config.value_size
    wanted = [("all-reduce", B * config.width * item)]
    if how.get("norm") == "exact":
        wanted.append(("all-reduce", B * item))
    if how.get("layout") == "lean":
        wanted.append(("all-gather", B * heads * rows // k * query * item))
        wanted.append(("reduce-scatter", B * heads // k * value * item))
    if scheme == "dcp":
        wanted.append(("all-gather", B * heads * query * item))
        wanted.append(("all-reduce", B * heads * item))
        wanted.append(("reduce-scatter", B * heads // k * (value + 1) * item))
    if how.get("softmax") == "summed":
        wanted.append(("all-reduce", B * heads * rows // k * 8 * item))
    assert found(step, x[:, 0], placed, cache) == sorted(wanted)


def test_left_to_the_compiler_the_scores_are_summed():
    config, folded, _, x = layer(2)
    mesh, slots = mesh_of(2, 1), 8
    cut = {"latent_down": P(None, "latent"), "latent_norm": P("latent")}
    cut |= {"key_up": P("latent"), "value_up": P("latent")}

    def put(array, spec):
        return jax.device_put(array, NamedSharding(mesh, spec))

    weights = LatentWeights(
        **{
            name: None if array is None else put(array, cut.get(name, P()))
            for name, array in vars(folded).items()
        }
    )
    empty = LatentCache.empty(B, 16, config.rope_size, slots, x.dtype)
    _, prompt = mla(x[:, :6], folded, config, initial_state=empty)
    cache = LatentCache(
        put(prompt.latents, P(None, None, "latent")),
        put(prompt.rope_keys, P()),
        put(prompt.length, P()),
    )
    step = partial(mla_step, config=config)
    sums = [size for kind, size in found(step, x[:, 6], weights, cache) if kind == "all-reduce"]
    assert B * config.heads * slots * 8 in sums
    assert B * config.heads * config.value_size * 8 in sums
    wanted = mla(x[:, :7], folded, config)[0][:, 6]
    assert distance(step(x[:, 6], weights, cache)[0], wanted) < 1e-12


def test_caches_change_hands_by_a_slice_or_one_all_to_all():
    config, folded, sliced, x = layer(4)
    mesh = mesh_of(4, 2)
    _, cache = prefill(x[:, :PROMPT], folded, config, mesh=mesh)
    double = jax.tree.map(lambda a: jnp.concatenate([a, a]), cache)
    wanted = hand_over(double, sliced, mesh)
    assert distance(wanted.latents, double.latents) == 0
    from toolkit.parallel.latent import handover

    kinds = {"replicated": [], "batch": ["all-gather", "all-to-all"]}
    kinds["sequence"] = kinds["batch"]
    for source, names in kinds.items():
        got = hand_over(double, sliced, mesh, source=source)
        assert distance(got.latents, wanted.latents) == 0
        assert distance(got.rope_keys, wanted.rope_keys) == 0
        assert got.latents.sharding.spec == P(None, None, "latent")
        plan = handover.plan_of(mesh, sliced, "tpla", "plain")
        program = partial(handover._hand_over, mesh=mesh, plan=plan, source=source)
        lists = found(program, double, sliced.features)
        assert [kind for kind, _ in lists] == names


def test_prompts_are_read_by_some_devices_and_continued_by_others():
    config, folded, sliced, x = layer(2)
    readers = make_mesh({"latent": 1, "heads": 4}, devices=jax.devices()[:4])
    writers = make_mesh({"latent": 2, "heads": 2}, devices=jax.devices()[4:])
    y, cache = prefill(x[:, :PROMPT], folded, config, mesh=readers, capacity=T)
    assert distance(y, mla(x[:, :PROMPT], folded, config)[0]) < 1e-12
    placed = place_slices(sliced, writers)
    cache = hand_over(cache, placed, writers)
    assert {d.id for d in cache.latents.devices()} == {d.id for d in jax.devices()[4:]}
    wanted = tpla_reference(x, sliced, config, norm="exact", prompt=PROMPT)
    for t in range(PROMPT, T):
        y, cache = decode_step(x[:, t], placed, cache, config, mesh=writers)
        assert distance(y, wanted[:, t]) < 1e-12
    with checking(), pytest.raises(ValueError, match="cannot take"):
        decode_step(x[:, 0], placed, cache, config, mesh=writers)


def test_a_result_that_differs_is_no_replicated_one():
    def wrong(x):
        return jax.lax.axis_index("latent") * x

    with pytest.raises(ValueError, match="out_specs"):
        jax.shard_map(wrong, mesh=mesh_of(2, 4), in_specs=P(), out_specs=P())(jnp.ones(3))


def on_devices(function):
    return jax.shard_map(function, mesh=mesh_of(2, 4), in_specs=P(), out_specs=P())


def test_a_sum_of_what_all_devices_have_alike_is_refused():
    axes = ("latent", "heads")

    def part(x):
        return (jax.lax.axis_index("latent") + jax.lax.axis_index("heads")) * x

    def twice(x):
        return sum_of_parts(sum_of_parts(part(x), axes), ("heads",))

    one = jnp.ones(3)
    assert (on_devices(lambda x: sum_of_parts(part(x), axes))(one) == 16).all()
    for wrong, message in ((partial(sum_of_parts, axes=axes), "along 'latent', 'heads'"),
                           (twice, "along 'heads'")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            on_devices(wrong)(one)


def alike_summands(jaxpr):
    """Sums over devices, in a traced program, of terms that all devices have alike.

    JAX writes where a value that is the same on all devices begins to vary ("pvary"). What reaches
    a sum from there by additions alone is counted once per device: a residual, a bias.
    """
    made = {id(out): equation for equation in jaxpr.eqns for out in equation.outvars}
    found = []

    def terms(variable, axes):
        equation = made.get(id(variable))
        if equation is None:
            return
        if equation.primitive.name in ("pvary", "pcast") and {*equation.params["axes"]} & axes:
            found.append(variable)
        elif equation.primitive.name in ("add", "sub", "neg", "convert_element_type", "reshape",
                                         "add_any", "transpose", "broadcast_in_dim"):  # fmt: skip
            for operand in equation.invars:
                terms(operand, axes)

    for equation in jaxpr.eqns:
        if equation.primitive.name in ("psum", "psum_invariant"):
            for operand in equation.invars:
                terms(operand, {*equation.params["axes"]})
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr"),
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += alike_summands(inner)
    return found


@pytest.mark.parametrize(
    ("mesh", "scheme", "how"),
    [
        ((1, 4), "mla", {}),
        ((2, 2), "tpla", {"layout": "lean"}),
        ((2, 2), "tpla", {"softmax": "summed"}),
        ((2, 2), "gla", {"norm": "sliced"}),
        ((2, 2), "tpla+dcp", {}),
    ],
)
def test_no_sum_has_a_term_that_all_devices_have_alike(mesh, scheme, how):
    config, folded, sliced, x = layer(mesh[0])
    devices = mesh_of(*mesh)
    placed = place_slices(sliced, devices, scheme=scheme, layout=how.get("layout", "plain"))
    empty = LatentCache.empty(B, 16, config.rope_size, 8, x.dtype)
    cache = hand_over(empty, placed, devices, scheme=scheme)
    step = partial(decode_step, config=config, mesh=devices, scheme=scheme, **how)
    read = partial(prefill, config=config, mesh=devices)
    assert not alike_summands(jax.make_jaxpr(step)(x[:, 0], placed, cache).jaxpr)
    assert not alike_summands(jax.make_jaxpr(read)(x, folded).jaxpr)


def test_a_residual_in_a_sum_is_found():
    def wrong(x):
        return sum_of_parts(jax.lax.axis_index("latent") * x + 2 * x, ("latent",))

    assert (on_devices(wrong)(jnp.ones(3)) == 5).all()
    assert len(alike_summands(jax.make_jaxpr(on_devices(wrong))(jnp.ones(3)).jaxpr)) == 1


@pytest.mark.parametrize(
    ("rows", "columns", "scheme", "how", "message"),
    [
        (4, 2, "mla", {}, "wants one device along 'latent'; got 4"),
        (2, 4, "tpla", {}, "sliced must have 2 slices"),
        (4, 2, "dcp", {}, "wants one device along 'latent'; got 4"),
        (4, 2, "gla", {"layout": "lean"}, "layout 'lean' is for"),
        (4, 2, "tpla", {"capacity": 9, "scheme": "tpla+dcp"}, "capacity|slots"),
    ],
)
def test_what_does_not_fit_is_refused(rows, columns, scheme, how, message):
    config, _, sliced, x = layer(4)
    scheme, capacity = how.pop("scheme", scheme), how.pop("capacity", 8)
    cache = LatentCache.empty(B, 16, config.rope_size, capacity, x.dtype)
    with pytest.raises(ValueError, match=message):
        decode_step(
            x[:, 0], sliced, cache, config, mesh=mesh_of(rows, columns), scheme=scheme, **how
        )
