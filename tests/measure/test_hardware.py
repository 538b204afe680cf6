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
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB SXM"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", "MI300X"),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v5p", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("TPU7x", "TPU7x device, half a TPU v7x"),
        ("a100-40gb", "A100 40GB SXM"),
    ],
)
def test_published_peaks_are_found_and_cited(device_kind, name):
    peak = published_peak(device_kind)
    assert peak is not None
    assert peak.name == name
    assert published_peak(name) == peak
    assert peak.source
    assert all(link.source for link in peak.links)
    # An H20 computes little for the bandwidth it has.
    assert 30 < peak.flops_per_second / peak.bytes_per_second < 1000


@pytest.mark.parametrize(
    "device_kind",
    [
        "cpu", "", "NVIDIA", "NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA H100 64GB HBM2",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA A100-SXM-64GB", "NVIDIA H20-3e", "AMD Instinct MI300A", "NVIDIA H100 HBM3, old",
    ],
)  # fmt: skip
def test_unknown_devices_have_no_published_peak(device_kind):
    """Once whatever had A100 or H100 in its name had the figures of the 80 GB module."""
    assert published_peak(device_kind) is None


@pytest.mark.parametrize(
    ("device_kind", "memory", "bandwidth"),
    [("NVIDIA A100-SXM4-40GB", 40e9, 1.555e12), ("NVIDIA H100 PCIe", 80e9, 2.0e12),
     ("NVIDIA H100 NVL", 94e9, 3.9e12), ("NVIDIA H20", 96e9, 4.0e12)],
)  # fmt: skip
def test_memory_is_that_of_the_form(device_kind, memory, bandwidth):
    peak = published_peak(device_kind)
    assert peak is not None
    assert (peak.memory_bytes, peak.bytes_per_second) == (memory, bandwidth)


@pytest.mark.parametrize(
    ("name", "gigabits"),
    [("TPU v5e", 25), ("TPU v5p", 50), ("TPU v6e", 100), ("TPU v7x", 100), ("TPU7x", 50)],
)
def test_between_slices_a_chip_sends_what_the_makers_table_says(name, gigabits):
    """Once v6e sent a quarter of it and v7x half."""
    peak = published_peak(name)
    assert peak is not None
    (link,) = [link for link in peak.links if link.name == "DCN"]
    assert link.bytes_per_second == pytest.approx(gigabits * 1e9 / 8)


def test_rates_are_plausible():
    assert 1e8 < matmul_rate(128) < 1e15
    assert 1e8 < memory_bandwidth(1 << 20) < 1e14


def test_wrong_sizes_are_named():
    with pytest.raises(ValueError, match="size=0"):
        matmul_rate(0)
    with pytest.raises(ValueError, match="array_bytes=3"):
        memory_bandwidth(3)
