"""Least times of the kernels as a page.

    python -m toolkit.bench.mixers.kernel_floors > docs/kernels.md

A floor is what a chip's published peaks allow for the modelled work of a mixer; a kernel is as good
as its time is near to it. A test holds the page against this file.
"""

from typing import Any

from toolkit.attention import MIXERS
from toolkit.attention.kernels.gpu.solve import INSTRUCTIONS
from toolkit.bench.mixers.gpu import SHAPES, Work, modelled_work
from toolkit.bench.mixers.steps import DEVICES, SHARDED, SLICES, shard_work
from toolkit.measure import Peak, published_peak

CHIPS = ("H100", "H200", "B200", "TPU v5e", "TPU v6e")
SHAPE = SHAPES[1]
HOPPER, LATENT_SHAPE = ("H100", "H200"), (64, 32768)  # rows, tokens of each


def floors_page() -> str:
    """The page docs/kernels.md."""
    batch, time, heads, size = SHAPE
    peaks = {name: peak for name in CHIPS if (peak := published_peak(name)) is not None}
    header = ("name", "TFLOP", "GB", *(f"{name}, ms" for name in peaks))
    tables = []
    for backward in (False, True):
        lines = [header, ("---",) * len(header)]
        for row in MIXERS.values():
            if "pallas" not in row.implementations:
                continue
            work = modelled_work(row, SHAPE, backward=backward)
            lines.append((f"`{row.name}`", *_cells(work, peaks)))
        title = "## Forward and backward" if backward else "## Forward"
        tables.append(f"{title}\n\n{_table(lines)}")
    sources = "\n".join(
        f"* {name}: {peak.flops_per_second / 1e12:,.0f} TFLOP/s in bfloat16, "
        f"{peak.bytes_per_second / 1e12:,.2f} TB/s ({peak.source})"
        for name, peak in peaks.items()
    )
    return f"""# Floors of the kernels

What the kernels reach on an H100 is written in
[Recorded results](results.md#from-your-gpu-or-tpu).

The least time in which a chip could run a mixer whose form is a Pallas kernel: the longer of
products at the published rate and of inputs and results crossing the memory bus once. All figures
are *modelled*, from the formulas of `MIXERS`, for batch {batch}, {time:,} tokens, {heads} heads of
{size} channels, bfloat16; on a GPU `toolkit bench mixers` prints the share of the floor that each
reaches. A gradient counts three times the products of the forward pass. In parentheses what binds.
`python -m toolkit.bench.mixers.kernel_floors` writes this page.

{tables[0]}

{tables[1]}

{_phase_floors()}

{_latent_floors()}

## Peaks

{sources}"""


def _phase_floors() -> str:
    peaks = {name: peak for name in HOPPER if (peak := published_peak(name)) is not None}
    header = ("kernel", "TFLOP", "GB", *(f"{name}, ms" for name in peaks))
    batch, time, heads, size = SHAPE
    chunk = 64
    chunks = batch * heads * time // chunk
    square, tokens, state = chunk**2, chunk * size, size**2
    # Multiply-adds and bytes per chunk; operands are bfloat16, but for A.
    phases = {
        "`gpu/prepare`": (
            INSTRUCTIONS * 64 * 16**2 + 6 * chunk * tokens,
            4 * square + 14 * tokens + 28 * chunk,
        ),
        "`gpu/walk`": (2 * size * tokens, 8 * tokens + 2 * state),
        "`gpu/outputs`": (size * tokens + chunk * tokens, 2 * square + 6 * tokens + 2 * state),
        "`gpu/walk`, back": (
            3 * size * tokens + chunk * tokens,
            2 * square + 10 * tokens + 2 * state,
        ),
        "`gpu/prepare`, back": (2 * chunk * tokens, 4 * square + 10 * tokens + 28 * chunk),
        "`gpu/gradients`": (
            3 * size * tokens + 9 * chunk * tokens,
            2 * square + 18 * tokens + 4 * state + 56 * chunk + 4 * size,
        ),
    }
    lines: list[Any] = [header, ("---",) * len(header)]
    for name, (products, traffic) in phases.items():
        lines.append((name, *_cells(Work(2 * chunks * products, chunks * traffic), peaks)))
    return f"""## The kernels of a Gated DeltaNet on Hopper

`implementation="pallas"` of the shape above, kernel by kernel (only their sum has been timed).
Inverses by blocks of 16 tokens take {INSTRUCTIONS} products of
64 x 16 x 16 per chunk, {2 * chunks * INSTRUCTIONS * 64 * 16**2 / 1e9:.0f} GFLOP in all, where \
doubling matrices of 64 x 64 takes {2 * chunks * 30 * chunk**3 / 1e9:.0f}.
The backward pass runs `gpu/prepare` again, with its T, then the walk back and `gpu/gradients`.

{_table(lines)}"""


def _latent_floors() -> str:
    peaks = {name: peak for name in HOPPER if (peak := published_peak(name)) is not None}
    header = ("latents", "heads", "TFLOP", "GB", *(f"{name}, ms" for name in peaks))
    lines = [header, ("---",) * len(header)]
    for slices in SLICES:
        width = SHARDED.latent_size // slices + SHARDED.rope_size
        cut = "whole" if slices == 1 else f"{slices} slices"
        heads = SHARDED.heads * slices // DEVICES
        work = shard_work(slices, *LATENT_SHAPE)
        lines.append((f"{width}, {cut}", str(heads), *_cells(work, peaks)))
    batch, slots = LATENT_SHAPE
    return f"""## One step with a latent cache

Attention of one of {DEVICES} devices in a layer of DeepSeek-V3, {batch} sequences of {slots:,}
tokens, bfloat16: `decode_step(..., implementation="pallas")`, a kernel for Hopper. With 8 sequences
an H100 took 12 to 38 % of the floor's rate (recorded); `toolkit bench latent` measures it.

{_table(lines)}"""


def _cells(work: Work, peaks: dict[str, Peak]) -> list[str]:
    cells = [f"{work.flops / 1e12:.3f}", f"{work.bytes / 1e9:.2f}"]
    for peak in peaks.values():
        by_flops, by_bytes = work.floor_parts(peak)
        bound = "memory" if by_bytes > by_flops else "products"
        cells.append(f"{1e3 * max(by_flops, by_bytes):.2f} ({bound})")
    return cells


def _table(lines: list[Any]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    print(floors_page())
