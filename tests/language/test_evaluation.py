"""Evaluation: likelihoods token by token, metrics by hand, stops, damaged files, the harness."""

import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.language import SpecialTokens
from toolkit.language.evaluation import (
    Choice,
    Continuation,
    Document,
    Words,
    drawn_rows,
    evaluate,
    harness_model,
    log_likelihoods,
    read_task,
)
from toolkit.language.evaluation.evaluate import windows
from toolkit.looped import LoopedConfig, LoopedLM

TOLERANCE = 2e-5  # relative; sums of some twenty numbers in float32


@pytest.fixture(scope="module")
def model():
    return LoopedLM(LoopedConfig.tiny("gdn full", width=16, heads=2), rngs=nnx.Rngs(0))


def one_by_one(model, context, continuation):
    """Sum of the tokens' log-probabilities, without padding or a batch, in float64."""
    text = [*context, *continuation]
    logits = np.asarray(nnx.jit(model)(jnp.array([text[:-1]]))[0, len(context) - 1 :], np.float64)
    logs = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    is_greedy = np.argmax(logits, axis=-1) == list(continuation)
    return float(sum(logs[range(len(logs)), list(continuation)])), bool(is_greedy.all())


def test_likelihoods_are_those_of_tokens_one_by_one(model):
    greedy = int(jnp.argmax(model(jnp.array([[7, 8]]))[0, -1]))
    pairs = [([7, 8], [greedy]), (list(b"The sky"), list(b" is blue")), ([3], [5, 0, 255])]
    found = dict(log_likelihoods(model, pairs, batch=2))
    assert found[0].is_greedy
    for number, pair in enumerate(pairs):
        log, is_greedy = one_by_one(model, *pair)
        np.testing.assert_allclose(found[number].log, log, rtol=TOLERANCE)
        assert found[number].is_greedy == is_greedy
    # The control: one token more in the context is another likelihood.
    [(_, other)] = log_likelihoods(model, [([9, 7, 8], [greedy])])
    assert abs(other.log - found[0].log) > 100 * TOLERANCE


def test_metrics_are_those_of_their_equations(model):
    rows = [
        Choice("a b", ("c", "dddd"), 1),
        Choice("x ", ("yy", "z"), 0),
        Choice("", ("q", "é"), 1),
    ]
    logs = [
        [one_by_one(model, *Words(None, SpecialTokens(), 256).pair(row.query, f" {text}"))[0]
         for text in row.choices]
        for row in rows
    ]  # fmt: skip
    plain = [
        max(range(2), key=log.__getitem__) == row.gold for row, log in zip(rows, logs, strict=True)
    ]
    scaled = [
        max(
            range(2),
            key=[x / len(text) for x, text in zip(log, row.choices, strict=True)].__getitem__,
        )
        == row.gold
        for row, log in zip(rows, logs, strict=True)
    ]
    found = evaluate(model, rows)
    assert found.metrics == pytest.approx({"acc": np.mean(plain), "acc_norm": np.mean(scaled)})
    assert found.errors["acc"] == pytest.approx(np.std(plain, ddof=1) / math.sqrt(3))

    text = "The sky is blue, naïve."
    log, _ = one_by_one(model, [10], text.encode())
    metrics = evaluate(model, [Document(text)], window=100).metrics
    assert metrics["bits_per_byte"] == pytest.approx(-log / 24 / math.log(2), rel=TOLERANCE)
    assert metrics["word_perplexity"] == pytest.approx(math.exp(-log / 5), rel=1e-3)

    log, _ = one_by_one(model, b"a", b" b")
    metrics = evaluate(model, [Continuation("a ", "b")]).metrics
    assert metrics == pytest.approx({"acc": 0, "perplexity": math.exp(-log)}, rel=1e-3)


def test_every_token_is_in_one_window():
    for length in range(1, 12):
        tokens = list(range(1, length + 1))
        pieces = list(windows(0, tokens, 4))
        assert [*itertools.chain(*(after for _, after in pieces))] == tokens
        for before, after in pieces:
            assert before
            assert len(before) + len(after) <= 5
            end = ([0, *tokens]).index(after[0])
            assert [0, *tokens][end - len(before) : end] == before


def test_a_stop_loses_nothing(model, tmp_path):
    rows = list(drawn_rows("recall", 6, rows=40))
    file = tmp_path / "recall.jsonl"
    wanted = evaluate(model, rows, results=file)
    whole = file.read_bytes()
    # A kill in the second of several lines.
    lines = whole.splitlines(keepends=True)
    assert len(lines) > 3
    file.write_bytes(b"".join(lines[:2]) + lines[2][:40])
    assert evaluate(model, rows, results=file) == wanted
    assert len(file.read_bytes()) == len(whole)
    other = LoopedLM(model.config, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="of another model, task or tokenizer"):
        evaluate(other, rows, results=file)
    file.write_bytes(whole.replace(b"true", b"null", 1) if b"true" in whole else whole[:-9] + b"\n")
    with pytest.raises(ValueError, match="damaged"):
        evaluate(model, rows, results=file)


def test_drawn_rows_have_one_right_answer():
    for name, size in (("needle", 8), ("recall", 8), ("associative", 8)):
        rows = list(drawn_rows(name, size, rows=30, seed=3))
        assert rows == list(drawn_rows(name, size, rows=30, seed=3))
        assert rows != list(drawn_rows(name, size, rows=30, seed=4))
        assert len({row.gold for row in rows}) == 4
        for row in rows:
            assert len({*row.choices}) == 4
            last = row.query.removesuffix(" =").split()[-1]
            pattern = {
                "needle": r"secret number is (\d+)\.",
                "recall": rf"\b{last} = (\d+);",
                "associative": rf"\b{last} (\w+) ",
            }[name]
            assert re.findall(pattern, row.query + " ") == [row.choices[row.gold]]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "has no rows"),
        ('{"question": "a"}', "line 1: got the fields question; wanted query, choices, gold; or"),
        ('{"query": "a", "choices": ["b"], "gold": 0}', "a list of at least two texts"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "gold is 2, wanted 0 to 1"),
        ('{"query": "a", "choices": ["b", "c"], "gold": true}', "gold is True"),
        ('{"query": "a", "choices": ["b", ""], "gold": 0}', "is empty"),
        ('{"text": 3}', "got 3, wanted a text"),
        ('{"text": "a"}\n{"context": "a", "continuation": "b"}', "line 2: a Continuation after"),
        ('{"text": ', "line 1"),
        ("[" * 5000, "line 1"),
        ('{"text": "\\ud800"}', "not UTF-8"),
    ],
)
def test_damaged_tasks_are_one_line(tmp_path, lines, message):
    file = tmp_path / "task.jsonl"
    file.write_text(lines)
    with pytest.raises(ValueError, match=re.escape(message)) as found:
        read_task(file)
    assert "\n" not in str(found.value)


def test_rows_of_the_harness_are_read_with_their_other_fields(tmp_path):
    file = tmp_path / "task.jsonl"
    row = {"query": "a", "choices": ["b", "c"], "gold": 1, "activity_label": "d", "ind": 4}
    file.write_text(json.dumps(row) + "\n\n" + json.dumps(row))
    assert read_task(file) == 2 * [Choice("a", ("b", "c"), 1)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: evaluate(model, []), "got none"),
        (lambda model: evaluate(model, [Document("a"), Continuation("a", "b")]), "of one kind"),
        (lambda model: evaluate(model, [Document("a")], window=0), "window: got 0"),
        (lambda model: Document(""), "is empty"),
        (lambda model: Choice("a", ("b",), 0), "at least two texts"),
        (lambda model: Continuation("a", "\ud800"), "bytes that are not UTF-8"),
        (lambda model: evaluate(model, [Continuation("a", "bcd")], window=2), "at least the 3 of"),
        (lambda model: evaluate(model, [Document("a")], batch=0), "batch: got 0"),
        (lambda model: drawn_rows("recall", 200, 3), "size: got 200 for recall, wanted 4 to 90"),
        (lambda model: list(log_likelihoods(model, [([], [1])])), "0 is empty"),
    ],
)
def test_wrong_calls_are_refused(model, call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(model)


def test_a_model_of_nan_is_refused(model):
    graph, state = nnx.split(model)
    broken = nnx.merge(graph, jax.tree.map(lambda x: x * jnp.nan, state))
    with pytest.raises(ValueError, match="is nan"):
        evaluate(broken, [Document("a")])


def test_the_harness_gets_the_same_numbers(model):
    api = pytest.importorskip("lm_eval.api.instance")
    theirs = harness_model(model, window=16)

    def requests(kind, *arguments):
        return [api.Instance(kind, {}, args, at) for at, args in enumerate(arguments)]

    pairs = [("The sky is ", "blue"), ("", "a"), ("a" * 40, "b")]
    got = theirs.loglikelihood(requests("loglikelihood", *pairs))
    for (context, text), (log, is_greedy) in zip(pairs, got, strict=True):
        before, after = Words(None, SpecialTokens(), 256).pair(context, text)
        assert (log, is_greedy) == pytest.approx(one_by_one(model, before[-16:], after), rel=1e-4)
    [rolled] = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", ("abcdef " * 5,)))
    nats = evaluate(model, [Document("abcdef " * 5)], window=16).metrics["bits_per_byte"]
    assert rolled == pytest.approx(-nats * 35 * math.log(2), rel=1e-5)
    how = {"until": ["\n\n"], "max_gen_toks": 4}
    [written] = theirs.generate_until(requests("generate_until", ("ab", how)))
    assert len(written.encode(errors="replace")) >= 1
