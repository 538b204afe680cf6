"""Networks of real machines: DGX boxes, MI250, TPU slices, racks; and any network by its name."""

import difflib
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path

from toolkit._checks import checked
from toolkit.measure import Link, Peak, published_peak
from toolkit.schedules.collectives.fabrics import shapes
from toolkit.schedules.collectives.fabrics.topology import (
    Cable,
    Topology,
    check_links,
    from_cables,
    rate_of,
    read_topology,
)

# Multiplicities of the links between the GPUs of a DGX-1 and the dies of an MI250 box, as in the
# topologies of ForestColl's public code.
_DGX1 = (
    "0-1:2 0-2:1 0-3:1 0-4:2 1-2:1 1-3:2 1-5:1 2-3:2 2-6:2 3-7:1 4-5:2 "
    "4-6:1 4-7:1 5-6:1 5-7:2 6-7:2"
)
_MI250 = (
    "0-1:4 0-4:2 0-8:1 1-5:1 1-9:1 1-10:1 2-3:4 2-6:1 2-9:1 2-10:1 3-7:2 3-11:1 4-5:4 4-6:1 5-6:1 "
    "5-7:1 6-7:4 8-9:4 8-12:2 9-13:1 10-11:4 10-14:1 11-15:2 12-13:4 12-14:1 "
    "13-14:1 13-15:1 14-15:4"
)
_RAILS = {"A100": 2}  # the others' cards meet at one switch
# Axes of these lengths are closed: the blocks of 4x4x4 that optical switches join, and a whole pod.
_CLOSED = {3: 4, 2: 16}
# The slices that are offered, less those of 3-D pods that consist of whole blocks.
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_PARTS = ((1, 1, 1), (1, 2, 2), (2, 2, 2), (2, 2, 4), (2, 4, 4))


def _multiplicities(rows: str) -> list[tuple[int, int, int]]:
    return [tuple(map(int, re.split("[-:]", row))) for row in rows.split()]  # type: ignore[misc]


@checked
def dgx1(rate: int | float | str = 25) -> Topology:
    """A DGX-1 with V100: eight GPUs in a hybrid cube mesh.

    Args:
        rate: GB/s per NVLink and direction.

    Example:
        >>> dgx1().ingress[0]
        Fraction(150, 1)
    """
    cables = [(a, b, count * rate_of(rate)) for a, b, count in _multiplicities(_DGX1)]
    return from_cables("DGX-1", 8, cables)


@checked
def mi250(boxes: int = 1, dies: int = 16, rate: int = 50, network_rate: int = 16) -> Topology:
    """Boxes of eight MI250, that is, of sixteen dies.

    Args:
        boxes: number of boxes, joined by one InfiniBand switch.
        dies: only the first so many of each box; the links to the others are left out.
        rate: GB/s per Infinity Fabric link and direction.
        network_rate: GB/s per die to the InfiniBand switch.

    Example:
        >>> mi250(2).compute
        32
    """
    check_links(2 * boxes * max(dies, 32), boxes=boxes, dies=dies)
    inside = [row for row in _multiplicities(_MI250) if max(row[:2]) < dies]
    cables = [
        (box * dies + a, box * dies + b, count * rate)
        for box in range(boxes)
        for a, b, count in inside
    ]
    return _joined(f"MI250 {boxes}x{dies}", boxes, dies, cables, [], network_rate)


@checked
def gpu_boxes(
    boxes: int, gpus: int, rate: int | float | str, network_rate: int | float | str,
    rails: int = 1, seconds: float = 2e-6,
) -> Topology:  # fmt: skip
    """Boxes whose GPUs meet at one switch, such as NVSwitch, and whose cards meet at others.

    Args:
        boxes: number of boxes.
        gpus: GPUs per box, each with one network card.
        rate: GB/s between a GPU and the switch of its box.
        network_rate: GB/s per network card.
        rails: network switches; card i of every box is on switch i mod rails.
        seconds: delay per message.

    Example:
        >>> gpu_boxes(2, 8, rate=300, network_rate=25, rails=2).ingress[0]
        Fraction(325, 1)
    """
    count = boxes * gpus
    check_links(4 * count, boxes=boxes, gpus=gpus)
    cables: list[Cable] = [(node, count + node // gpus, rate) for node in range(count)]
    switches = [f"box{box}/switch" for box in range(boxes)]
    name = f"{boxes} boxes of {gpus} GPUs"
    return _joined(name, boxes, gpus, cables, switches, network_rate, rails, seconds, True)


def _joined(
    name, boxes, each, cables, switches, network_rate, rails=1, seconds=2e-6, is_alike=False
) -> Topology:
    """Boxes of nodes that network switches join, with the symmetries that permute boxes."""
    count, before = boxes * each, boxes * each + len(switches)
    if min(boxes, each, rails) < 1 or each % rails:
        raise ValueError(f"want boxes and GPUs from 1 and rails that divide {each}; got {name}")
    rails = rails if boxes > 1 else 0
    if rails:
        cables = [
            *cables,
            *((node, before + node % each % rails, network_rate) for node in range(count)),
        ]
    names = [f"box{node // each}/{node % each}" for node in range(count)]
    switches = [*switches, *(f"network{rail}" for rail in range(rails))]
    nexts = [(node + each) % count for node in range(count)]
    nexts += [count + (box + 1) % boxes for box in range(before - count)]
    symmetries = [[*nexts, *range(before, before + rails)]]
    if is_alike:
        turned = [node - node % each + (node + 1) % each for node in range(count)]
        turned += range(count, before)
        symmetries.append([*turned, *(before + (rail + 1) % rails for rail in range(rails))])
    return from_cables(name, names, cables, switches, symmetries, seconds)


@checked
def tpu_slice(kind: str, sizes: tuple[int, ...], slices: int = 1) -> Topology:
    """Slices of a TPU pod, with the rates of `toolkit.measure.published_peak`.

    An axis is closed to a ring where the pod closes it: in three dimensions if all sizes are
    multiples of 4, in two if its size is 16.

    Args:
        kind: "v4", "v5e", "v5p", "v6e" or "v7x".
        sizes: chips along each axis, of a slice that is offered; or the number of chips alone.
        slices: slices of this shape, joined by the data centre's network.

    Source: Google Cloud documentation, TPU architecture, on the shapes of slices; Austin et al.,
        How to Scale Your Model, 2025, chapter on TPUs.

    Example:
        >>> tpu_slice("v5e", (4, 4)).links[0, 1]
        Fraction(45, 1)
    """
    sizes = slice_shape(kind, sizes)
    within, beyond = published_peak(f"tpu {kind}").links  # type: ignore[union-attr]
    wraps = [size % _CLOSED[len(sizes)] == 0 for size in sizes]
    if len(sizes) == 3:
        wraps = [all(wraps)] * 3
    name = f"TPU {kind} {'x'.join(map(str, sizes))}"
    rate = _gigabytes(within) / 2  # the table counts both directions of an axis
    grid = shapes.grid(name, sizes, rate, wraps, seconds=within.seconds)
    if slices == 1:
        return grid
    each = grid.compute
    cables = [
        (part * each + a, part * each + b, rate)
        for part in range(slices)
        for (a, b), rate in grid.links.items()
        if a < b
    ]
    network = _gigabytes(beyond)
    return _joined(f"{slices} x {name}", slices, each, cables, [], network, seconds=beyond.seconds)


def slice_shape(kind: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of a slice that is offered: those given, in any order, or those of a number of chips.

    Where there is none, the ValueError names the nearest.
    """
    peak = published_peak(f"tpu {kind}")
    if peak is None:
        raise ValueError(f"kind {kind!r} is not a TPU of the table; write v4, v5e, v5p, v6e or v7x")
    within, wanted = peak.links[0], math.prod(sizes)
    most = 3 if "3-D" in within.name else 2
    if len(sizes) > most:
        raise ValueError(f"sizes: a {kind} slice has at most {most} axes; got {sizes}")
    if wanted > within.chips:
        raise ValueError(f"sizes: a {kind} pod has {within.chips:,} chips; got {sizes}")
    blocks = within.chips // 64
    cubes = [
        (4 * a, 4 * b, 4 * c)
        for a, b in itertools.combinations_with_replacement(range(1, blocks + 1), 2)
        for c in range(b, blocks // (a * b) + 1)
    ]
    offered = [*_PARTS, *cubes] if most == 3 else list(_FLAT)
    if len(sizes) > 1 and tuple(sorted(sizes)) in offered:
        return sizes
    of_size = [each for each in offered if math.prod(each) == wanted]
    if len(sizes) == 1 and of_size:
        return min(of_size, key=max)
    shape = (1,) * (most - len(sizes)) + tuple(sorted(sizes))

    def distance(each):
        chips = math.prod(each)
        pairs = zip(each, shape, strict=True) if len(sizes) > 1 else [(chips, wanted)]
        return sum(abs(math.log(a / max(1, b))) for a, b in pairs), -chips, max(each)

    nearest = "x".join(map(str, min(offered, key=distance)))
    asked = f"of {wanted} chips" if len(sizes) == 1 else "x".join(map(str, sizes))
    raise ValueError(f"sizes: there is no {kind} slice {asked}; the nearest is {kind}:{nearest}")


def _gigabytes(link: Link):
    return rate_of(link.bytes_per_second) / 10**9


def _of_chip(peak: Peak, boxes: int, gpus: int) -> Topology:
    """Boxes of a GPU of the table; wires between every pair where it has these."""
    near, far = peak.links[-2], peak.links[-1]
    if near.is_mesh:
        rate = _gigabytes(near) / (near.chips - 1)
        cables = [
            (box * gpus + a, box * gpus + b, rate)
            for box in range(boxes)
            for a in range(gpus)
            for b in range(a)
        ]
        found = _joined(
            "", boxes, gpus, cables, [], _gigabytes(far), seconds=near.seconds, is_alike=True
        )
    else:
        rails = _RAILS.get(peak.name.split()[0], 1)
        found = gpu_boxes(
            boxes, gpus, str(_gigabytes(near)), str(_gigabytes(far)),
            rails if gpus % rails == 0 else 1, near.seconds,
        )  # fmt: skip
    return Topology(
        f"{peak.name} {boxes}x{gpus}", found.labels, found.compute, found.links, found.symmetries,
        found.seconds,
    )  # fmt: skip


_SHAPES: dict[str, Callable[..., Topology]] = {
    "ring": shapes.ring,
    "path": shapes.mesh,
    "mesh": shapes.mesh,
    "torus": shapes.torus,
    "twisted-torus": lambda *sizes: shapes.torus(*sizes, twist=sizes[0]),
    "hypercube": shapes.hypercube,
    "complete": shapes.complete,
    "star": shapes.star,
    "leaf-spine": shapes.leaf_spine,
    "fat-tree": shapes.fat_tree,
    "mi250": mi250,
}


@checked
def named_topology(name: str) -> Topology:
    """A network by its name, or from a JSON file.

    Args:
        name: a shape, as in "ring:8", "mesh:2x3", "torus:4x4", "twisted-torus:4x8",
            "hypercube:3", "complete:8", "star:8", "leaf-spine:2x4x1" or "fat-tree:4", with links
            of 1 GB/s; "dgx1"; "mi250:2x16" (boxes x dies); a GPU of the chips table, as in
            "a100:2x8" (boxes x GPUs), "h100:16" or "gb200:72"; a TPU slice, as in "v5e:4x4", or
            several, as in "2*v5e:4x4"; or a path that ends in .json, as `read_topology` takes it.

    Returns:
        A `Topology`.

    Example:
        >>> named_topology("h100:2x8").compute
        16
    """
    if name.endswith(".json"):
        return read_topology(Path(name))
    plain = name.strip().lower().removeprefix("tpu ")
    kind, _, shape = plain.partition(":")
    if plain == "dgx1":
        return dgx1()
    if not re.fullmatch(r"\d{1,5}(x\d{1,5})*", shape):
        raise ValueError(f"topology {name!r}: want a kind, a colon and a shape, as ring:8; or dgx1")
    sizes = [int(size) for size in shape.split("x")]
    if kind in _SHAPES:
        try:
            return _SHAPES[kind](*sizes)
        except TypeError:
            raise ValueError(f"topology {name!r}: {kind} takes another number of sizes") from None
    slices, _, generation = kind.rpartition("*")
    if re.fullmatch(r"v\d\w?", generation) and re.fullmatch(r"\d{0,4}", slices):
        return tpu_slice(generation, tuple(sizes), int(slices or 1))
    peak = published_peak(kind)
    if peak is None or len(peak.links) < 2 or len(sizes) > 2:
        like = difflib.get_close_matches(kind, [*_SHAPES, "dgx1", "a100", "h100", "gb200", "v5e"])
        raise ValueError(
            f"topology {name!r} is not known; write for instance {', '.join(like or ('ring:8',))}, "
            "torus:4x4, dgx1, a100:2x8, h100:16, v5e:4x4 or FILE.json"
        )
    most, chips = peak.links[-2].chips, sizes[-1]
    boxes, gpus = (sizes[0], chips) if len(sizes) == 2 else (-(-chips // most), min(chips, most))
    if gpus > most or (len(sizes) == 1 and boxes * gpus != chips):
        raise ValueError(f"topology {name!r}: want whole boxes, which have at most {most} chips")
    return _of_chip(peak, boxes, gpus)
