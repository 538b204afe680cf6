"""No bad call of a public name ends in a traceback of others, hangs, or passes in silence.

The kinds of outcomes are those of `bad_calls.Outcome`. A call that is accepted although the value
is not what the annotation says, or gives numbers that are not finite, fails the test unless
`ALLOWED` says why that is no nonsense.
"""

import dataclasses
import inspect
import zlib
from collections import Counter

import pytest
from bad_calls import outcomes_of
from test_docs import PUBLIC, public

# Of all that could be drawn; the first tier takes names whose examples compile next to nothing.
SHARE, FAST_SHARE = 0.2, 0.25
LEAST, FAST_LEAST = 1000, 150
FAST = """
    attention.softmax_attention attention.gated_delta_net attention.mamba2_step
    attention.retention_log_decay looped.interleave looped.by_loop looped.sample_token
    looped.LoopedConfig looped.pad_prompts training.FitOptions training.adamw training.load_corpus
    training.sample_batch training.Checkpoints conversion.ConversionPlan conversion.loop_weights
    measure.speedup measure.record measure.time_contenders parallel.make_mesh figures.new_figure
    language.TrainingRun serving.Request serving.Scheduler serving.window_bytes serving.goodput
"""
ALLOWED = {
    "measure.collectives(compiled": "a compiled program is whatever answers as one",
    "measure.program_cost(compiled": "a compiled program is whatever answers as one",
}


def is_record(value):
    """What functions return: data that nobody but us makes, and that checks nothing."""
    has_fields = dataclasses.is_dataclass(value) or hasattr(value, "_fields")
    return inspect.isclass(value) and has_fields and not hasattr(value, "__post_init__")


def is_fuzzed(value):
    is_error = inspect.isclass(value) and issubclass(value, BaseException)
    return callable(value) and not is_error and not is_record(value)


def judged(names, share, least):
    """Calls every name in bad ways; the same ones every time."""
    found = []
    for room, name in names:
        if is_fuzzed(public(room, name)):
            found += outcomes_of(
                room, name, lambda label: zlib.crc32(label.encode()) % 1000 < 1000 * share
            )
    counts = Counter(outcome.kind for outcome in found)
    print(f"{len(found)} calls:", *(f"{kind} {count}" for kind, count in counts.most_common()))
    bad = [
        str(outcome)
        for outcome in found
        if outcome.kind in ("foreign", "hung", "accepted")
        and not any(outcome.call.startswith(start) for start in ALLOWED)
    ]
    assert not bad, "\n".join(bad)
    assert len(found) >= least


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_bad_calls_are_refused_in_words_of_ours():
    judged([tuple(name.split(".")) for name in FAST.split()], FAST_SHARE, FAST_LEAST)


@pytest.mark.nightly
def test_bad_calls_of_every_public_name_are_refused_in_words_of_ours():
    judged(PUBLIC, SHARE, LEAST)
