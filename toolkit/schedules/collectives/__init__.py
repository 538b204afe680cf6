"""Collectives as data: networks, the best throughput on them, and trees that reach it.

Networks (`fabrics/`):

* `Topology`: compute nodes, switches, and directed links with exact rates
* `named_topology`: a network by its name, such as "a100:2x8", "v5e:4x4" or "torus:4x4"
* `read_topology`: a network from JSON
* `ring`, `mesh`, `torus`, `hypercube`, `complete`, `circulant`: nodes joined directly
* `star`, `leaf_spine`, `fat_tree`: nodes around switches
* `directed`, `kautz`: one-way links
* `line_graph`, `degree_expansion`, `product`: graphs made of graphs
* `dgx1`, `mi250`, `gpu_boxes`, `tpu_slice`: machines that one can rent

The best throughput (`optimum.py`):

* `optimum`: the best throughput of a collective as a fraction, with the cut that proves it
* `Optimum`: the result
* `joint_all_reduce`: the same for an all-reduce whose phases overlap, in fractions (`joint.py`)
* `JointOptimum`: the result

Trees (`trees.py`, `forest.py`, `packed/`):

* `forest`: trees that reach the optimum (ForestColl)
* `joint_forest`: trees of the joint all-reduce
* `breadth_first`: floods along shortest paths, for direct links (`direct.py`)
* `design_front`: graphs for a number of nodes and links, by steps and bandwidth
* `Design`: one of them
* `Forest`: a collective as trees, with the load of every link
* `Tree`, `Edge`: a spanning tree with its share of the data; one step of it

What the field runs (`baselines.py`, `rings.py`), and times (`times.py`):

* `ring_forest`, `grid_rings`: rings over all ranks, one or two ways, or along the axes of a grid
* `halving_doubling`: recursive doubling and halving
* `double_binary_trees`: pairs of binary trees
* `disjoint_rings`: orders of ranks whose rings share no link's rate
* `nccl_choice`: such rings or double binary trees, whichever is faster at a size
* `pipelined`: the modelled time of a forest, with the best number of chunks
* `Pipelining`: the result
* `best_forest`: a forest, or the joint one where that is faster at a size (`report.py`)
* `plan_report`: throughput, cut, trees and times by size, in words

Execution with symbols (`program.py`):

* `to_program`: the messages of a forest, in rounds
* `Program`, `Message`: the result
* `program_faults`, `forest_faults`: what is wrong with a program, or with trees, in words
* `to_msccl`, `from_msccl`: programs as XML that GPUs run, and back (`msccl.py`)
"""

from toolkit.schedules.collectives.baselines import (
    double_binary_trees,
    grid_rings,
    halving_doubling,
    nccl_choice,
    ring_forest,
)
from toolkit.schedules.collectives.direct import Design, breadth_first, design_front
from toolkit.schedules.collectives.fabrics.expansions import (
    degree_expansion,
    directed,
    kautz,
    line_graph,
    product,
)
from toolkit.schedules.collectives.fabrics.machines import (
    dgx1,
    gpu_boxes,
    mi250,
    named_topology,
    tpu_slice,
)
from toolkit.schedules.collectives.fabrics.shapes import (
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
from toolkit.schedules.collectives.fabrics.topology import Topology, read_topology
from toolkit.schedules.collectives.forest import forest
from toolkit.schedules.collectives.joint import JointOptimum, joint_all_reduce, joint_forest
from toolkit.schedules.collectives.msccl import from_msccl, to_msccl
from toolkit.schedules.collectives.optimum import Optimum, optimum
from toolkit.schedules.collectives.program import (
    Message,
    Program,
    forest_faults,
    program_faults,
    to_program,
)
from toolkit.schedules.collectives.report import best_forest, plan_report
from toolkit.schedules.collectives.rings import disjoint_rings
from toolkit.schedules.collectives.times import Pipelining, pipelined
from toolkit.schedules.collectives.trees import Edge, Forest, Tree

__all__ = [
    "Design", "Edge", "Forest", "JointOptimum", "Message", "Optimum", "Pipelining", "Program",
    "Topology", "Tree", "best_forest", "breadth_first", "circulant", "complete", "degree_expansion",
    "design_front", "dgx1", "directed", "disjoint_rings", "double_binary_trees", "fat_tree",
    "forest", "forest_faults", "from_msccl", "gpu_boxes", "grid_rings", "halving_doubling",
    "hypercube", "joint_all_reduce", "joint_forest", "kautz", "leaf_spine", "line_graph", "mesh",
    "mi250", "named_topology", "nccl_choice", "optimum", "pipelined", "plan_report", "product",
    "program_faults", "read_topology", "ring", "ring_forest", "star", "to_msccl", "to_program",
    "torus", "tpu_slice",
]  # fmt: skip
