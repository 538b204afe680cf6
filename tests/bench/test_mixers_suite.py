"""What the mixers' suite counts, draws and compares, without timing anything at length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from toolkit.attention import MIXERS
from toolkit.bench import agree, run_case
from toolkit.bench.mixers import gpu as mixers_gpu
from toolkit.bench.mixers import linear_time
from toolkit.bench.mixers import steps as mixer_steps
from toolkit.bench.mixers import suite as mixers
from toolkit.bench.mixers.figure import draw_mixers, mixer_figure_data
from toolkit.bench.mixers.fla_forms import _FORMS as FLA_FORMS
from toolkit.bench.mixers.gpu import SHAPES, Work, modelled_work
from toolkit.bench.mixers.inputs import mixer_form, mixer_inputs, output_weight
from toolkit.bench.mixers.linear_time import MOST_GROWTH, peak_memory
from toolkit.bench.mixers.matrix_products import matrix_flops
from toolkit.bench.mixers.steps import OURS as STEP
from toolkit.bench.mixers.steps import step_case
from toolkit.bench.mixers.suite import recurrent_rows, sequence_case
from toolkit.bench.mixers.transformers_forms import _FORMS as TRANSFORMERS_FORMS
from toolkit.bench.mixers.transformers_forms import transformers_form
from toolkit.bench.peers import torch_contender
from toolkit.measure import program_cost, published_peak, record

# Together they compute for longer than the first tier has time.
pytestmark = pytest.mark.nightly

ROWS = [row.name for row in recurrent_rows()]
# Of our matrix products: the formulas also count the inverse of a 16 x 16 block, made of sums.
PRODUCTS_TOLERANCE = 0.04
PEER_TOLERANCE = 1e-3
SOFTMAX = {"full", "window", "fox", "path", "nsa", "moba", "dsa", "hca", "csa", "qsa"}


def test_the_recurrent_rows_are_all_but_softmax():
    assert set(ROWS) == set(MIXERS) - SOFTMAX
    assert set(FLA_FORMS) <= set(ROWS)  # a mixer may be nobody else's


def flops_of_sums(jaxpr):
    """FLOPs of products with zeros and ones, which sum log-decays: they alone have no batch."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            _, (batch, _) = equation.params["dimension_numbers"]
            total += (
                0 if batch else 2 * equation.outvars[0].aval.size * equation.invars[1].aval.shape[0]
            )
        total += sum(map(flops_of_sums, jaxprs_in_params(equation.params)))
    return total


@pytest.mark.parametrize("name", ROWS)
def test_forward_formulas_count_the_products_of_many_chunks(name):
    row = MIXERS[name]
    for time, heads, size in ((1024, 2, 64), (512, 2, 128)):
        arrays = mixer_inputs(row, time, heads, size)
        form = mixer_form(row, "xla", backward=False)
        counted = matrix_flops(form, *arrays) - flops_of_sums(jax.make_jaxpr(form)(*arrays).jaxpr)
        wanted = row.forward_flops(1, time, heads, size, size, **row.options)
        assert counted == pytest.approx(wanted, rel=PRODUCTS_TOLERANCE), (time, size)


def test_products_are_counted_as_often_as_they_run():
    left, right = jnp.ones((3, 4, 5)), jnp.ones((3, 5, 6))
    one = 2 * 3 * 4 * 6 * 5
    assert matrix_flops(jnp.matmul, left, right) == one

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(jnp.matmul(x, right)))(x)

    assert matrix_flops(gradient, left) == one  # forward's is not wanted

    def repeated(x):
        return jax.lax.scan(lambda c, _: (jax.jit(jnp.matmul)(x, right), None), x @ right, length=7)

    assert matrix_flops(repeated, left) == 8 * one

    def until(x):
        return jax.lax.while_loop(lambda y: jnp.sum(y) < 9, lambda y: x @ right, x @ right)

    with pytest.raises(ValueError, match="while loop"):
        matrix_flops(until, left)


@pytest.mark.parametrize("name", ROWS)
def test_memory_is_linear_in_time(name):
    """Of the gradient, by compilation alone: nothing runs."""
    times = (4096, 8192, 65536)
    memory = [peak_memory(MIXERS[name], time) for time in times]
    for number in (1, 2):
        doublings = times[number] / times[number - 1] / 2
        assert memory[number] <= MOST_GROWTH * doublings * memory[number - 1], memory


@pytest.mark.parametrize("name", ROWS)
def test_a_step_writes_over_its_donated_state(name):
    row = MIXERS[name]
    token = [x[:, 0] for x in mixer_inputs(row, 1, 4, 64)]
    state = row.empty_state(1, 4, 64, 64, 1, jnp.float32)
    step = jax.jit(lambda state, *token: row.step(*token, state), donate_argnums=0)
    cost = program_cost(step.lower(state, *token).compile())
    nbytes = sum(x.nbytes for x in jax.tree.leaves(state))
    assert cost.alias_bytes == nbytes
    # Several delta steps a token pass through one state between them; no other row keeps a copy.
    assert cost.temp_bytes < nbytes * (0.5 + ("steps" in row.input("v").axes))


@pytest.mark.parametrize("name", ROWS)
def test_a_step_is_checked_against_the_reference(name):
    case = step_case(MIXERS[name], 1, "step")
    results = {contender: call() for contender, call in case.contenders.items()}
    case.check(results)
    with pytest.raises(ValueError, match="disagree"):
        case.check({**results, STEP: results[STEP] + 1})


def test_inputs_have_an_axis_for_delta_steps():
    row = MIXERS["delta_product"]
    q, k, v, g, beta = mixer_inputs(row, 5, 3, 8, batch=2, dtype=jnp.bfloat16)
    assert q.shape == (2, 5, 3, 8)
    assert k.shape == v.shape == (2, 5, 3, 2, 8)
    assert beta.shape == (2, 5, 3, 2)
    assert g.shape == (2, 5, 3)
    assert (v.dtype, beta.dtype) == (jnp.bfloat16, jnp.float32)
    assert jnp.array_equal(beta, beta.astype(jnp.bfloat16).astype(jnp.float32))
    assert output_weight(row, [q, k, v, g, beta]).shape == q.shape


@pytest.mark.oracle
@pytest.mark.parametrize("name", sorted(TRANSFORMERS_FORMS.keys() & set(ROWS)))
def test_transformers_forms_give_our_values_and_gradients(name):
    pytest.importorskip("torch")
    form = transformers_form(name)
    if form is None:
        pytest.skip("this transformers has no such form")
    row = MIXERS[name]
    arrays = mixer_inputs(row, 70, 2, 16)
    weight = output_weight(row, arrays)
    for backward in (False, True):
        args = (weight, *arrays) if backward else arrays
        peer = torch_contender(
            form,
            [np.asarray(x) for x in arrays],
            np.asarray(weight) if backward else None,
            threads=1,
        )
        ours = jax.jit(mixer_form(row, "xla", backward=backward))(*args)
        check, theirs = agree(PEER_TOLERANCE), peer()
        check({"toolkit": ours, "transformers": theirs})
        off = jax.tree.map(lambda x: (1 + 2 * PEER_TOLERANCE) * x, ours)
        with pytest.raises(ValueError, match="disagree"):  # it can tell
            check({"toolkit": off, "transformers": theirs})


def test_a_sequence_case_agrees_with_heads_on_devices():
    """Retention numbers its heads, so each device has to know which ones it holds."""
    for name in ("retention", "gdn"):
        case = sequence_case(MIXERS[name], 64, 64, 4, "sequence", backward=False)
        results = {contender: call() for contender, call in case.contenders.items()}
        case.check(results)
        whole = mixer_form(MIXERS[name], "xla", backward=False)
        arrays = mixer_inputs(MIXERS[name], 64, 8, 64)
        agree(PEER_TOLERANCE)({**results, "one device": whole(*arrays)})


@pytest.mark.nightly
def test_the_whole_suite_at_small_sizes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(mixers, "recurrent_rows", lambda: [MIXERS["linear"]])
    monkeypatch.setattr(mixers, "TIME", 64)
    monkeypatch.setattr(linear_time, "TIMES", (64, 128))
    monkeypatch.setattr(mixer_steps, "BATCHES", (1,))
    records = []
    for plan in mixers.cases(2):
        case = plan.build(plan.name)
        assert case.name == plan.name
        records += run_case(case, rounds=1, cores=2)
    printed = capsys.readouterr().out
    for line in ("float32 matmul rate", "wanted >= 10", "wanted >= 50%", "peak memory", "T=128"):
        assert line in printed
    drawn = draw_mixers(records, tmp_path / "mixers.png", is_recorded=False)
    assert drawn.stat().st_size > 10_000


def test_gpu_cases_run_ours_alone_without_the_peer(capsys):
    plan, _ = mixers_gpu.cases([MIXERS["linear"]], [(1, 40, 2, 16)])
    assert plan.name == "linear forward B=1 T=40 H=2 D=16 bfloat16"
    (only,) = run_case(plan.build(plan.name), rounds=1, cores=2)
    assert only.name.endswith("| toolkit")


def test_the_floor_is_the_slower_of_arithmetic_and_memory():
    h200 = published_peak("NVIDIA H200")
    assert h200 is not None
    assert (h200.flops_per_second, h200.bytes_per_second) == (9.89e14, 4.8e12)
    assert Work(9.89e14, 4.8e11).floor_seconds(h200) == pytest.approx(1.0)
    assert Work(9.89e13, 4.8e12).floor_seconds(h200) == pytest.approx(1.0)


@pytest.mark.parametrize("shape", SHAPES)
def test_work_on_a_gpu_counts_every_array_once(shape):
    batch, time, heads, size = shape
    forward, both = (
        modelled_work(MIXERS["gdn"], shape, backward=backward) for backward in (False, True)
    )
    array, gates = batch * time * heads * size * 2, 2 * batch * time * heads * 4
    assert forward.bytes == 4 * array + gates
    # Backward: inputs and the output's gradient are read, the inputs' gradients written.
    assert both.bytes == forward.bytes + (4 * array + gates) + (3 * array + gates)
    assert both.flops == 3 * forward.flops


def test_bfloat16_is_judged_on_the_whole():
    wanted = np.ones(1000, np.float32)
    outlier = wanted.copy()
    outlier[0] = 1.05
    agree(0.01, norm="rms")({"a": wanted, "b": jnp.asarray(outlier, jnp.bfloat16)})
    with pytest.raises(ValueError, match="disagree"):
        agree(0.01)({"a": wanted, "b": outlier})
    with pytest.raises(ValueError, match="'a' gave a number that is not finite"):
        agree(0.01)({"a": np.array([np.nan])})


def records_of(size, ours, scan, fraction):
    case = f"gdn forward+backward B=1 T=2048 H=8 D={size} float32 | 2 cores | "
    return [
        record(case + "toolkit, chunked", ours, "s"),
        record(case + "toolkit, token scan", scan, "s"),
        record(case + "fraction of float32 matmul rate", fraction, "1"),
    ]


def test_the_figure_shows_the_least_favourable_shape(tmp_path):
    step = record("gdn step B=64 H=16 D=128 float32 | 2 cores | toolkit, step", 1.0, "s")
    records = [*records_of(64, 1.0, 12.0, 0.1), *records_of(128, 1.0, 8.0, 0.6), step]
    data = mixer_figure_data(records)
    assert data.mixers == ("gdn",)
    assert data.ratios == {"toolkit, token scan": {"gdn": 8.0}}
    assert data.fractions == {"forward+backward": {"gdn": 0.6}}
    path = draw_mixers(records, tmp_path / "mixers.png", is_recorded=True)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no sequence of a mixer"):
        mixer_figure_data([step])
