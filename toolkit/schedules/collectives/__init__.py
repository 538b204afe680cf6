"""Collectives as data: networks, the best throughput on them, and trees that reach it.

Networks (`topology.py`, `shapes.py`, `machines.py`):

* `Topology`: compute nodes, switches, and directed links with exact rates
* `named_topology`: a network by its name, such as "a100:2x8", "v5e:4x4" or "torus:4x4"
* `read_topology`: a network from JSON
* `ring`, `mesh`, `torus`, `hypercube`, `complete`, `circulant`: nodes joined directly
* `star`, `leaf_spine`, `fat_tree`: nodes around switches
* `dgx1`, `mi250`, `gpu_boxes`, `tpu_slice`: machines that one can rent

The best throughput (`optimum.py`):

* `optimum`: the best throughput of a collective as a fraction, with the cut that proves it
* `Optimum`: the result

Trees (`trees.py`, `forest.py`):

* `forest`: trees that reach the optimum (ForestColl)
* `Forest`: a collective as trees, with the load of every link
* `Tree`, `Edge`: a spanning tree with its share of the data; one step of it

Execution with symbols (`program.py`):

* `to_program`: the messages of a forest, in rounds
* `Program`, `Message`: the result
* `program_faults`, `forest_faults`: what is wrong with a program, or with trees, in words
* `to_msccl`, `from_msccl`: programs as XML that GPUs run, and back (`msccl.py`)
"""

from toolkit.schedules.collectives.forest import forest
from toolkit.schedules.collectives.machines import (
    dgx1,
    gpu_boxes,
    mi250,
    named_topology,
    tpu_slice,
)
from toolkit.schedules.collectives.msccl import from_msccl, to_msccl
from toolkit.schedules.collectives.optimum import Optimum, optimum
from toolkit.schedules.collectives.program import (
    Message,
    Program,
    forest_faults,
    program_faults,
    to_program,
)
from toolkit.schedules.collectives.shapes import (
    circulant,
    complete,
    fat_tree,
    hypercube,
    leaf_spine,
    mesh,
    ring,
    star,
    torus,
)
from toolkit.schedules.collectives.topology import Topology, read_topology
from toolkit.schedules.collectives.trees import Edge, Forest, Tree

__all__ = [
    "Edge",
    "Forest",
    "Message",
    "Optimum",
    "Program",
    "Topology",
    "Tree",
    "circulant",
    "complete",
    "dgx1",
    "fat_tree",
    "forest",
    "forest_faults",
    "from_msccl",
    "gpu_boxes",
    "hypercube",
    "leaf_spine",
    "mesh",
    "mi250",
    "named_topology",
    "optimum",
    "program_faults",
    "read_topology",
    "ring",
    "star",
    "to_msccl",
    "to_program",
    "torus",
    "tpu_slice",
]
