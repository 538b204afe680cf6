"""One artefact for every length: mixers are exported with a symbolic number of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from tiers import by_night

from toolkit.attention import MIXERS, draw_inputs, softmax_attention

TOLERANCE = 2e-4  # relative to the largest number
# Fewer tokens than one chunk, block or tile has, and more than several of them have.
LENGTHS = (1, 5, 203)
# So few that selecting makes a difference.
FEW = {
    "nsa": {"block_size": 8, "selected_blocks": 3, "sliding_window": 8},
    "moba": {"block_size": 8, "selected_blocks": 2},
    "dsa": {"selected_tokens": 8},
    "hca": {"block_size": 8, "sliding_window": 8},
    "csa": {"block_size": 8, "selected_entries": 3, "sliding_window": 8},
    "qsa": {"block_size": 4, "selected_tokens": 8},
}


def exported(function, inputs, names):
    """The program for the lengths that `names` leave open, of inputs that hold time on axis 1."""
    time, *_ = export.symbolic_shape(names, constraints=["time >= 1"])
    shapes = [jax.ShapeDtypeStruct((x.shape[0], time, *x.shape[2:]), x.dtype) for x in inputs]
    return export.export(jax.jit(function))(*shapes)


def assert_equal_at_every_length(function, draw):
    program = exported(function, draw(3), "time")
    for time in LENGTHS:
        inputs = draw(time)
        found, wanted = program.call(*inputs), jax.jit(function)(*inputs)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * max(1, abs(b).max()))


def of_mixer(name):
    row = MIXERS[name]
    options = row.options | FEW.get(name, {})
    return (lambda *x: row.function(*x, **options)[0]), lambda time: draw_inputs(row, time, batch=1)


@pytest.mark.by_family
@pytest.mark.parametrize("name", MIXERS)
def test_values_of_any_length(name):
    assert_equal_at_every_length(*of_mixer(name))


@pytest.mark.nightly
@pytest.mark.parametrize("name", MIXERS)
def test_gradients_of_any_length(name):
    function, draw = of_mixer(name)
    floats = [i for i, x in enumerate(draw(2)) if jnp.issubdtype(x.dtype, jnp.floating)]
    loss = lambda *inputs: (function(*inputs) ** 2).sum()  # noqa: E731
    assert_equal_at_every_length(jax.grad(loss, argnums=tuple(floats)), draw)


# By day one mixer of each way of knowing its documents.
BY_DAY = {"full", "gdn", "kda", "mamba2", "mesa", "log_gdn", "path", "nsa", "dsa"}


@pytest.mark.slow
@pytest.mark.parametrize("name", by_night(set(MIXERS) - BY_DAY, MIXERS))
def test_documents_of_any_length(name):
    row, (_, draw) = MIXERS[name], of_mixer(name)
    options = row.options | FEW.get(name, {})

    def packed(segment_ids, *inputs):
        return row.function(*inputs, segment_ids=segment_ids, **options)[0]

    def with_documents(time):
        return jnp.arange(time, dtype=jnp.int32)[None] // 7, *draw(time)

    assert_equal_at_every_length(packed, with_documents)


@pytest.mark.parametrize(
    ("name", "form"),
    [("full", "cudnn"), ("full", "splash"), ("gdn", "pallas"), ("nsa", "gathered")],
)
def test_forms_that_need_a_known_length_say_so(name, form):
    row, (_, draw) = MIXERS[name], of_mixer(name)
    run = lambda *x: row.function(*x, implementation=form, **FEW.get(name, {}))  # noqa: E731
    half = [x.astype(jnp.bfloat16) if name == "full" else x for x in draw(3)]
    with pytest.raises(ValueError, match=f'^implementation="{form}" .* known number'):
        exported(run, half, "time")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "gdn", "kda", "fox", "path"])
def test_every_form_of_mixers(name):
    row, (_, draw) = MIXERS[name], of_mixer(name)
    for form in sorted({"scan", "dense", "chunked"} & set(row.implementations)):
        options = row.options | {"implementation": form}
        assert_equal_at_every_length(lambda *x, o=options: row.function(*x, **o)[0], draw)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dense", "blockwise"])
def test_every_form_of_softmax_attention(form):
    def attend(q, k, v):
        out, _, residual = softmax_attention(
            q, k, v, implementation=form, logits_soft_cap=2.0, return_residual=True
        )
        return out, residual

    assert_equal_at_every_length(attend, of_mixer("full")[1])
