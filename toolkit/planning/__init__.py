"""What fits a cluster, how fast it runs and which layout to take, before anything is compiled.

Predict (`predict.py`, `memory/`, `time/`):

* `predict`: memory and time of a train step under a strategy, as a `Prediction`
* `Prediction`: memory by category, seconds by part, bytes sent; printed as a table
* `Strategy`: data x fsdp x tensor x pipeline, experts, what is recomputed, microbatches, chunks
* `Memory`: bytes on the chip that holds most, by category
* `Constants`: what chips and links achieve of their published rates
* `calibrate`: constants that fit a file of measurements, as a `Calibration`
* `Calibration`: constants, which of them were determined, errors before and after
* `what_fits`: models against clusters under six schemes by name
* `cluster`: chips by name, as a `Cluster`, also with the links of a network; `MODELS`:
  configurations by name
* `place_axes`: which axis of a mesh to lay on which links, as an `AxisPlacement` (`networks.py`)

Plan (`search/`, `time/pipelines.py`, `uneven/`):

* `plan`: the fastest strategy that fits, as a `Plan` with reasons and runners-up
* `Plan`: what was found; printed as a table
* `explain_recipe`: a published recipe (`RECIPES`, each a `Recipe`) predicted, and what `plan` would
  choose instead
* `search_order`: a plan's pipeline in a searched order of its tasks
* `decision_trees`: all ways to cut a step over chips
* `assign_layers`: the fastest strategy for each layer within a budget, as an `Assignment`
* `Assignment`: a strategy for every layer
* `place_stages`: nodes to stages where links differ, as a `Placement` (Pipette)
* `pipeline_seconds`: a step through pipeline stages
* `cut_evenly`: layers to stages so that the heaviest is lightest
* `balance_stages`: the same within the memory of each stage (Galvatron-BMW)
* `plan_sequences`: chips in groups for sequences of different lengths, as a `SequencePlan` (FlexSP)
* `equal_time_cuts`, `best_slices`, `sliced_seconds`: slices of a causal sequence, and how many
* `chunk_sequences`: long sequences in slices and short ones packed, as `Chunks` (InfiniPipe)
* `plan_replicas`: replicas of different sizes for sequences of different lengths (Hydraulis), as a
  `ReplicaPlan`; `pack_by_time`: sequences into micro-batches; `ranks_of`: chips per sequence
  (ByteScale)
* `plan_mixed`, `plan_mixed_cluster`: pipelines of unequal stages on chips of several kinds, as a
  `MixedPlan` (HexiScale); `ChipKind`, `MixedStage`: what they say
* `plan_swaps`, `keep_swap_recompute`: the fate of every `ActivationTensor`, as `Fates` (MEMO);
  `swapped_share`: the share that hides behind computing
* `keep_layers`: which chunks keep what in the memory of a stage (InfiniPipe)
* `overlapped_seconds`: computing and communicating at the same time

Decode with latent attention, or a mixture of experts (`decode/`):

* `plan_decode`: heads, rows, tokens or latents cut, as a `DecodePlan` with the reason
* `decode_cost`: bytes, FLOPs and seconds of a layer under one scheme, as a `DecodeCost`
* `break_even_tokens`: cached tokens from which cut latents read less than cut heads
* `DecodePlan`, `DecodeCost`: what they say

Choose what gradients are compressed (`gradients/`):

* `choose_exchanges`: an exchange for each gradient of a step, as an `ExchangeChoice`
* `ExchangeChoice`: the schedule, the greedy one beside it, what each tensor gains
* `best_exchanges`: the optimum over options and groups, as a `Schedule` of messages in lanes
* `greedy_exchanges`, `best_cut`: the searches of Espresso and MergeComp
* `Option`, `Schedule`: a way to exchange tensors with its `Cost`; messages in time

Lay out in time (`time/timeline.py`, `time/compiled_work.py`):

* `timeline`: a compiled program in lanes, as a `Timeline`; what if the link were half as fast
* `Timeline`: spans, seconds computing, communicating and hidden
* `Span`: a stretch of one lane

Run and check (`grade/program.py`):

* `train_program`: the step itself, as a `Program` that `training` runs and compilers grade
* `Program`: loss, layout and shapes of arguments
* `save_plan`, `load_plan`: a strategy with its model and batch as a file, as a `SavedPlan`
* `SavedPlan`: what `toolkit train --plan` and `toolkit explain --plan` run as it is
"""

from toolkit.planning.clusters import Cluster, cluster
from toolkit.planning.decode.choice import DecodePlan, plan_decode
from toolkit.planning.decode.latent import DecodeCost, break_even_tokens, decode_cost
from toolkit.planning.grade.calibrate import Calibration, calibrate
from toolkit.planning.grade.program import Program, train_program
from toolkit.planning.gradients.exchanges import ExchangeChoice, choose_exchanges
from toolkit.planning.gradients.lanes import Cost, Option, Schedule
from toolkit.planning.gradients.search import best_cut, best_exchanges, greedy_exchanges
from toolkit.planning.memory.categories import Memory
from toolkit.planning.memory.swapping import (
    ActivationTensor,
    Fates,
    keep_swap_recompute,
    plan_swaps,
    swapped_share,
)
from toolkit.planning.models import MODELS
from toolkit.planning.networks import AxisPlacement, place_axes
from toolkit.planning.predict import Prediction, predict
from toolkit.planning.saved import SavedPlan, load_plan, save_plan
from toolkit.planning.search.layers import Assignment, assign_layers, decision_trees
from toolkit.planning.search.own_order import search_order
from toolkit.planning.search.plan import Plan, plan
from toolkit.planning.search.recipes import RECIPES, Recipe, explain_recipe
from toolkit.planning.search.what_fits import what_fits
from toolkit.planning.strategy import Strategy
from toolkit.planning.time.pipelines import balance_stages, cut_evenly, pipeline_seconds
from toolkit.planning.time.seconds import Constants, overlapped_seconds
from toolkit.planning.time.timeline import Span, Timeline, timeline
from toolkit.planning.uneven.kept_chunks import keep_layers
from toolkit.planning.uneven.mixed_machines import (
    ChipKind,
    MixedPlan,
    MixedStage,
    plan_mixed,
    plan_mixed_cluster,
)
from toolkit.planning.uneven.placement import Placement, place_stages
from toolkit.planning.uneven.replicas import ReplicaPlan, pack_by_time, plan_replicas, ranks_of
from toolkit.planning.uneven.sequences import SequencePlan, plan_sequences
from toolkit.planning.uneven.slices import (
    Chunks,
    best_slices,
    chunk_sequences,
    equal_time_cuts,
    sliced_seconds,
)

__all__ = [
    "MODELS",
    "RECIPES",
    "ActivationTensor",
    "Assignment",
    "AxisPlacement",
    "Calibration",
    "ChipKind",
    "Chunks",
    "Cluster",
    "Constants",
    "Cost",
    "DecodeCost",
    "DecodePlan",
    "ExchangeChoice",
    "Fates",
    "Memory",
    "MixedPlan",
    "MixedStage",
    "Option",
    "Placement",
    "Plan",
    "Prediction",
    "Program",
    "Recipe",
    "ReplicaPlan",
    "SavedPlan",
    "Schedule",
    "SequencePlan",
    "Span",
    "Strategy",
    "Timeline",
    "assign_layers",
    "balance_stages",
    "best_cut",
    "best_exchanges",
    "best_slices",
    "break_even_tokens",
    "calibrate",
    "choose_exchanges",
    "chunk_sequences",
    "cluster",
    "cut_evenly",
    "decision_trees",
    "decode_cost",
    "equal_time_cuts",
    "explain_recipe",
    "greedy_exchanges",
    "keep_layers",
    "keep_swap_recompute",
    "load_plan",
    "overlapped_seconds",
    "pack_by_time",
    "pipeline_seconds",
    "place_axes",
    "place_stages",
    "plan",
    "plan_decode",
    "plan_mixed",
    "plan_mixed_cluster",
    "plan_replicas",
    "plan_sequences",
    "plan_swaps",
    "predict",
    "ranks_of",
    "save_plan",
    "search_order",
    "sliced_seconds",
    "swapped_share",
    "timeline",
    "train_program",
    "what_fits",
]
