"""Recorded times: read whole, divided only where they may be, told where they come from."""

import dataclasses
import itertools

import pytest

pytest.importorskip("ipywidgets")

from toolkit.bench.mixers.recorded import FORWARD, GRADIENT, STEP, read_time, recorded_times
from toolkit.lab import SpeedupPanel
from toolkit.measure import published_peak, read_records, record
from toolkit.measure.stored import stored_folder

EVERYTHING = {"method": "every", "work": "every"}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "gdn forward B=2 T=2048 H=8 D=64 float32 | 2 cores | toolkit, chunked",
            ("gdn", FORWARD, 2, 2048, 8, 64),
        ),
        (
            "softmax forward+backward causal B=1 T=4096 H=8 D=64 float32 | 1 cores | jax.nn",
            ("full", GRADIENT, 1, 4096, 8, 64),
        ),
        ("kda step B=64 H=16 D=128 float32 | 2 cores | toolkit", ("kda", STEP, 64, None, 16, 128)),
        (
            "gated_delta_net_step B=1 H=8 D=64 float32 | 2 cores | after 8192 tokens",
            ("gdn", STEP, 1, 8192, 8, 64),
        ),
        (
            "rwkv7 linear forward+backward B=1 H=2 D=64 float32 | 2 cores | T=65536",
            ("rwkv7", GRADIENT, 1, 65536, 2, 64),
        ),
        (
            "decode tiny B=8 context=8192 float32 | 2 cores | hybrid",
            ("suite", "other", 8, 8192, None, None),
        ),
    ],
)
def test_names_of_records_are_read(name, wanted):
    time = read_time(record(name, 0.1, "s"), "suite")
    assert (time.method, time.work, time.batch, time.tokens, time.heads, time.size) == wanted
    assert read_time(record(name, 3, "byte", kind="modelled"), "suite") is None


def test_every_recorded_time_is_there_with_where_it_comes_from():
    files = stored_folder("measurements").glob("*/*.json")
    records = [r for path in files for r in read_records(path) if r.unit == "s"]
    view = SpeedupPanel(**EVERYTHING).view
    assert len(view.times) == len(recorded_times()) == len(records) > 200
    data = view.data()
    for name in ("device", "versions", "date", "command", "commit", "check", "kind"):
        assert all(data[name]), name
    assert set(data["kind"]) == {"recorded"}


def test_no_ratio_without_a_passed_check():
    rival = "gdn forward B=1 T=128 H=2 D=16 float32 | 2 cores | {}"
    for checks in itertools.product(("passed", "absent"), repeat=2):
        times = tuple(
            read_time(record(rival.format(name), seconds, "s", check=check), "mixers")
            for name, seconds, check in zip(("toolkit", "torch"), (1.0, 3.0), checks, strict=True)
        )
        panel = SpeedupPanel(**EVERYTHING)
        panel.times = times
        panel.point = 2
        wanted = 3.0 if checks == ("passed", "passed") else None
        assert panel.view.ratio(times[1]) == wanted
        assert ("3×" in panel.view.sentence()) == (wanted is not None)
    elsewhere = dataclasses.replace(
        times[1], record=dataclasses.replace(times[1].record, check="passed", device="another")
    )
    assert not elsewhere.is_rival(times[0])


def test_chips_are_modelled_by_the_mixers_own_formulas():
    panel = SpeedupPanel(method="gdn", work=GRADIENT, tokens=2048)
    rows = {row.name: row for row in panel.view.rows()}
    assert {"H100 SXM", "TPU v5e", "TPU v6e", "TPU v7x"} <= {
        name for name, row in rows.items() if row.group == "modelled"
    }
    assert sum(row.group == "modelled" for row in rows.values()) == 8
    # The higher of two peaks bounds the time lower.
    assert rows["B200"].seconds < rows["H200 SXM"].seconds < rows["A100 80GB SXM"].seconds
    assert rows["toolkit, chunked"].seconds > 1000 * rows["H100 SXM"].seconds
    step = SpeedupPanel(method="kda", work=STEP, batch=64).view.time
    peak = published_peak("h100")
    # One token waits for its state of float32, read and written.
    assert step.modelled_seconds(peak) >= 2 * 64 * 16 * 128 * 128 * 4 / peak.bytes_per_second
    every = SpeedupPanel(method="every", work=STEP, batch=64, chip="tpu v6e").view
    least = [time.modelled_seconds(every.chip) for time in every.times if time.is_ours]
    assert len(least) > 10
    assert max(least) < 1.02 * min(least)  # on one vertical line


def test_filters_that_let_nothing_through_say_so():
    panel = SpeedupPanel(method="sliders", work=STEP)
    assert panel.view.time is None
    assert "No recorded time" in panel.view.sentence()
    assert panel.view.table().rows == []
    panel.measure()
    assert "a button cannot do this work" in panel.page.job.message
    startup = SpeedupPanel(method="startup", work="every").view
    assert startup.time.modelled_seconds(startup.chip) is None


def test_a_time_taken_here_is_checked_labelled_and_divides_nothing():
    panel = SpeedupPanel(**EVERYTHING)
    name = "gdn {} B=1 T=48 H=1 D=8 float32 | 2 cores | toolkit"
    panel.times = tuple(
        read_time(record(name.format(work), 1.0, "s", check="passed"), "mixers")
        for work in (FORWARD, GRADIENT)
    )
    panel.refresh()
    panel.measure()
    panel.point = 3
    here = panel.view.time
    assert (here.kind, here.record.check) == ("measured here", "passed")
    assert "measured here" in panel.view.footnote()
    assert panel.view.ratio(here) is None
    panel.point = 1
    assert [row.group for row in panel.view.rows()][:2] == ["this package", "measured here"]
