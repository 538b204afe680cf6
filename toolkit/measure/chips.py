"""Published figures of accelerators and of the links between them (kind: recorded)."""

import re
from dataclasses import dataclass, replace

from toolkit._checks import checked


@dataclass(frozen=True)
class Link:
    """A kind of connection between chips.

    Attributes:
        name: such as "NVLink 4" or "ICI, 2-D torus".
        bytes_per_second: sending rate of one chip in a group, in a ring or through a switch; for a
            torus, along one axis in both directions.
        chips: the largest group it connects.
        seconds: delay per message.
        source: where the figures are published.
        is_mesh: whether every pair has a separate wire; the rate is then that of all wires of a
            chip, of which a smaller group reaches its share.

    Example:
        >>> published_peak("H100").links[0].name
        'NVLink 4'
    """

    name: str
    bytes_per_second: float
    chips: int
    seconds: float
    source: str
    is_mesh: bool = False


@dataclass(frozen=True)
class Peak:
    """Published peak of an accelerator (kind: recorded).

    A jax device is one chip, except for TPU7x, where a chip is two devices.

    Attributes:
        name: the product.
        flops_per_second: dense bfloat16 matrix products (float16 on a T4, which has no bfloat16).
        bytes_per_second: of the device's main memory.
        memory_bytes: its size.
        source: where the figures are published.
        links: links to other chips, the nearest first.

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
_CLOUD = "Google Cloud documentation, TPU7x (Ironwood), table of specifications, 2026"
_NVLINK = "NVIDIA NVLink and NVSwitch, generations 3 to 5, per direction"
_AWS = "Amazon EC2 accelerated instances: 100 Gbit/s per 8 GPUs"
_ANY = 1 << 20  # a data centre's network connects any number


def _ici(axis: str, bytes_per_second: float, chips: int, source: str = _BOOK) -> Link:
    return Link(f"ICI, {axis} torus", bytes_per_second, chips, 1e-6, source)


def _dcn(bytes_per_second: float, source: str) -> Link:
    return Link("DCN", bytes_per_second, _ANY, 1e-5, source)


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


def _bridge(bytes_per_second: float, chips: int, source: str) -> tuple[Link, ...]:
    """A bridge between few cards, and PCIe among more."""
    bridge = Link("NVLink bridge", bytes_per_second, chips, 2e-6, source)
    return (bridge, *_pcie(5, 63e9))


_PER_HOST = f"{_BOOK}: 25 GB/s per host"
_NDR = _infiniband("NDR", 5e10)
_HOPPER = (_nvlink(4, 4.5e11), _NDR)
_A100 = "NVIDIA A100 datasheet, 2021"
_H100 = "NVIDIA H100 datasheet, 2024, dense"
_B200 = "NVIDIA DGX B200 datasheet, 2024, dense; memory: " + _GPU_BOOK
_GB200 = "NVIDIA GB200 NVL72 datasheet, 2024, dense, a seventy-second of the rack"
_B300 = "NVIDIA HGX B300 specifications, 2025, dense"
_GB300 = "NVIDIA GB300 NVL72 datasheet, 2025, dense, a seventy-second of the rack"
_MI300X = "AMD Instinct MI300X and MI300X platform data sheets, 2023, dense"
_CONNECTX_8 = Link("InfiniBand XDR", 1e11, _ANY, 5e-6, "NVIDIA ConnectX-8, one per GPU")
_FABRIC = Link(
    "Infinity Fabric", 4.48e11, 8, 2e-6, f"{_MI300X}: seven links of 64 GB/s", is_mesh=True
)
_SOLD_AS = "as commonly published for"

_V7X = Peak(
    "TPU v7x", 2.307e15, 7.38e12, 192 * 2**30, _CLOUD,
    (_ici("3-D", 2e11, 9216, _CLOUD), _dcn(1.25e10, f"{_CLOUD}: 100 Gbit/s per chip")),
)  # fmt: skip
# jax shows each of the two chiplets as a device, "TPU7x".
_TPU7X = Peak(
    "TPU7x device, half a TPU v7x", 2.307e15 / 2, 7.38e12 / 2, 96 * 2**30, _CLOUD,
    tuple(replace(link, bytes_per_second=link.bytes_per_second / 2) for link in _V7X.links),
)  # fmt: skip

# Each product, with its names in jax (`device_kind`) and elsewhere. Only whole names match: a slice
# (MIG), or another size of memory, is another device.
_ROWS: tuple[tuple[Peak, str], ...] = (
    (Peak("T4", 6.5e13, 3.2e11, 16e9, "NVIDIA T4 datasheet, 2019", _pcie(3, 15.75e9)), "t4"),
    (Peak("L4", 1.21e14, 3.0e11, 24e9, "NVIDIA L4 datasheet, 2023", _pcie(4, 31.5e9)), "l4"),
    (
        Peak("L40S", 3.62e14, 8.64e11, 48e9, "NVIDIA L40S datasheet, 2023, dense",
             _pcie(4, 31.5e9)),
        "l40s",
    ),
    (Peak("A10G", 7.0e13, 6.0e11, 24e9, "NVIDIA A10G datasheet, 2021", _pcie(4, 31.5e9)), "a10g"),
    (
        Peak("A100 80GB SXM", 3.12e14, 2.039e12, 80e9, _A100,
             (_nvlink(3, 3e11), _infiniband("HDR", 2.5e10))),
        "a100, a100 80gb, a100 sxm4 80gb, a100 sxm 80gb",
    ),
    (
        Peak("A100 40GB SXM", 3.12e14, 1.555e12, 40e9, "NVIDIA A100 datasheet, 2020",
             (_nvlink(3, 3e11), _infiniband("HDR", 2.5e10))),
        "a100 40gb, a100 sxm4 40gb, a100 sxm 40gb",
    ),
    (
        Peak("A100 80GB PCIe", 3.12e14, 1.935e12, 80e9, f"{_A100}; without a bridge",
             _pcie(4, 31.5e9)),
        "a100 pcie 80gb",
    ),
    (
        Peak("A100 40GB PCIe", 3.12e14, 1.555e12, 40e9,
             "NVIDIA A100 datasheet, 2020; without a bridge", _pcie(4, 31.5e9)),
        "a100 pcie 40gb",
    ),
    (
        Peak("H100 SXM", 9.89e14, 3.35e12, 80e9, _H100, _HOPPER),
        "h100, h100 80gb, h100 80gb hbm3, h100 sxm5",
    ),
    (
        Peak("H100 PCIe", 7.56e14, 2.0e12, 80e9,
             "NVIDIA H100 datasheet, 2023, dense; without a bridge", _pcie(5, 63e9)),
        "h100 pcie 80gb",
    ),
    (Peak("H100 NVL", 8.35e14, 3.9e12, 94e9, _H100, _bridge(3e11, 2, _H100)), "h100 nvl 94gb"),
    (
        Peak("H800 SXM", 9.89e14, 3.35e12, 80e9,
             f"{_SOLD_AS} H800: an H100 with 400 GB/s NVLink", (_nvlink(4, 2e11), _NDR)),
        "h800",
    ),
    (
        Peak("H20", 1.48e14, 4.0e12, 96e9,
             f"{_SOLD_AS} H20: 148 TFLOP/s, 96 GB at 4 TB/s, 900 GB/s NVLink", _HOPPER),
        "h20 96gb",
    ),
    (
        Peak("H200 SXM", 9.89e14, 4.8e12, 141e9, "NVIDIA H200 datasheet, 2024, dense", _HOPPER),
        "h200",
    ),
    (
        Peak("H200 NVL", 8.35e14, 4.8e12, 141e9, "NVIDIA H200 datasheet, 2024, dense",
             _bridge(4.5e11, 4, "NVIDIA H200 datasheet, 2024, bridges of four")),
        "",
    ),
    (Peak("B200", 2.25e15, 8.0e12, 192e9, _B200, (_nvlink(5, 9e11), _NDR)), ""),
    (Peak("GB200", 2.5e15, 8.0e12, 186e9, _GB200, (_nvlink(5, 9e11, 72), _NDR)), "gb200 nvl72"),
    (
        Peak("B300", 2.25e15, 8.0e12, 288e9, _B300, (_nvlink(5, 9e11), _CONNECTX_8)),
        "b300 sxm6 ac",
    ),
    (
        Peak("GB300", 2.5e15, 8.0e12, 288e9, _GB300, (_nvlink(5, 9e11, 72), _CONNECTX_8)),
        "gb300 nvl72",
    ),
    (Peak("MI300X", 1.3074e15, 5.3e12, 192e9, _MI300X, (_FABRIC, _NDR)), "mi300x oam"),
    (
        Peak("TPU v4", 2.75e14, 1.2e12, 32e9, _BOOK,
             (_ici("3-D", 9e10, 4096), _dcn(2.5e10 / 4, _PER_HOST))),
        "",
    ),
    (
        Peak("TPU v5e", 1.97e14, 8.1e11, 16e9, _BOOK,
             (_ici("2-D", 9e10, 256), _dcn(2.5e10 / 8, _PER_HOST))),
        "tpu v5 lite",
    ),
    (
        Peak("TPU v5p", 4.59e14, 2.8e12, 96e9, _BOOK,
             (_ici("3-D", 1.8e11, 8960), _dcn(2.5e10 / 4, _PER_HOST))),
        "tpu v5",
    ),
    (
        Peak("TPU v6e", 9.20e14, 1.6e12, 32e9, _BOOK,
             (_ici("2-D", 1.8e11, 256), _dcn(1.25e10, f"{_CLOUD}: 100 Gbit/s per chip"))),
        "tpu v6 lite",
    ),
    (_V7X, ""),
    (_TPU7X, "tpu7x"),
)  # fmt: skip
_MAKER = re.compile(r"^(nvidia|tesla|amd instinct|amd)\b ?")


def _plain(name: str) -> str:
    """A device's name in lower case, without its maker, with sorted words."""
    words = re.sub(r"[\s_-]+", " ", name.strip().lower())
    while (shorter := _MAKER.sub("", words)) != words:
        words = shorter
    return " ".join(sorted(words.split()))


PEAKS: dict[str, Peak] = {
    _plain(name): peak
    for peak, names in _ROWS
    for name in (peak.name, *filter(None, names.split(", ")))
}


@checked
def published_peak(device_kind: str) -> Peak | None:
    """Look a device up in the table of published peaks (kind: recorded).

    Args:
        device_kind: what jax calls it, such as "NVIDIA H100 80GB HBM3" or "TPU v5 lite"; or its
            product's name, such as "A100 40GB SXM". An "a100" is that of 80 GB, and other names of
            a product without its form are its SXM module.

    Returns:
        The `Peak`, or None for a device that is not in the table: a slice of one (MIG), or one
        whose memory is of another size, is another device.

    Source: The `source` field of each row.

    Example:
        >>> published_peak("TPU v5 lite").name
        'TPU v5e'
        >>> published_peak("NVIDIA A100-SXM4-40GB").memory_bytes
        40000000000.0
        >>> published_peak("NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None
        True
    """
    return PEAKS.get(_plain(device_kind))
