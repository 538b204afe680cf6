"""What makers claim for their accelerators and for the links between them (kind: recorded)."""

import re
from dataclasses import dataclass

from toolkit._checks import checked


@dataclass(frozen=True)
class Link:
    """A kind of connection between chips.

    Attributes:
        name: such as "NVLink 4" or "ICI, 2-D torus".
        bytes_per_second: that one chip sends to others of a group, in a ring or through a switch.
            For a torus, along one axis: both directions of it.
        chips: the largest group it connects.
        seconds: of delay per message.
        source: where the figures are published.

    Example:
        >>> published_peak("H100").links[0].name
        'NVLink 4'
    """

    name: str
    bytes_per_second: float
    chips: int
    seconds: float
    source: str


@dataclass(frozen=True)
class Peak:
    """Published peak of an accelerator (kind: recorded).

    Attributes:
        name: the product.
        flops_per_second: dense bfloat16 matrix products (float16 on a T4, which has no bfloat16).
        bytes_per_second: of the device's main memory.
        memory_bytes: its size.
        source: where the figures are published.
        links: how it reaches others, the nearest first.

    Example:
        >>> peak = published_peak("NVIDIA H100 80GB HBM3")
        >>> peak.flops_per_second / peak.bytes_per_second  # FLOPs per byte
        295.2...
    """

    name: str
    flops_per_second: float
    bytes_per_second: float
    memory_bytes: float
    source: str
    links: tuple[Link, ...] = ()


_BOOK = "Austin et al., How to Scale Your Model, 2025, table of TPU specs"
_GPU_BOOK = "Austin et al., How to Scale Your Model, 2025, chapter on GPUs"
_CLOUD = "Google Cloud documentation, TPU7x (Ironwood), 2026"
_NVLINK = "NVIDIA NVLink and NVSwitch, generations 3 to 5, per direction"
_AWS = "Amazon EC2 accelerated instances: 100 Gbit/s per 8 GPUs"
_ANY = 1 << 20  # a data centre's network connects all there are


def _ici(axis: str, bytes_per_second: float, chips: int, source: str = _BOOK) -> Link:
    return Link(f"ICI, {axis} torus", bytes_per_second, chips, 1e-6, source)


def _dcn(chips_per_host: int) -> Link:
    return Link("DCN", 2.5e10 / chips_per_host, _ANY, 1e-5, f"{_BOOK}: 25 GB/s per host")


def _nvlink(generation: int, bytes_per_second: float, chips: int = 8) -> Link:
    return Link(f"NVLink {generation}", bytes_per_second, chips, 2e-6, _NVLINK)


def _infiniband(name: str, bytes_per_second: float) -> Link:
    source = f"{_GPU_BOOK}: one card per GPU"
    return Link(f"InfiniBand {name}", bytes_per_second, _ANY, 5e-6, source)


def _pcie(generation: int, bytes_per_second: float) -> tuple[Link, ...]:
    source = f"PCI Express {generation}.0, 16 lanes, per direction"
    return (
        Link(f"PCIe {generation}", bytes_per_second, 8, 5e-6, source),
        Link("Ethernet", 12.5e9 / 8, _ANY, 3e-5, _AWS),
    )


_V5E = Peak("TPU v5e", 1.97e14, 8.1e11, 16e9, _BOOK, (_ici("2-D", 9e10, 256), _dcn(8)))
_V5P = Peak("TPU v5p", 4.59e14, 2.8e12, 96e9, _BOOK, (_ici("3-D", 1.8e11, 8960), _dcn(4)))
_V6E = Peak("TPU v6e", 9.20e14, 1.6e12, 32e9, _BOOK, (_ici("2-D", 1.8e11, 256), _dcn(8)))
_V7X = Peak(
    "TPU v7x",
    2.307e15,
    7.37e12,
    192 * 2**30,
    _CLOUD,
    (_ici("3-D", 2e11, 9216, _CLOUD), _dcn(4)),
)
# Keys are what jax calls the device (`device_kind`), in lower case; the longest match wins.
PEAKS: dict[str, Peak] = {
    "t4": Peak("T4", 6.5e13, 3.2e11, 16e9, "NVIDIA T4 datasheet, 2019", _pcie(3, 15.75e9)),
    "l4": Peak("L4", 1.21e14, 3.0e11, 24e9, "NVIDIA L4 datasheet, 2023", _pcie(4, 31.5e9)),
    "a10g": Peak("A10G", 7.0e13, 6.0e11, 24e9, "NVIDIA A10G datasheet, 2021", _pcie(4, 31.5e9)),
    "a100": Peak(
        "A100 80GB SXM",
        3.12e14,
        2.039e12,
        80e9,
        "NVIDIA A100 datasheet, 2021",
        (_nvlink(3, 3e11), _infiniband("HDR", 2.5e10)),
    ),
    "h100": Peak(
        "H100 SXM",
        9.89e14,
        3.35e12,
        80e9,
        "NVIDIA H100 datasheet, 2023, dense",
        (_nvlink(4, 4.5e11), _infiniband("NDR", 5e10)),
    ),
    "h800": Peak(
        "H800 SXM",
        9.89e14,
        3.35e12,
        80e9,
        "as commonly published for H800: an H100 with 400 GB/s NVLink",
        (_nvlink(4, 2e11), _infiniband("NDR", 5e10)),
    ),
    "h200": Peak(
        "H200 SXM",
        9.89e14,
        4.8e12,
        141e9,
        "NVIDIA H200 datasheet, 2024, dense",
        (_nvlink(4, 4.5e11), _infiniband("NDR", 5e10)),
    ),
    "b200": Peak(
        "B200", 2.3e15, 8.0e12, 192e9, _GPU_BOOK, (_nvlink(5, 9e11), _infiniband("NDR", 5e10))
    ),
    "tpu v4": Peak("TPU v4", 2.75e14, 1.2e12, 32e9, _BOOK, (_ici("3-D", 9e10, 4096), _dcn(4))),
    "tpu v5 lite": _V5E,
    "tpu v5e": _V5E,
    "tpu v5": _V5P,
    "tpu v5p": _V5P,
    "tpu v6 lite": _V6E,
    "tpu v6e": _V6E,
    "tpu7x": _V7X,
    "tpu v7x": _V7X,
}


@checked
def published_peak(device_kind: str) -> Peak | None:
    """Looks a device up in the table of published peaks (kind: recorded).

    Args:
        device_kind: what jax calls it, such as "NVIDIA H100 80GB HBM3" or "TPU v5 lite".

    Returns:
        The `Peak`, or None for a device that is not in the table.

    Source:
        The `source` field of each row.

    Example:
        >>> published_peak("TPU v5 lite").name
        'TPU v5e'
        >>> published_peak("a toaster") is None
        True
    """
    words = device_kind.lower()  # whole ones: an L40 is no L4, a GB200 no B200
    matches = [key for key in PEAKS if re.search(rf"\b{key}\b", words)]
    return PEAKS[max(matches, key=len)] if matches else None
