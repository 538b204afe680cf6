"""Programs as libtpu writes them: loops without counts, asynchronous collectives in fusions."""

import pytest

from toolkit.measure import collectives
from toolkit.planning.time.compiled_work import Send, compiled_work

TEXT = """\
HloModule step, is_scheduled=true, num_partitions=4

%start (p: bf16[2,8]) -> bf16[8,8] {
  %p = bf16[2,8]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[8,8]{1,0} all-gather(%p), channel_id=7, replica_groups={{0,1,2,3}}
}

%amid (p: bf16[2,8]) -> bf16[8,8] {
  %p = bf16[2,8]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[8,8]{1,0} all-gather(%p), channel_id=7, replica_groups={{0,1,2,3}}
}

%body (carry: (s32[], bf16[2,8])) -> (s32[], bf16[2,8]) {
  %carry = (s32[], bf16[2,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %w = bf16[2,8]{1,0} get-tuple-element(%carry), index=1
  %one = s32[] constant(STEP)
  %async-collective-start = bf16[8,8]{1,0} fusion(%w), kind=kCustom, calls=%start
  %async-collective-done = bf16[8,8]{1,0} fusion(%w), kind=kCustom, calls=%amid
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], bf16[2,8]{1,0}) tuple(%next, %w)
}

%test (carry: (s32[], bf16[2,8])) -> pred[] {
  %limit = s32[] constant(16)
  %carry = (s32[], bf16[2,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (w: bf16[2,8]) -> bf16[2,8] {
  %w = bf16[2,8]{1,0} parameter(0)
  %begin = s32[] constant(START)
  %copy = s32[] copy(%begin)
  %init = (s32[], bf16[2,8]{1,0}) tuple(%copy, %w)
  %loop = (s32[], bf16[2,8]{1,0}) while(%init), condition=%test, body=%body
  ROOT %result = bf16[2,8]{1,0} get-tuple-element(%loop), index=1
}
"""


class Written:
    """Stands for a compiled program."""

    def __init__(self, text):
        self.as_text = lambda: text


def found_in(start="0", step="1"):
    text = TEXT.replace("START", start).replace("STEP", step)
    return collectives(Written(text))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("start", "step", "count"), [("0", "1", 16), ("4", "1", 12), ("1", "4", 4), ("20", "1", 0)]
)
def test_loops_run_from_constant_to_constant(start, step, count):
    (found,) = found_in(start, step)
    assert (found.count, found.is_count_exact) == (count, True)


@pytest.mark.parametrize("change", [{"start": "-1"}, {"step": "0"}])
def test_what_the_text_does_not_tell_counts_once_and_is_said(change):
    (found,) = found_in(**change)
    assert (found.count, found.is_count_exact) == (1, False)


def test_an_asynchronous_collective_is_one():
    """Start, what hides it and done are three fusions around the same channel."""
    (found,) = found_in()
    assert (found.kind, found.bytes, found.bytes_sent) == ("all-gather", 128, 96.0)


SCATTERED = """\
HloModule step, is_scheduled=true, num_partitions=4

%all-reduce-scatter.1.clone (p: bf16[30,8]) -> bf16[8,8] {
  %p = bf16[30,8]{1,0} parameter(0)
  %zero = bf16[] constant(0)
  %pad = bf16[32,8]{1,0} pad(%p, %zero), padding=0_2x0_0
  %sum = bf16[32,8]{1,0} all-reduce(%pad), channel_id=2, replica_groups={{0,1,2,3}}, to_apply=%add
  %begin = u32[] constant(0)
  ROOT %share = bf16[8,8]{1,0} dynamic-slice(%sum, %begin, %begin), dynamic_slice_sizes={8,8}
}

ENTRY %main (g: bf16[30,8]) -> bf16[8,8] {
  %g = bf16[30,8]{1,0} parameter(0)
  ROOT %fusion.1 = bf16[8,8]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1.clone
}
"""


def test_an_all_reduce_fused_with_the_cut_of_its_result_is_a_reduce_scatter():
    """Once read as an all-reduce, which sends twice."""
    (found,) = collectives(Written(SCATTERED))  # pyright: ignore[reportArgumentType]
    assert (found.kind, found.bytes, found.bytes_sent) == ("reduce-scatter", 128, 384.0)
    (sent,) = [one for one in compiled_work(Written(SCATTERED)).items if isinstance(one, Send)]  # pyright: ignore
    assert (sent.kind, sent.bytes_sent) == ("reduce-scatter", 384.0)
