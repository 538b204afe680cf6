"""Experts sharded over devices, and the communication of their tokens.

* `sharded_mixture`: `toolkit.experts.mixture` over a mesh; reports dropped pairs
* `sharded_route`: the routing of sharded tokens, without gathering them
* `Dispatched`: outputs of the experts, and which pairs were kept
* `dispatch_traffic`, `Traffic`: its communication, by collective
* `expert_axes`: the innermost axes of a mesh, for a number of expert-parallel devices ("folding")
* `expert_specs`: the specs of the weights
* `relayout`, `static_layout`: copies of busy experts, placed by their loads (LAER-MoE)
* `ExpertLayout`: their result
* `break_even_pairs`: when such a layout pays
* `relaid_mixture`: the mixture under such a layout; a new one compiles nothing
* `restored`: the all-to-all with which devices restore their experts
* `group_experts`, `ExpertGroups`: experts that the same tokens choose share a device
* `shuffled_order`: an order of tokens by their expected experts (Speculative MoE)
* `scatter_shuffled`, `gather_unshuffled`: the two collectives around experts, in that order
"""

from toolkit.parallel.experts.dispatch import Dispatched, sharded_mixture, sharded_route
from toolkit.parallel.experts.folding import expert_axes, expert_specs
from toolkit.parallel.experts.relayout import (
    ExpertLayout,
    break_even_pairs,
    relayout,
    static_layout,
)
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
    "Dispatched", "ExpertGroups", "ExpertLayout", "Traffic", "break_even_pairs", "dispatch_traffic",
    "expert_axes", "expert_specs", "gather_unshuffled", "group_experts", "relaid_mixture",
    "relayout", "restored", "scatter_shuffled", "sharded_mixture", "sharded_route",
    "shuffled_order", "static_layout",
]  # fmt: skip
