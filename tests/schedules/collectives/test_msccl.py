"""MSCCL XML: what is written is read back as the same messages; bad files are refused."""

import re
import xml.etree.ElementTree as ET

import pytest

from toolkit.schedules.collectives import (
    forest,
    from_msccl,
    named_topology,
    program_faults,
    to_msccl,
    to_program,
)


@pytest.mark.parametrize("collective", ["all-gather", "reduce-scatter", "all-reduce"])
@pytest.mark.parametrize("name", ["ring:4", "dgx1", "star:8", "h100:2x8"])
def test_round_trip(name, collective):
    program = to_program(forest(named_topology(name), collective))
    again = from_msccl(to_msccl(program))
    assert program_faults(again) == []
    assert (again.collective, again.ranks) == (collective, program.ranks)
    assert {m for each in again.rounds for m in each} == {
        m for each in program.rounds for m in each
    }


def test_a_file_is_what_the_runtime_takes():
    program = to_program(forest(named_topology("mi250:1x16"), "all-reduce"))
    root = ET.fromstring(to_msccl(program))
    assert root.attrib["coll"] == "allreduce"
    for gpu in root:
        ids = [int(block.attrib["id"]) for block in gpu]
        assert ids == list(range(len(ids)))
        ends = [(b.attrib["send"], b.attrib["recv"], b.attrib["chan"]) for b in gpu]
        assert len(set(ends)) == len(ends)
        for block in gpu:
            assert len(block) <= 256
            assert [int(step.attrib["s"]) for step in block] == list(range(len(block)))
            for step in block:
                if step.attrib["depid"] != "-1":
                    awaited = gpu[int(step.attrib["depid"])][int(step.attrib["deps"])]
                    assert awaited.attrib["hasdep"] == "1"


def test_many_messages_between_two_gpus_take_several_channels():
    program = to_program(forest(named_topology("ring:2"), trees_per_root=300))
    text = to_msccl(program)
    assert 'nchannels="2"' in text
    assert program_faults(from_msccl(text)) == []


def test_bad_files_are_refused():
    good = to_msccl(to_program(forest(named_topology("ring:4"), "all-reduce")))
    first = re.search(r'<step s="0" type="s"[^>]*>', good)
    assert first
    swapped = good.replace('type="s"', 'type="cpy"', 1)
    for text, complaint in (
        ("no xml", "not MSCCL XML"),
        (good.replace('coll="allreduce"', 'coll="alltoall"'), "not MSCCL XML"),
        (swapped, "a step of type 'cpy'"),
        (good.replace('cnt="1"', 'cnt="2"', 1), "several chunks"),
        (good.replace(first[0], "", 1), "waits for ever|expects"),
    ):
        with pytest.raises(ValueError, match=complaint):
            from_msccl(text)
    # A sum that is replaced instead of added to is read, and found wrong.
    wrong = from_msccl(good.replace('type="rrc"', 'type="r"', 1))
    assert program_faults(wrong)
    with pytest.raises(ValueError, match="has no 'broadcast'"):
        to_msccl(to_program(forest(named_topology("ring:4"), "broadcast")))
