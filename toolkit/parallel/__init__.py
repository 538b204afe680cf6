"""From one device to many: simulated devices, meshes, layouts, and steps that use them.

The name `pjit` is deprecated: `jax.jit` with shardings does the same.

* `use_cores`: let token mixers use all cores of a CPU
* `simulate_devices`: make jax show the CPU as many devices
* `make_mesh`: a grid of devices with named axes of a stated type
* `Layout`: path -> (PartitionSpec, reason): printed, edited, checked, applied
* `Placement`: one row of a layout
* `layout`: a layout by the name of a scheme, such as "zero3+tensor"
* `data_parallel`: the layout that replicates every parameter
* `fully_sharded`: the layout that cuts every parameter (ZeRO-3, FSDP)
* `auto_layout`: a tensor-parallel layout found by following the traced program
* `Machine`: the rates that `auto_layout` assumes
* `redco_layout`: a layout from the names of parameters alone
* `logical_layout`: a layout by names of dimensions and rules, as flax and MaxText have them
* `compare_layouts`: the collectives of one program under several layouts, side by side
* `blame`: avoidable collectives, each with changes of the layout that were tried
* `Blame`, `Finding`, `Trial`: its results
* `context_attention`: attention over tokens on several devices: ring, zigzag or Ulysses
* `context_mixer`: a linear-time mixer over tokens on several devices, which exchange states
* `ring_attention`, `ulysses_attention`: attention inside `jax.shard_map`
* `to_zigzag`, `from_zigzag`, `zigzag_order`: the token order that balances a causal ring
* `column_parallel`, `row_parallel`: Megatron's pair of products inside `jax.shard_map`
* `all_gather_matmul`, `matmul_reduce_scatter`: the same in hops that hide behind the products
* `vocabulary_parallel_embedding`, `vocabulary_parallel_loss`: a sharded vocabulary, likewise
* `vocabulary_parallel_cross_entropy`: the loss on whole arrays; logits are never gathered
* `explain`: a compiled program's collectives, each traced to its cause, and its memory
* `Explanation`, `ExplainedCollective`, `MemoryRow`: its results
* `stream_backward`: a causal layer whose backward pass runs chunk by chunk
* `streamed_loss`: the head and its loss, with the logits of one chunk in memory
* `plan_sequence_groups`, `plan_micro_batches`: groups of devices for each sequence (FlexSP)
* `SequenceGroup`, `SequenceCosts`: a group of devices and its sequences; what a sequence costs
* `bucket_lengths`, `divide_evenly`: classes of lengths with little padding; micro-batches
* `launch`: run a command as several processes of one job, and watch them
* `launch_recipe`: the script to submit to SLURM, Kubernetes, Ray or Cloud TPU
* `join_processes`: called first by each process of a job
* `experts`: mixtures of experts that are divided among devices, re-laid by their loads
* `pipeline`: any schedule of `toolkit.schedules`, run as one program
* `gradients`: what replicas send to agree on a gradient: compressed, with feedback, sparse rows
* `latent`: decoding with latent attention sharded by heads, latents or tokens
* `partitioned_train_step`: a train step whose communication the compiler chooses
* `sharded_train_step`: the same step with its communication written down
"""

from toolkit.parallel import experts, gradients, latent, pipeline
from toolkit.parallel.causes.cause import ExplainedCollective, MemoryRow
from toolkit.parallel.causes.comparison import compare_layouts
from toolkit.parallel.causes.explanation import Explanation
from toolkit.parallel.causes.reading import explain
from toolkit.parallel.context import (
    context_attention,
    context_mixer,
    from_zigzag,
    ring_attention,
    to_zigzag,
    ulysses_attention,
    zigzag_order,
)
from toolkit.parallel.dataflow.auto_layout import auto_layout
from toolkit.parallel.dataflow.flow import Machine
from toolkit.parallel.dataflow.logical_layout import logical_layout
from toolkit.parallel.dataflow.redco_layout import redco_layout
from toolkit.parallel.devices import simulate_devices, use_cores
from toolkit.parallel.faults.blame import Blame, Finding, Trial, blame
from toolkit.parallel.hosts.launch import launch
from toolkit.parallel.hosts.processes import join_processes
from toolkit.parallel.hosts.recipes import launch_recipe
from toolkit.parallel.layout import Layout, Placement
from toolkit.parallel.mesh import make_mesh
from toolkit.parallel.product_rings import all_gather_matmul, matmul_reduce_scatter
from toolkit.parallel.schemes import layout
from toolkit.parallel.sequences.classes import bucket_lengths, divide_evenly
from toolkit.parallel.sequences.groups import (
    SequenceCosts,
    SequenceGroup,
    plan_micro_batches,
    plan_sequence_groups,
)
from toolkit.parallel.sequences.stream_backward import stream_backward, streamed_loss
from toolkit.parallel.sharded_step import sharded_train_step
from toolkit.parallel.step import partitioned_train_step
from toolkit.parallel.strategies import data_parallel, fully_sharded
from toolkit.parallel.tensor import (
    column_parallel,
    row_parallel,
    vocabulary_parallel_cross_entropy,
    vocabulary_parallel_embedding,
    vocabulary_parallel_loss,
)

__all__ = [
    "Blame", "ExplainedCollective", "Explanation", "Finding", "Layout", "Machine", "MemoryRow",
    "Placement", "SequenceCosts", "SequenceGroup", "Trial", "all_gather_matmul", "auto_layout",
    "blame", "bucket_lengths", "column_parallel", "compare_layouts", "context_attention",
    "context_mixer", "data_parallel", "divide_evenly", "experts", "explain", "from_zigzag",
    "fully_sharded", "gradients", "join_processes", "latent", "launch", "launch_recipe", "layout",
    "logical_layout", "make_mesh", "matmul_reduce_scatter", "partitioned_train_step", "pipeline",
    "plan_micro_batches", "plan_sequence_groups", "redco_layout", "ring_attention", "row_parallel",
    "sharded_train_step", "simulate_devices", "stream_backward", "streamed_loss", "to_zigzag",
    "ulysses_attention", "use_cores", "vocabulary_parallel_cross_entropy",
    "vocabulary_parallel_embedding", "vocabulary_parallel_loss", "zigzag_order",
]  # fmt: skip
