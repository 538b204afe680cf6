"""Schedules in ticks: golden lengths, places and bubbles, and what cannot run here."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.parallel.pipeline import program_of
from toolkit.schedules import (
    Durations,
    Schedule,
    Task,
    breadth_first,
    dual_pipe_v,
    gpipe,
    interleaved,
    one_forward_one_backward,
    simulate,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)

# For four devices and eight microbatches: ticks, bubble when all devices step together, places of
# activations, of what weight gradients wait for, and of messages on the fullest device.
GOLDEN = {
    gpipe: (22, "0.273", 8, 0, 8),
    one_forward_one_backward: (22, "0.400", 4, 0, 2),
    interleaved: (38, "0.294", 11, 0, 4),
    breadth_first: (38, "0.158", 16, 0, 8),
    zero_bubble_h1: (27, "0.111", 4, 4, 2),
    zero_bubble_h2: (27, "0.111", 7, 7, 2),
    zero_bubble_v: (51, "0.059", 8, 7, 3),
    dual_pipe_v: (39, "0.111", 9, 4, 2),
}


@pytest.mark.parametrize("make", GOLDEN)
def test_golden_programs(make):
    program = program_of(make(4, 8))
    (kept,), (split,) = program.kept_slots, program.split_slots
    found = (program.length, f"{program.bubble():.3f}", kept, split, program.message_slots)
    assert found == GOLDEN[make]
    assert kept == max(program.schedule.peak_activations)
    assert program.messages == 16 * program.schedule.hops
    assert len(program.channels) == 2


def test_what_a_step_together_costs():
    """1F1B waits for its whole backwards; halves of equal length wait for nothing."""
    for p, m, plain, whole in [(4, 8, 0.273, 0.400), (8, 32, 0.179, 0.351)]:
        assert float(simulate(one_forward_one_backward(p, m)).bubble) == pytest.approx(
            plain, abs=5e-4
        )
        assert program_of(one_forward_one_backward(p, m)).bubble() == pytest.approx(whole, abs=5e-4)
    for make in (zero_bubble_h1, zero_bubble_v):
        line = simulate(make(8, 32))
        assert program_of(line.schedule).bubble() == pytest.approx(float(line.bubble))
    slow = Durations(stages=(1, 1, 3, 1))
    program = program_of(one_forward_one_backward(4, 8))
    assert program.makespan(slow) >= simulate(program.schedule, slow).makespan
    assert program.makespan(Durations(delay=1)) == program.makespan() + program.length


@settings(deadline=None, max_examples=40)
@given(
    make=st.sampled_from(list(GOLDEN)), p=st.integers(1, 4), groups=st.integers(2, 4),
)  # fmt: skip
def test_no_place_is_written_while_it_is_read(make, p, groups):
    """Replays the tables: every task finds in its places what it needs, on its device, in time."""
    program = program_of(make(p, groups * p))
    schedule, columns = program.schedule, program.columns
    by_tick = {}
    for task, tick in program.ticks.items():
        by_tick.setdefault(tick, []).append(task)
    held = [{} for _ in range(p)]  # device -> (buffer, slot) -> what lies there
    last = schedule.stages - 1
    for tick in range(program.length):
        sent, written = {}, []
        for task in by_tick[tick]:
            kind, i, s = task
            d = schedule.placement[s]
            now = {name: table[tick, d] for name, table in columns.items() if name != "arrival"}
            assert (now["microbatch"], now["stage"]) == (i, s)
            assert program.rows[d][now["row"]] == s
            assert d not in sent
            if kind == "F":
                assert s == 0 or held[d]["message", now["read"]] == ("x", i, s)
                sent[d] = ("dy", i, s) if s == last else ("x", i, s + 1)
                written.append((d, ("kept", now["kept"]), ("kept", i, s)))
            elif kind == "W":
                assert held[d]["split", now["split"]] == ("split", i, s)
            else:
                assert held[d]["message", now["read"]] == ("dy", i, s)
                assert held[d]["kept", now["kept"]] == ("kept", i, s)
                sent[d] = ("dy", i, s - 1)
                if kind == "I":
                    written.append((d, ("split", now["split"]), ("split", i, s)))
            if now["own"] >= 0:
                written.append((d, ("message", now["own"]), sent[d]))
        for channel, pairs in enumerate(program.channels):
            for a, b in pairs:
                if (slot := columns["arrival"][tick, b, channel]) >= 0:
                    written.append((b, ("message", slot), sent[a]))
        assert len({entry[:2] for entry in written}) == len(written)
        for d, place, what in written:
            held[d][place] = what


def test_places_do_not_grow_with_the_microbatches():
    for make in (one_forward_one_backward, zero_bubble_h1, zero_bubble_h2, zero_bubble_v):
        few, many = (program_of(make(4, m)) for m in (8, 64))
        for name in ("message_slots", "kept_slots", "split_slots"):
            assert getattr(few, name) == getattr(many, name)
    assert program_of(gpipe(4, 64)).kept_slots == (64,)  # control


def test_tied_stages_and_kinds():
    loops = interleaved(2, 2, chunks=3)
    program = program_of(loops, tied=(0, 1) * 3, kinds=(0, 1, 1, 1, 1, 1))
    assert program.rows == ((0,), (1,))
    assert len(program.kept_slots) == 2
    assert set(program.columns["row"].flat) == {0}
    assert program.messages == 2 * 2 * 5


TWO = [Task("F", 0, 0), Task("F", 0, 1), Task("B", 0, 1), Task("B", 0, 0)]
UNEVEN = Schedule("mine", 1, (0, 0, 1), (tuple(TWO), (Task("F", 0, 2), Task("B", 0, 2))))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: program_of(replace(gpipe(2, 2), orders=gpipe(2, 2).orders[::-1])),
            "'GPipe' cannot run: F0@1 is on device 0",
        ),
        (lambda: program_of(gpipe(2, 2), tied=(0, 0)), "0 and 1 share weights, and lie on dev"),
        (lambda: program_of(gpipe(2, 2), tied=(0, 2)), r"tied: got \(0, 2\), wanted for each"),
        (lambda: program_of(gpipe(2, 2), kinds=(0,)), r"kinds: got \(0,\), wanted for each of"),
        (lambda: program_of(UNEVEN),
            r"devices hold \[2, 1\] stages' weights",
        ),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_in_one_line(call, words):
    with pytest.raises((TypeError, ValueError), match=words) as error:
        call()
    assert "\n" not in str(error.value)
