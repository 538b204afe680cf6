"""One way to train a model on many chips: how work is divided, and what is recomputed."""

import dataclasses
import functools
import itertools
import re

from toolkit._checks import check_choice, check_fields
from toolkit._kinds import shown
from toolkit.parallel.sequences.stream_backward import MOST_CHUNKS
from toolkit.planning.division import Division
from toolkit.schedules import Schedule, faults, from_csv

RECOMPUTE = ("none", "elementwise", "layer")
SUMMED = ("float32", "bfloat16")
PRODUCTS = ("bfloat16", "float8", "float8-rows")
OVERLAPPED = ("", "tensor", "tensor-buffers", "expert", "tensor, expert")
# Pipeline schedules, with the chunks per device that they want; None: two or more.
SCHEDULES = {
    "1f1b": 1,
    "gpipe": 1,
    "interleaved": None,
    "breadth-first": None,
    "zb-h1": 1,
    "zb-h2": 1,
    "zb-v": 2,
    "dualpipe-v": 2,
}
SLICED = ("1f1b", "gpipe")  # whose microbatches may be slices of sequences
SPLIT = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")  # whose backward passes are split
SHAPED_AS_V = ("zb-v", "dualpipe-v")
_RUN = rf"[1-9]\d{{0,5}} ({'|'.join(RECOMPUTE)})"
_RUNS = re.compile(rf"{_RUN}(, {_RUN}){{0,7}}")


@functools.lru_cache(maxsize=64)
def listed(table: str, slices: int = 1) -> Schedule:
    """The schedule of a table, for sequences in slices."""
    return dataclasses.replace(from_csv(table, "a schedule of its own"), slices=slices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy(Division):
    """How a train step is distributed over `chips` = data x fsdp x context x tensor x pipeline.

    Attributes:
        data, fsdp, context, tensor, pipeline, expert: how arrays are cut; see `Division`.
        shard_optimizer, shard_gradients, dispatch, capacity: likewise.
        recompute: what the backward pass recomputes: "none"; "elementwise" (norms, rotations,
            activations and attention, keeping the products with weights); the whole "layer",
            keeping only its input; or runs of layers, as "20 layer, 12 none".
        microbatches: parts of the batch that run one after another.
        head_chunks: chunks of a sequence in the head; the logits of one chunk exist at a time.
        block_chunks: chunks of a sequence in the backward pass of each fully recomputed layer; the
            intermediates of one chunk exist at a time (StreamBP).
        stages: layers of each pipeline stage; empty: as equal as possible. A model that applies its
            layers in loops has the stages of every loop, alike in all of them.
        schedule: the order of a pipeline's tasks: "1f1b", "gpipe", "interleaved", "breadth-first",
            "zb-h1", "zb-h2", "zb-v" or "dualpipe-v", as in `toolkit.schedules`; or any other, such
            as a searched one, as the table that `toolkit.schedules.to_csv` writes.
        chunks: stages per device; 2 for "zb-v" and "dualpipe-v", 2 or more for "interleaved" and
            "breadth-first". A pipeline has `pipeline` x `chunks` stages.
        slices: consecutive parts, of equal length, of each sequence in a pipeline (TeraPipe).
            Layers pass keys, values and states on from slice to slice. For "1f1b", "gpipe" and
            tables.
        offload: share of what the forward pass keeps that waits in the host's memory for the
            backward pass (MEMO); modelled only.
        products: kind of numbers that products with weights multiply: "bfloat16"; "float8",
            cast from bfloat16 for each product and gathered over "tensor" as such; or
            "float8-rows", scaled row by row after they are gathered; modelled only.
        overlapped: communication that hides behind computing, of `OVERLAPPED`: of "tensor" behind
            the products beside it (asynchronous tensor parallelism; "tensor-buffers" by kernels of
            its own, as Transformer Engine's userbuffers), tokens on their way to experts behind
            another microbatch; modelled only.
        summed: kind of numbers in which gradients travel between replicas, and parameters after a
            sharded update: "float32", or "bfloat16"; modelled only.

    Source: Rajbhandari et al., "ZeRO", 2020; Korthikanti et al., "Reducing Activation
        Recomputation in Large Transformer Models", 2022; Luo et al., "StreamBP", 2025; Liu et al.,
        "MoE Parallel Folding", 2025, arXiv:2504.14960; Li et al., "TeraPipe", 2021,
        arXiv:2102.07988.

    Example:
        >>> strategy = Strategy(fsdp=8, tensor=4, recompute="layer")
        >>> strategy.chips, str(strategy)
        (32, 'fsdp 8 x tensor 4, recompute layer')
    """

    recompute: str = "none"
    microbatches: int = 1
    head_chunks: int = 1
    block_chunks: int = 1
    stages: tuple[int, ...] = ()
    schedule: str = "1f1b"
    chunks: int = 1
    slices: int = 1
    offload: float = 0.0
    products: str = "bfloat16"
    overlapped: str = ""
    summed: str = "float32"

    def __post_init__(self):
        if isinstance(self.stages, list):  # as a file has it
            object.__setattr__(self, "stages", tuple(self.stages))
        check_fields(self)
        self._check_degrees("microbatches", "head_chunks", "slices")
        if not 1 <= self.block_chunks <= MOST_CHUNKS:
            raise ValueError(f"block_chunks must be 1 to {MOST_CHUNKS}; got {self.block_chunks}")
        self._check_pipeline()
        if self.recompute not in RECOMPUTE and not _RUNS.fullmatch(self.recompute):
            raise ValueError(
                f"recompute must be one of {', '.join(RECOMPUTE)}, or runs of layers such as "
                f"'20 layer, 12 none'; got {self.recompute!r}"
            )
        self._check_experts()
        if not 0 <= self.offload <= 1:
            raise ValueError(f"offload must lie in [0, 1]; got {self.offload}")
        for name, known in (
            ("products", PRODUCTS),
            ("overlapped", OVERLAPPED),
            ("summed", SUMMED),
        ):
            check_choice(name, getattr(self, name), known)
        if self.block_chunks > 1 and "layer" not in self.recompute:
            raise ValueError(
                f"block_chunks {self.block_chunks} wants layers that are recomputed whole; "
                f"got recompute {self.recompute!r}, nearest that works: 'layer'"
            )

    def _check_pipeline(self):
        if self.schedule not in SCHEDULES and not self.is_listed:
            raise ValueError(
                f"schedule must be one of {', '.join(SCHEDULES)}, or a table of `to_csv`; got "
                f"{self.schedule!r}"
            )
        wanted = self.chunks if self.is_listed else SCHEDULES[self.schedule]
        if self.chunks < 1 or self.chunks != (wanted or max(2, self.chunks)):
            raise ValueError(
                f"chunks must be {wanted or '2 or more'} for schedule {self.schedule!r}; got "
                f"{self.chunks}"
            )
        if self.stages and (len(self.stages) != self.stage_count or min(self.stages) < 1):
            raise ValueError(
                f"stages must have a number of layers, 1 or more, for each of pipeline "
                f"{self.stage_count if self.chunks == 1 else f'{self.pipeline} x {self.chunks}'}; "
                f"got {shown(self.stages)}"
            )
        if self.schedule != "1f1b" and self.pipeline == 1:
            raise ValueError(f"schedule {self.schedule!r} wants a pipeline of 2 or more; got 1")
        if self.slices > 1:
            self._check_slices()
        if wrong := self.schedule_fault:
            raise ValueError(wrong)

    def _check_slices(self):
        if self.pipeline == 1 or not (self.schedule in SLICED or self.is_listed):
            raise ValueError(
                f"slices {self.slices} wants a pipeline of 2 or more with schedule "
                f"{' or '.join(map(repr, SLICED))}, or a table; got pipeline {self.pipeline} with "
                f"{self.schedule_words!r}"
            )
        for name in ("context", "block_chunks"):
            if (number := getattr(self, name)) > 1:
                raise ValueError(
                    f"slices {self.slices} cuts sequences, and so does {name} {number}; nearest "
                    f"that works: {name} 1"
                )

    @property
    def parts(self) -> int:
        """Parts of the batch that pass a stage one after another: slices of all microbatches."""
        return self.microbatches * self.slices

    @property
    def is_listed(self) -> bool:
        """Whether the schedule is a table of tasks instead of a name."""
        return "," in self.schedule

    @property
    def is_split(self) -> bool:
        """Whether backward passes are split into input and weight gradients."""
        return listed(self.schedule).is_split if self.is_listed else self.schedule in SPLIT

    @property
    def schedule_fault(self) -> str:
        """Why the microbatches do not suit the schedule; empty if they do."""
        if self.is_listed:
            return self._listed_fault
        least, parts = 1, 1
        if self.schedule == "interleaved":
            least = parts = self.pipeline
        elif self.schedule in ("zb-h2", "zb-v"):
            least = 2 * self.pipeline - 1
        elif self.schedule == "dualpipe-v":
            least = 2 * self.pipeline
        if self.microbatches >= least and self.microbatches % parts == 0:
            return ""
        words = f"a multiple of {parts}" if parts > 1 else f"{least} or more"
        return (
            f"microbatches must be {words} for schedule {self.schedule!r} on pipeline "
            f"{self.pipeline}; got {self.microbatches}"
        )

    @property
    def _listed_fault(self) -> str:
        found = listed(self.schedule, self.slices)
        shape = found.devices, found.chunks, found.stages, found.microbatches
        p, chunks = self.pipeline, self.chunks
        if shape != (p, chunks, p * chunks, self.parts):
            times = f" x slices {self.slices}" if self.slices > 1 else ""
            return (
                f"schedule: its table has {found.devices} devices with {found.stages} stages and "
                f"{found.microbatches} microbatches; wanted pipeline {p}, {chunks} stages on each, "
                f"and {self.microbatches} microbatches{times}"
            )
        wrong = faults(found)
        return f"schedule: its table cannot run: {wrong[0]}" if wrong else ""

    @property
    def stage_count(self) -> int:
        """Number of stages of the pipeline."""
        return self.pipeline * self.chunks

    def layers_by_stage(self, layers: int, loops: int = 1) -> tuple[int, ...]:
        """Layers of each stage: by default as equal as possible, the last, with the head, fewer.
        The stages of one loop repeat in the next."""
        loops = loops if self.pipeline > 1 else 1
        groups = self.stage_count // loops
        size, more = divmod(layers, groups)
        return self.stages or ((size + 1,) * more + (size,) * (groups - more)) * loops

    @property
    def stages_by_device(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each device of a pipeline."""
        p = self.pipeline
        if self.is_listed:
            placement = listed(self.schedule).placement
            return tuple(
                tuple(s for s, home in enumerate(placement) if home == d) for d in range(p)
            )
        if self.schedule in SHAPED_AS_V:
            return tuple((d, 2 * p - 1 - d) for d in range(p))
        return tuple(tuple(range(d, p * self.chunks, p)) for d in range(p))

    @property
    def schedule_words(self) -> str:
        """The schedule's name, with the chunks that belong to it."""
        if self.is_listed:
            return "a schedule of its own" + f" in {self.chunks} chunks" * (self.chunks > 1)
        return (
            f"{self.schedule} {self.chunks}" if SCHEDULES[self.schedule] is None else self.schedule
        )

    @property
    def stage_words(self) -> str:
        """Layers per stage in words, equal consecutive ones as "3 x 8"."""
        runs = ((layers, len([*run])) for layers, run in itertools.groupby(self.stages))
        return ", ".join(
            f"{count} x {layers}" if count > 1 else f"{layers}" for layers, count in runs
        )

    def runs(self, layers: int) -> tuple[tuple[str, int], ...]:
        """Runs (recomputation, number of consecutive layers) over all layers."""
        if self.recompute in RECOMPUTE:
            return ((self.recompute, layers),)
        parts = (part.split() for part in self.recompute.split(", "))
        found = tuple((word, int(count)) for count, word in parts)
        if sum(count for _, count in found) != layers:
            raise ValueError(
                f"recompute {self.recompute!r} names {sum(count for _, count in found)} layers, "
                f"and the model has {layers}"
            )
        return found

    @property
    def keeps_products(self) -> bool:
        """Whether what is computed anew elementwise has no part in the experts and in the gradients
        of weights: in the programs that dispatch by host."""
        return self.recompute == "elementwise" and self.dispatch == "by_host"

    @property
    def modelled_only(self) -> str:
        """What of it `train_program` does not build, in words; empty if it builds all."""
        if self.offload:
            return f"offload {self.offload:g}"
        if self.products != "bfloat16":
            return f"products {self.products!r}"
        if self.overlapped:
            return f"overlapped {self.overlapped!r}"
        if self.summed != "float32":
            return f"summed {self.summed!r}"
        return super().modelled_only

    def __str__(self) -> str:
        words = [self.degree_words]
        if self.expert > 1:
            words.append(self.expert_words)
        if self.schedule != "1f1b":
            words.append(self.schedule_words)
        if self.stages:
            words.append(f"stages of {self.stage_words} layers")
        if self.shard_optimizer:
            words.append(f"optimiser {'and gradients ' * self.shard_gradients}sharded")
        if self.recompute != "none":
            words.append(f"recompute {self.recompute}")
        if self.offload:
            words.append(f"{self.offload:.0%} of activations on the host")
        if self.products != "bfloat16":
            words.append(f"products in {self.products}")
        if self.overlapped:
            words.append(f"{self.overlapped} communication overlapped")
        if self.summed != "float32":
            words.append(f"gradients summed in {self.summed}")
        if self.microbatches > 1:
            words.append(f"{self.microbatches} microbatches")
        if self.slices > 1:
            words.append(f"sequences in {self.slices} slices")
        if self.block_chunks > 1:
            words.append(f"layers in {self.block_chunks} chunks")
        if self.head_chunks > 1:
            words.append(f"head in {self.head_chunks} chunks")
        return ", ".join(words)
