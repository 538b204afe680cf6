"""Clusters by name, such as "h100:64" or "v5e:4x4", and TPU topologies that libtpu compiles for."""

import dataclasses
import difflib
import functools
import math
import os
import re
from typing import Any

import jax

from toolkit._checks import checked
from toolkit.measure import Link, Peak, published_peak
from toolkit.measure.chips import PEAKS
from toolkit.measure.here import measured_peak
from toolkit.planning.division import MOST_CHIPS
from toolkit.planning.networks import Collectives, axis_rate, tree_steps
from toolkit.schedules.collectives import Topology
from toolkit.schedules.collectives.fabrics.machines import slice_shape


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A number of chips of one kind.

    Attributes:
        name: as given to `cluster`.
        chip: its published figures.
        chips: number of chips.
        is_measured: whether its figures were measured here instead of published.
        slices: of a TPU pod, joined by the data centre's network; each has as many of the chips.
        topology: its links, if the rates of groups are to follow from them.
        collectives: what runs on these links: "ring"; "tree" for all-reduces, with rings for the
            rest; or the "optimum" of trees.

    Example:
        >>> cluster("h100:64").chips, cluster("v5e:4x4").chip.name
        (64, 'TPU v5e')
    """

    name: str
    chip: Peak
    chips: int
    is_measured: bool = False
    slices: int = 1
    topology: Topology | None = None
    collectives: Collectives = "optimum"

    def link(self, inner: int, degree: int, kind: str = "") -> Link:
        """The link over which a group of `degree` chips, `inner` chips apart, communicates.

        A group that extends beyond one domain uses the next link, which its chips in one domain
        share, but for all-to-alls: each sends what leaves the domain itself. Of a network that runs
        trees, an "all-reduce" uses others than the rest.
        """
        is_tree = kind == "all-reduce" and self.collectives == "tree"
        key = inner, degree, is_tree, kind.endswith("all-to-all")
        if key not in self._links:  # a search asks a hundred thousand times
            self._links[key] = self._link(*key)
        return self._links[key]

    def domains(self, degree: int) -> tuple[int, int]:
        """Over how many hosts a group of the innermost `degree` chips extends, and the chips of
        each; of a group within one host, its chips one by one."""
        near = self.chip.links[0].chips
        return (degree // near, near) if degree > near else (degree, 1)

    @functools.cached_property
    def _links(self) -> dict[tuple[int, int, bool, bool], Link]:
        return {}

    def _link(self, inner: int, degree: int, is_tree: bool, is_exchange: bool) -> Link:
        if self.topology is not None:
            runs = "ring" if self.collectives == "tree" and not is_tree else self.collectives
            rate, delay = axis_rate(self.topology, inner, degree, runs), self.topology.seconds
            if is_tree:  # a step counts a delay per other chip, which is a ring's
                delay *= tree_steps(self.topology, inner, degree) / (degree - 1)
            name = f"{runs} on {self.topology.name}"
            return Link(name, rate, degree, delay, "modelled from its links")
        for position, link in enumerate(self.chip.links):
            if inner * degree <= link.chips or position == len(self.chip.links) - 1:
                break
        if link.is_mesh and degree < link.chips:
            wires = (degree - 1) / (link.chips - 1)
            link = dataclasses.replace(link, bytes_per_second=link.bytes_per_second * wires)
        if position:
            near = self.chip.links[position - 1]
            together = max(1, min(degree, near.chips // inner))
            rate = min(near.bytes_per_second, link.bytes_per_second * together)
            if is_exchange:  # what leaves the domain goes through a chip's own card
                rate = link.bytes_per_second * (degree - 1) / (degree - together)
                rate = min(near.bytes_per_second, rate)
            link = dataclasses.replace(link, bytes_per_second=rate)
        return link

    def devices(self) -> list[Any]:
        """The devices of a TPU topology for `train_program`; needs the package libtpu."""
        slices, _, name = self.name.rpartition("*")
        return _devices(name, int(slices or 1))


@checked
def cluster(
    chips: str | Cluster, topology: Topology | None = None, collectives: Collectives = "optimum"
) -> Cluster:
    """A cluster by name: kind, colon, count or shape.

    Args:
        chips: such as "h100:64", "h100:8x8" (boxes x GPUs) or, for TPUs, also the shape of a slice
            that is offered, such as "v5e:4x4", or several slices, as "2*v5e:4x4"; a `Cluster` is
            returned as it is.
        topology: its links, from `toolkit.schedules.collectives.named_topology`. The rates of
            groups then follow from links and ranks; otherwise every group has the rate of the
            chip's nearest kind of link that is large enough, whatever the shape. A TPU's shape is
            no topology by itself, as compilers do not lay axes on ranks in order. On the 25
            modelled steps of single slices of v5e, v5p and v6e in `data/planning/published.jsonl`,
            rates by shape (the most compact of each size) leave the median error at 2.5 %: on v5e
            it falls from 7.2 to 2.8 %, on v5p from 4.2 to 3.0 %, on v6e it grows from 1.5 to 2.2 %.
        collectives: what runs on the topology: "ring", in the order of ranks; "tree" for
            all-reduces; or the "optimum".

    Returns:
        A `Cluster`, with the figures of `toolkit.measure.published_peak`.

    Example:
        >>> cluster("v5p:4x4x4").chips, cluster("2*v5p:4x4x4").chips
        (64, 128)
    """
    if topology is not None:
        plain = cluster(chips)
        if plain.chips != topology.compute:
            raise ValueError(
                f"topology {topology.name!r} has {topology.compute} ranks; chips {plain.name!r} "
                f"are {plain.chips}"
            )
        return dataclasses.replace(plain, topology=topology, collectives=collectives)
    if isinstance(chips, Cluster):
        return chips
    if "+" in chips:
        raise ValueError(
            f"chips {chips!r} are of several kinds, and a step waits for the slowest; plan for one"
        )
    if chips.strip().lower() == "here":
        return Cluster("here", measured_peak(), len(jax.devices()), is_measured=True)
    several, star, plain = chips.strip().lower().rpartition("*")
    kind, _, shape = plain.partition(":")
    peak = published_peak(f"tpu {kind}" if re.fullmatch(r"v\d\w?", kind) else kind)
    if peak is None or not peak.links:
        names = [peak.name.lower().replace(" ", "-") for peak in PEAKS.values()]
        like = difflib.get_close_matches(kind.replace(" ", "-"), dict.fromkeys(names))
        raise ValueError(
            f"chips {chips!r}: kind {kind!r} is not known; write for instance "
            f"{', '.join(like or ('h100', 'a10g', 'v5e'))}, a colon and a count or shape; or here"
        )
    if not re.fullmatch(r"\d{1,7}(x\d{1,4}){0,2}", shape):
        raise ValueError(f"chips {chips!r}: want a count or a shape after the colon, as {kind}:8")
    is_tpu = peak.name.startswith("TPU")
    if star and not (is_tpu and re.fullmatch(r"[1-9]\d{0,5}", several)):
        raise ValueError(f"chips {chips!r}: want slices of a TPU before the star, as 2*v5e:4x4")
    slices = int(several or 1)
    count = slices * math.prod(map(int, shape.split("x")))
    if not 1 <= count <= MOST_CHIPS:
        raise ValueError(f"chips {chips!r}: want 1 to {MOST_CHIPS:,} chips; got {count:,}")
    sizes = tuple(map(int, shape.split("x")))
    if len(sizes) > 1 and is_tpu:
        slice_shape(kind.removeprefix("tpu "), sizes)
    elif len(sizes) > 1 and (len(sizes) > 2 or sizes[1] != peak.links[-2:][0].chips):
        most = peak.links[-2:][0].chips
        raise ValueError(
            f"chips {chips!r}: want boxes of {most}, as {kind}:{sizes[0]}x{most}, or a number of "
            "chips; other boxes are a `topology`"
        )
    if slices > 1:
        within, beyond = peak.links
        links = dataclasses.replace(within, chips=count // slices), beyond
        peak = dataclasses.replace(peak, links=links)
    return Cluster(chips, peak, count, slices=slices)


@functools.lru_cache(maxsize=8)
def _devices(name: str, slices: int) -> list[Any]:
    try:
        import libtpu
    except ImportError:
        raise RuntimeError(
            "compiling for TPUs needs the package libtpu: pip install libtpu"
        ) from None
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # Compilation needs no chip, so that several processes may compile at once.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    os.environ.setdefault("TPU_LIBRARY_PATH", libtpu.get_library_path())
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=slices)
    except Exception as error:  # whatever a version of libtpu raises
        reason = str(error).splitlines()[0][:200]
        raise ValueError(f"chips {name!r}: libtpu has no such slice ({reason})") from None
    return list(found.devices)
