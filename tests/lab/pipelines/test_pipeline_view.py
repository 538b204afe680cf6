"""The instrument of pipelines, held against schedules and the compiled program."""

import itertools

import numpy as np
import pytest

from toolkit.lab.pipelines.pipeline import pipeline_view, scene_of
from toolkit.parallel.pipeline import program_of
from toolkit.parallel.pipeline.named import (
    RULES,
    SEARCHED,
    Compiled,
    compile_apart,
    moved,
    searched_table,
)
from toolkit.schedules import from_csv, gpipe, one_forward_one_backward

START = {
    "schedule": "1F1B", "devices": 4, "microbatches": 8, "slow": 2, "times": 1.0, "delay": 0.0,
    "device": 0, "moves": "none",
}  # fmt: skip


def view(**changes):
    return pipeline_view(**START | changes)


@pytest.mark.parametrize("name", RULES)
def test_numbers_are_the_simulation_s_and_no_schedule_beats_its_bound(name):
    for times, delay in itertools.product((1.0, 1.3), (0.0, 0.35)):
        found = view(schedule=name, times=times, delay=delay)
        timeline = found.timeline
        assert found.bubble == pytest.approx(float(timeline.bubble))
        assert found.bound <= found.makespan
        assert found.work.max() <= found.makespan
        chunks = timeline.schedule.chunks
        peaks = [float(peak) for peak in timeline.peak_memory(chunks)]
        assert [max(held) for _, held in found.memory] == peaks
        assert peaks == [*map(float, timeline.schedule.peak_activations)]
    assert view(schedule=name, times=1.3).bound > view(schedule=name).bound


def test_a_searched_order_is_shown_where_it_was_searched_for():
    """With a slow stage it ends at the bound, and the order with which the search begins later."""
    pytest.importorskip("ortools")
    given = {"schedule": "searched, chain", "slow": 2, "times": 1.5}
    before = view(**given)
    table = searched_table("searched, chain", 4, 8, 2, 1.5)
    compiled = Compiled(0, 0, 0, 0.0, 0, 0, "", 0.0, table)
    after = view(**given, compiled=compiled)
    assert "button searches" in before.sentence()
    assert "button searches" not in after.sentence()
    assert after.makespan == after.bound == before.bound < before.makespan
    assert max(after.data()["most activations held"]) <= 4
    swapped = view(**given, compiled=compiled, moves="F1@0 to 0")
    assert swapped.compiled is None
    orders = swapped.timeline.schedule.orders, after.timeline.schedule.orders
    assert {*orders[0][0]} == {*orders[1][0]}
    assert orders[0] != orders[1]


def test_1f1b_ends_where_the_formula_says_and_at_its_bound():
    found = view()
    assert (found.makespan, found.bound) == (3 * (8 + 4 - 1), 33)
    assert view(times=4.0).makespan > 8 * 3 * 4  # the slow stage alone works as long


@pytest.mark.parametrize("name", ["1F1B", "ZB-V", "interleaved"])
def test_a_message_leaves_when_its_sender_ends_and_arrives_before_it_is_needed(name):
    found = view(schedule=name, delay=0.5, times=1.5)
    scene = scene_of(found)
    schedule = found.timeline.schedule
    assert len(scene.messages) == program_of(schedule).messages
    ends = {(bar.lane, bar.end) for bar in scene.bars}
    starts = {lane: [bar.start for bar in scene.bars if bar.lane == lane] for lane in range(4)}
    for message in scene.messages:
        assert (message.source, message.start) in ends
        assert message.end == pytest.approx(message.start + 0.5)
        assert max(starts[message.target]) >= message.end - 1e-9
    assert max(max(values) for _, values in scene.levels) == 1
    assert len(scene.bars) == sum(map(len, schedule.orders))


def test_sentences_of_the_notebook():
    """The numbers that its prose has."""
    late = [view(schedule=name, delay=0.5) for name in ("1F1B", "GPipe")]
    assert [one.makespan for one in late] == [41, 36]
    assert view(schedule="1F1B").makespan == 33
    assert [max(one.timeline.schedule.peak_activations) for one in late] == [4, 8]
    assert view(microbatches=28).bubble < 0.1 < view(microbatches=27).bubble + 1e-12
    placement = view(schedule="ZB-V").timeline.schedule.placement
    assert placement[0] == placement[-1]
    assert view(times=2.0).makespan == 55


def test_without_delay_nothing_is_on_its_way():
    assert scene_of(view()).messages == ()


def test_moves_keep_what_can_run_and_refuse_the_rest_with_the_reason():
    schedule = one_forward_one_backward(4, 8)
    found = moved(schedule, "F4@0 to 4; F4@0 to 3")
    assert [*map(repr, found.orders[0][:5])] == ["F0@0", "F1@0", "F2@0", "F4@0", "F3@0"]
    assert moved(schedule, "none") == schedule
    for words, reason in (
        ("B0@0 to 0", "B0@0 cannot go to 0: device 0 waits for ever at B0@0: it needs F0@0"),
        ("F9@0 to 0", "F9@0 is no task of this schedule"),
        ("F1@0 to 99", "got place 99, device 0 has 0 to 15"),
        ("one two", "got 'one two', wanted such as F3@1 to 5"),
    ):
        with pytest.raises(ValueError, match="moves: ") as error:
            moved(schedule, words)
        assert reason in str(error.value)
    with pytest.raises(ValueError, match="cannot go"):
        moved(gpipe(2, 2), "B1@1 to 0")


def test_a_dragged_task_moves_and_a_refused_one_leaves_the_picture():
    pytest.importorskip("anywidget")
    from toolkit.lab import PipelinePanel

    panel = PipelinePanel(times=1.0)
    panel.player._handle_custom_msg({"bar": 4, "place": 3}, [])
    tasks = panel.view.timeline.schedule.orders[0]
    assert panel.moves == "B0@0 to 3"
    assert not panel.error
    assert repr(tasks[3]) == "B0@0"
    assert panel.player.selected == 3
    before = panel.png
    panel.player._handle_custom_msg({"bar": 3, "place": 0}, [])
    assert "it needs F0@0" in panel.error
    assert (panel.moves, panel.png) == ("B0@0 to 3", before)
    panel.microbatches = 4  # another order starts without moves
    assert (panel.moves, panel.error) == ("none", "")
    with pytest.raises(ValueError, match="wants at least"):
        panel.schedule = "ZB-H2"
    assert panel.schedule == "1F1B"


@pytest.mark.slow
def test_permutes_are_those_of_the_compiled_program():
    for name, microbatches in (("1F1B", 8), ("ZB-V", 4), ("searched, V", 4)):
        *waited, facts = compile_apart(name, 2, microbatches, 1, 1.5)
        assert not any(waited)
        table = facts.table
        assert bool(table) == (name in SEARCHED)
        program = program_of(from_csv(table) if table else RULES[name](2, microbatches))
        assert facts.permutes == program.permutes == facts.ticks * facts.channels
        assert facts.bytes_sent == facts.permutes * facts.activation
        assert facts.messages == program.messages


@pytest.mark.slow
@pytest.mark.timed
def test_sixteen_stages_and_sixty_four_microbatches_move_in_a_tenth_of_a_second():
    pytest.importorskip("anywidget")
    from panel_moves import assert_quick_update

    from toolkit.lab import PipelinePanel
    from toolkit.lab.kit.page import ROW_PIXELS, SCREEN_PIXELS, WORDS_PIXELS, height_of, rows_of

    panel = PipelinePanel(devices=16, microbatches=64)
    taken = WORDS_PIXELS + ROW_PIXELS * rows_of(panel) + panel.pixels_above
    assert taken + height_of(panel) <= SCREEN_PIXELS
    for name in ("1F1B", "ZB-H1"):
        panel.schedule = name
        assert_quick_update(panel, "times", np.arange(1, 4, 0.5).tolist())
