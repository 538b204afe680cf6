"""The machine's description and its measured rates."""

import os
import sys

import psutil
import pytest

from toolkit.measure import (
    available_cores,
    available_memory,
    cpu_name,
    hardware,
    matmul_rate,
    memory_bandwidth,
    published_peak,
)


def test_description_of_this_machine():
    found = hardware()
    assert found.platform == "cpu"
    assert found.name == cpu_name() != ""
    assert found.device_count == 8
    assert 1 <= found.cores == available_cores() <= os.cpu_count()
    assert 0 < found.memory_bytes == available_memory() <= psutil.virtual_memory().total
    assert found.peak is None
    assert found.matmul_flops_per_second is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_cores_follow_the_affinity():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_limits_of_control_groups_are_respected(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1048576\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(sys.modules["toolkit.measure.hardware"], "_CGROUP", tmp_path)
    assert available_memory() == 1 << 20
    assert available_cores() <= 2
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert available_memory() == psutil.virtual_memory().total
    assert available_cores() == 1


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v5p", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
    ],
)
def test_published_peaks_are_found_and_cited(device_kind, name):
    peak = published_peak(device_kind)
    assert peak.name == name
    assert peak.source
    assert 50 < peak.flops_per_second / peak.bytes_per_second < 1000


def test_unknown_devices_have_no_published_peak():
    assert published_peak("cpu") is None


def test_rates_are_plausible():
    assert 1e8 < matmul_rate(128) < 1e15
    assert 1e8 < memory_bandwidth(1 << 20) < 1e14


def test_wrong_sizes_are_named():
    with pytest.raises(ValueError, match="size=0"):
        matmul_rate(0)
    with pytest.raises(ValueError, match="array_bytes=3"):
        memory_bandwidth(3)
