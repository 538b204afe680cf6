"""The table of mixers as a page: `python -m toolkit.attention.table > docs/mixers.md`.

Nothing on the page is typed by hand: sizes and work come from the cost formulas of `MIXERS`, what
a mixer can do from the arguments its function takes. A test holds the page against this file.
"""

import inspect
import re
from collections.abc import Iterable

from toolkit.attention.inputs import Input, Mixer
from toolkit.attention.mixers import MIXERS
from toolkit.attention.softmax.softmax_attention import softmax_attention
from toolkit.attention.softmax.stock import STOCK

HEAD_SIZE = 128
CONTEXT = 8192
_ARXIV, _LINK = re.compile(r"arXiv:(\d+\.\d+)"), r"[arXiv:\1](https://arxiv.org/abs/\1)"
_MORE = {"steps": "delta step", "levels": "level", "pairs": "pair of key channels"}
_KERNELS = {"pallas": "TPU, Hopper GPU", "cudnn": "NVIDIA GPU", "splash": "TPU"}
HEADER = f"""# Token mixers

Every mixer of `toolkit.attention`, from its row of `MIXERS`. `python -m toolkit.attention.table`
writes this page; change the row, not the page.

All figures are *modelled*: the formulas of the row for one head of key and value size {HEAD_SIZE},
float32, a sequence (or a context) of {CONTEXT:,} tokens. FLOPs are those of the matrix products of
our XLA form, two a multiply-add; bytes are what must at least cross the memory bus. The tests hold
the formulas against the compiler's counts.
"""
COSTS = """## State and cost of one head

A *token of a sequence* is one of many mixed at once, as in training and prefill; a *decoded token*
is one step, which reads the state and, when it is recurrent, writes it.
"""
ABILITIES = """## What each can do

Gates are log-decays (`g`, at most 0), strengths and time steps: one number per token and head, or
one per channel where it says so; an indexer serves all heads. *Packed*: several documents in one
sequence, told apart by `segment_ids`. *Initial state*: continues where an earlier call ended. Every
implementation has a gradient; those under *forward mode, second derivatives* have both, and
derivatives of any order, at any length. *Lengths per row*: where sequences of different lengths
share a batch, what counts the tokens of each; a state of one size has no length, and such sequences
are filled up in front and told apart by `segment_ids`. *Kernels*: what `implementation=` names and
the machines it is for.
`implementation=None` picks what a record shows to be the best on the platform for which a program
is lowered (`toolkit/attention/best_known.py`): "xla"; for softmax "dense" when short and
"blockwise" when long; "masked" or "gathered" by cost. Softmax also takes "cudnn" on NVIDIA GPUs and
"splash" on TPUs, kernels of others, for the arguments that these have.
"pallas" are kernels for NVIDIA GPUs of the Hopper generation (H100, H200, GH200; bfloat16) and
*experimental* ones for TPUs (written for v5e and v6e), forward, backward and the decode step.
Where a process has one GPU, None is "cudnn" for softmax and "pallas" for a recurrence and a step
with a latent cache, as far as they take the inputs: they have a gradient and no other derivative.
Elsewhere, and for a recurrent step, kernels have to be asked for by name, and warn until a record
of such a machine shows what they gain.
On a CPU one call walks through time on one core; after `toolkit.parallel.use_cores()` sequences,
or else heads, are shared among all of them.
"""


def mixer_page() -> str:
    """The page docs/mixers.md."""
    costs = _table(
        ("name", "mixer", "state", "grows with the context", "FLOPs per token of a sequence",
         "bytes", "FLOPs per decoded token", "bytes"),
        [_costs(row) for row in MIXERS.values()],
    )  # fmt: skip
    abilities = _table(
        ("name", "inputs", "gates", "causal", "packed", "initial state", "implementations",
         "forward mode, second derivatives", "mask and bias", "lengths per row", "kernels"),
        [_abilities(row) for row in MIXERS.values()],
    )  # fmt: skip
    papers = "\n".join(
        f"* **{row.title}** (`{row.name}`): {_ARXIV.sub(_LINK, row.paper)}"
        for row in MIXERS.values()
    )
    return "\n".join((HEADER, COSTS, costs, "", ABILITIES, abilities, "", "## Papers", "", papers))


def _costs(row: Mixer) -> tuple[str, ...]:
    sizes = (1, HEAD_SIZE, HEAD_SIZE)
    state, earlier = (
        row.state_bytes(1, context, *sizes, **row.options) for context in (CONTEXT, CONTEXT // 2)
    )
    sequence = (1, CONTEXT, *sizes)
    return (
        f"`{row.name}`",
        row.title + "".join(f", {name} = {value}" for name, value in row.options.items()),
        f"{state / 1024:,.0f} KiB",
        "yes" if state > earlier else "no",
        f"{row.forward_flops(*sequence, **row.options) / CONTEXT:,.0f}",
        f"{row.forward_bytes(*sequence, **row.options) / CONTEXT:,.0f}",
        f"{row.step_flops(*sequence, **row.options):,}",
        f"{row.step_bytes(*sequence, **row.options):,}",
    )


def _abilities(row: Mixer) -> tuple[str, ...]:
    takes = inspect.signature(row.function).parameters
    tokens, gates = (
        ", ".join(f"`{x.name}`{_shape(x)}" for x in row.inputs if x.is_gate == is_gate)
        for is_gate in (False, True)
    )
    lengths = [name for name in ("query_seq_lengths", "key_value_seq_lengths") if name in takes]
    state = row.empty_state(1, 1, 1, 1, CONTEXT, "float32", **row.options)
    lengths += ["cache.length"] * hasattr(state, "length")
    names = (*row.implementations, *(STOCK if row.function is softmax_attention else ()))
    kernels = [name for name in names if name in _KERNELS]
    return (
        f"`{row.name}`",
        tokens,
        gates or "none",
        "yes, or not" if "is_causal" in takes else "yes",
        "yes" if "segment_ids" in takes else "no",
        "yes" if "initial_state" in takes else "no",
        *map(_named, (row.implementations, row.differentiable)),
        _named(name for name in ("mask", "bias") if name in takes) or "no",
        _named(lengths) or "none",
        "; ".join(f"`{name}`: {_KERNELS[name]}" for name in kernels) or "none",
    )


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _shape(array: Input) -> str:
    """What an input has one number for, where that is not a token and head."""
    if "heads" not in array.axes:
        return " for all heads"
    channels = {"key": " per key channel", "value": " per value channel"}
    words = [channels[axis] for axis in array.axes if array.is_gate and axis in channels]
    words += [f" per {word}" for axis, word in _MORE.items() if axis in array.axes]
    return "".join(words)


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    print(mixer_page())
