"""Conversion: what a student starts from, each stage's loss, the choice of layers, resuming."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.conversion import (
    STARTABLE,
    ConversionPlan,
    alignment_losses,
    convert,
    loop_weights,
    restoration_benefits,
    student_from,
    top_k_divergence,
)
from toolkit.conversion.distillation import divergence_by_loop
from toolkit.conversion.selection import kl_guided, uniform
from toolkit.conversion.stage import Course, align
from toolkit.conversion.student import restore
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.looped.mixing.layer import MixingLayer
from toolkit.training import CheckpointError

# Together they compute for longer than the first tier has time.
pytestmark = pytest.mark.slow

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
ZERO = {"rtol": 0, "atol": 1e-6}
VOCABULARY = 12
PLAN = ConversionPlan(
    align_steps=20,
    align_rate=1e-2,
    align_time=8,
    distil_steps=20,
    distil_rate=3e-3,
    distil_time=8,
    top_k=4,
    choice_batches=1,
)


def build(pattern="full full", loops=2, **overrides):
    """A model that is not at its start: what begins at zero does not hide what it does."""
    sizes = {"vocabulary": VOCABULARY, "width": 16, "heads": 2, "feed_forward": 16}
    model = LoopedLM(LoopedConfig.tiny(pattern, loops, **(sizes | overrides)), rngs=nnx.Rngs(0))
    model.embedding.embedding[...] *= 4
    if model.rho is not None:
        model.rho[...] = 0.3 * jax.random.normal(jax.random.key(3), model.rho.shape)
    return model


@pytest.fixture(scope="module")
def teacher():
    return build()


def draw(data, step, *, time, batch=4):
    tokens = jax.random.randint(
        jax.random.fold_in(jax.random.key(data), step), (batch, time + 1), 0, VOCABULARY
    )
    return tokens[:, :-1], tokens[:, 1:]


def some_tokens(time=8):
    return draw(5, 0, time=time)


distance = jax.jit(divergence_by_loop, static_argnames="top_k")


@jax.jit
def forward(model, tokens):
    return model(tokens)


def leaves(model):
    return dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))


def run(teacher, **changes):
    options = {"word": "linear", "restored": 1, "plan": PLAN, "is_progress_shown": False}
    return convert(teacher, jnp.int32(0), draw, **(options | changes))


@pytest.mark.parametrize("word", STARTABLE)
def test_a_student_keeps_everything_but_the_mixers(word):
    teacher = build("full full", options={"full": {"key_value_heads": 1}})
    student = student_from(teacher, f"{word} full", rngs=nnx.Rngs(1))
    ours, theirs = leaves(student), leaves(teacher)
    same = {path for path in theirs if path[:3] != ("blocks", 0, "mixer")}
    assert all(ours[path][...] is theirs[path][...] for path in same)
    assert same <= set(ours)
    fresh = leaves(nnx.eval_shape(lambda: LoopedLM(student.config, rngs=nnx.Rngs(2))))
    assert {p: a.shape for p, a in fresh.items()} == {p: a.shape for p, a in ours.items()}
    output = ours["blocks", 0, "mixer", "output", "kernel"][...]
    np.testing.assert_array_equal(output, teacher.blocks[0].mixer.output.kernel[...])


def test_new_layers_start_from_queries_keys_and_values():
    teacher = build("full full", options={"full": {"key_value_heads": 1}})
    attention = teacher.blocks[0].mixer
    wanted = [p.kernel[...] for p in (attention.query, attention.key, attention.value)]
    wanted[1:] = [jnp.tile(kernel, 2) for kernel in wanted[1:]]  # one key for both queries
    student = student_from(teacher, "gdn retention", rngs=nnx.Rngs(1))
    joined = student.blocks[0].mixer.query_key_value.kernel[...]
    np.testing.assert_array_equal(joined, jnp.concatenate(wanted, axis=-1))
    x = jax.random.normal(jax.random.key(0), (1, 5, joined.shape[1]))
    np.testing.assert_array_equal(student.blocks[0].mixer.convolution(x)[0], x)
    first = student_from(teacher, "retention full", rngs=nnx.Rngs(1)).blocks[0].mixer
    for projection, kernel in zip((first.query, first.key, first.value), wanted, strict=True):
        np.testing.assert_array_equal(projection.kernel[...], kernel)


def test_kept_layers_keep_their_windows():
    teacher = build(
        "full window full", windows="full 4 -> 2 3", options={"window": {"sliding_window": 3}}
    )
    student = student_from(teacher, "gdn window full", rngs=nnx.Rngs(0))
    assert student.config.windows == "4 -> 3"
    assert student_from(teacher, "gdn gdn gdn", rngs=nnx.Rngs(0)).config.windows is None
    unchanged = student_from(teacher, "full window full", rngs=nnx.Rngs(0))
    tokens = some_tokens()[0]
    np.testing.assert_array_equal(forward(unchanged, tokens), forward(teacher, tokens))
    back = restore(student, teacher, [0])
    np.testing.assert_array_equal(forward(back, tokens), forward(teacher, tokens))


def test_an_unchanged_student_is_at_no_distance(teacher):
    same = student_from(teacher, "full full", rngs=nnx.Rngs(0))
    distances = distance(same, teacher, *some_tokens(), top_k=5)
    np.testing.assert_allclose(distances, np.zeros(2), **ZERO)


SWITCHES = {"prelude": "full", "input_injection": True, "loop_embedding": True}


@pytest.mark.parametrize("switches", [SWITCHES, {"windows": "4 -> 2", "remat": True}])
def test_alignment_compares_on_the_teachers_stream(switches):
    teacher = build("full full", **switches)
    student = student_from(teacher, "full linear", rngs=nnx.Rngs(1))
    tokens, _ = some_tokens()
    inputs, outputs = [], []

    class Recorder(MixingLayer):
        def __init__(self, mixer):
            self.mixer = mixer

        def __call__(self, x, **options):
            y, cache = self.mixer(x, **options)
            inputs.append(x)
            outputs.append(y)
            return y, cache

    written_out = nnx.merge(*nnx.split(teacher))
    written_out.blocks[1].mixer = Recorder(teacher.blocks[1].mixer)
    h = start = teacher.embedding(tokens)
    for block in written_out.prelude:
        h, _ = block(h)
        start = h
    rows = teacher.loop_rows()
    for tau in range(2):
        row = jax.tree.map(lambda a, tau=tau: a[tau], rows)
        h, _ = written_out.loop(h, *row, tau=tau, injected=start)
    mixer = student.blocks[1].mixer
    wanted = [[jnp.mean((mixer(x)[0] - y) ** 2)] for x, y in zip(inputs, outputs, strict=True)]
    losses = jax.jit(alignment_losses)(student, teacher, tokens)
    np.testing.assert_allclose(losses, np.array(wanted), **TOLERANCE)


def test_divergence_over_the_whole_vocabulary_is_the_usual_one():
    p, q = 3 * jax.random.normal(jax.random.key(0), (2, 4, 7))
    log_p, log_q = jax.nn.log_softmax(p / 2), jax.nn.log_softmax(q / 2)
    wanted = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    got = top_k_divergence(p, q, top_k=7, temperature=2.0)
    np.testing.assert_allclose(got, wanted, **TOLERANCE)


def test_divergence_looks_at_the_teachers_likeliest_alone():
    p, q = jnp.array([3.0, 0.0, 2.0, -1.0]), jnp.array([1.0, 9.0, 2.0, 5.0])
    share = jax.nn.sigmoid(1.0), jax.nn.sigmoid(-1.0)
    wanted = share[0] * jnp.log(share[0] / share[1]) + share[1] * jnp.log(share[1] / share[0])
    np.testing.assert_allclose(top_k_divergence(p, q, top_k=2), wanted, **TOLERANCE)
    np.testing.assert_allclose(top_k_divergence(p, q, top_k=1), 0.0, **ZERO)


@pytest.mark.parametrize(
    ("progress", "supervision", "wanted"),
    [
        (0.0, (0.2, 0.6), [0, 0, 0, 1]),
        (0.1, (0.2, 0.6), [0.125, 0.125, 0.125, 0.625]),
        (0.3, (0.2, 0.6), [0.25] * 4),
        (0.6, (0.2, 0.6), [0, 0, 0, 1]),
        (0.0, (0.0, 1.0), [0.25] * 4),
        (0.99, (0.0, 1.0), [0.25] * 4),
        (0.0, (0.0, 0.0), [0, 0, 0, 1]),
    ],
)
def test_loop_weights_follow_their_schedule(progress, supervision, wanted):
    weights = loop_weights(jnp.float32(progress), 4, supervision)
    np.testing.assert_allclose(weights, np.array(wanted, np.float32), **TOLERANCE)


def test_the_layer_that_matters_is_found():
    """Two of three layers are switched off in the teacher: only the middle one can be missed."""
    teacher = build("full full full")
    for layer in (0, 2):
        teacher.blocks[layer].mixer.output.kernel[...] *= 1e-3
    teacher.blocks[1].mixer.output.kernel[...] *= 4
    student = student_from(teacher, "gdn gdn gdn", rngs=nnx.Rngs(1))
    for layer in (0, 2):
        student.blocks[layer].mixer.output.kernel[...] *= 0
    benefits = restoration_benefits(student, teacher, *some_tokens(), top_k=VOCABULARY)
    assert kl_guided(benefits, 1) == (1,)
    assert benefits[1] > 10 * np.abs(benefits[[0, 2]]).max()
    one_back = restore(student, teacher, [1])
    far, near = (
        distance(s, teacher, *some_tokens(), top_k=VOCABULARY)[-1] for s in (student, one_back)
    )
    np.testing.assert_allclose(benefits[1], far - near, **TOLERANCE)


def test_places_of_restored_layers():
    assert uniform(24, 6) == (3, 7, 11, 15, 19, 23)
    assert uniform(3, 2) == (0, 2)
    assert uniform(3, 0) == ()
    assert kl_guided(np.array([0.1, 0.5, 0.5, -1.0]), 2) == (1, 2)
    assert kl_guided(np.array([0.5, 0.1, 0.5]), 1) == (0,)


def test_stage_one_changes_the_new_mixers_alone(teacher):
    student = student_from(teacher, "full gdn", rngs=nnx.Rngs(0))
    course = Course(teacher, jnp.int32(0), draw, PLAN, is_progress_shown=False)
    before, after = leaves(student), leaves(align(course, student).model)
    changed = {path for path in before if not np.array_equal(before[path][...], after[path][...])}
    assert changed == {path for path in before if path[:3] == ("blocks", 1, "mixer")}


@pytest.mark.nightly
def test_conversion_resumes_with_the_same_bits(tmp_path, teacher):
    tokens = some_tokens()
    before = leaves(teacher)
    undisturbed = run(teacher)
    # Stopped at every tenth step: in the middle of each stage that has a middle.
    stops = 0
    while (disturbed := run(teacher, directory=tmp_path, stop=lambda: True)).stopped_by:
        stops += 1
        assert stops < 10
    assert stops == 2
    assert disturbed.layers == undisturbed.layers
    np.testing.assert_array_equal(disturbed.benefits, undisturbed.benefits)
    ours, theirs = leaves(undisturbed.model), leaves(disturbed.model)
    for path in ours:
        np.testing.assert_array_equal(ours[path][...], theirs[path][...])
    without_clock = [
        {
            stage: [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
            for stage, rows in each.history.items()
        }
        for each in (undisturbed, disturbed)
    ]
    assert without_clock[0] == without_clock[1]

    # What was seen on the way.
    history = undisturbed.history
    assert list(history) == ["align", "distil"]
    for stage in ("align", "distil"):
        assert history[stage][-1]["loss"] < history[stage][0]["loss"], stage
    fresh = student_from(teacher, "linear linear", rngs=nnx.Rngs(0))
    start = jax.jit(alignment_losses)(fresh, teacher, tokens[0])
    assert undisturbed.alignment.shape == start.shape == (2, 2)
    assert (undisturbed.alignment < start).all()
    words = ["linear", "linear"]
    words[undisturbed.layers[0]] = "full"
    assert undisturbed.model.config.layers == tuple(words)
    for path, array in leaves(teacher).items():
        assert array[...] is before[path][...]

    # Another teacher in the same folder is another conversion.
    other = build()
    other.norm.scale[...] *= 1.01
    with pytest.raises(CheckpointError, match="teacher"):
        run(other, directory=tmp_path)


def test_stages_can_be_left_out_and_layers_named(teacher):
    plan = dataclasses.replace(
        PLAN, align_steps=0, distil_steps=0, extend_times=(8, 12), extend_steps=2, trained="mixers"
    )
    rows = []
    converted = run(teacher, word="linear", restored=[0], plan=plan, callback=rows.append)
    assert converted.layers == (0,)
    assert converted.benefits is None
    assert converted.model.config.pattern == "full linear"
    assert [row["stage"] for row in rows] == ["extend-8", "extend-12"]
    ours, theirs = leaves(converted.model), leaves(teacher)
    for path in theirs:
        if path[:3] != ("blocks", 1, "mixer"):
            np.testing.assert_array_equal(ours[path][...], theirs[path][...])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: student_from(t, "gdn", rngs=nnx.Rngs(0)), "1 layers, the teacher 2"),
        (lambda t: student_from(t, "gdn mamba2", rngs=nnx.Rngs(0)), "'mamba2', which has no"),
        (lambda t: run(t, word="rwkv7"), "'rwkv7', which has no"),
        (lambda t: run(build(options={"full": {"projection_biases": True}})), "has none to start"),
        (lambda t: run(t, word="full"), "has already"),
        (lambda t: run(t, restored=2), "below the teacher's 2 layers"),
        (lambda t: run(t, restored=(0, 5)), "restored is .0, 5.; wanted"),
        (lambda t: run(t, selection="best"), "'kl', 'uniform'"),
        (lambda t: run(t, plan=dataclasses.replace(PLAN, top_k=13)), "vocabulary of 12"),
        (lambda t: run(build("gdn full")), "layer 'gdn'"),
        (lambda t: run(build("full", coda="full")), "coda 'full'"),
        (lambda t: top_k_divergence(jnp.ones(3), jnp.ones(3), top_k=4), "1..3"),
        (lambda t: top_k_divergence(jnp.ones(3), jnp.ones(3), top_k=1, temperature=0), "positive"),
        (lambda t: loop_weights(0.0, 2, (0.5, 0.1)), "rise <= end"),
        (lambda t: ConversionPlan(trained="some"), "'all', 'mixers'"),
        (lambda t: ConversionPlan(extend_times=(8, 4)), "must grow"),
        (lambda t: ConversionPlan(align_steps=-1), "align_steps is -1"),
        (lambda t: ConversionPlan(distil_rate=0), "distil_rate is 0"),
        (lambda t: ConversionPlan(target_share=2), r"\[0, 1\]"),
    ],
)
def test_wrong_arguments_are_named(call, message, teacher):
    with pytest.raises(ValueError, match=message):
        call(teacher)


def test_a_sampler_of_another_signature_is_named(teacher):
    message = r"sample must be called as sample\(data, step, time=tokens\).*\(step, data\)"
    with pytest.raises(TypeError, match=message):
        convert(teacher, None, lambda step, data: step, plan=PLAN)
