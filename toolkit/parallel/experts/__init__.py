"""Experts divided among devices: who holds them, and how tokens come to them and back.

* `sharded_mixture`: `toolkit.experts.mixture` over a mesh, with dropped pairs reported
* `sharded_route`: the routing of tokens that are cut, without gathering them
* `Dispatched`: outputs of experts on other devices, and which pairs were kept
* `dispatch_traffic`, `Traffic`: what it sends, by collective
* `expert_axes`: the innermost axes of a mesh, for a number of expert-parallel devices ("folding")
* `expert_specs`: how the weights lie
* `relayout`, `static_layout`: copies of busy experts, placed by their loads (LAER-MoE)
* `ExpertLayout`: what they give
* `relaid_mixture`: the mixture under such a layout; a new one compiles nothing
* `restored`: the all-to-all with which devices restore their experts
* `group_experts`, `ExpertGroups`: experts that the same tokens choose share a device
* `shuffled_order`: tokens where their experts are expected (Speculative MoE)
* `scatter_shuffled`, `gather_unshuffled`: the two collectives around experts, in that order
"""

from toolkit.parallel.experts.dispatch import Dispatched, sharded_mixture, sharded_route
from toolkit.parallel.experts.folding import expert_axes, expert_specs
from toolkit.parallel.experts.relayout import ExpertLayout, relayout, static_layout
from toolkit.parallel.experts.restoring import relaid_mixture, restored
from toolkit.parallel.experts.shuffle import (
    ExpertGroups,
    gather_unshuffled,
    group_experts,
    scatter_shuffled,
    shuffled_order,
)
from toolkit.parallel.experts.traffic import Traffic, dispatch_traffic

__all__ = [
    "Dispatched",
    "ExpertGroups",
    "ExpertLayout",
    "Traffic",
    "dispatch_traffic",
    "expert_axes",
    "expert_specs",
    "gather_unshuffled",
    "group_experts",
    "relaid_mixture",
    "relayout",
    "restored",
    "scatter_shuffled",
    "sharded_mixture",
    "sharded_route",
    "shuffled_order",
    "static_layout",
]
