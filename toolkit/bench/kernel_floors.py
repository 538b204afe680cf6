"""Least times of the kernels as a page: `python -m toolkit.bench.kernel_floors > docs/kernels.md`.

A floor is what a chip's published peaks allow for the modelled work of a mixer; a kernel is as good
as its time is near to it. A test holds the page against this file.
"""

from toolkit.attention import MIXERS
from toolkit.bench.mixers_gpu import SHAPES, modelled_work
from toolkit.measure import published_peak

CHIPS = ("H100", "H200", "B200", "TPU v5e", "TPU v6e")
SHAPE = SHAPES[1]


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
            cells = [f"{work.flops / 1e12:.3f}", f"{work.bytes / 1e9:.2f}"]
            for peak in peaks.values():
                by_flops, by_bytes = work.floor_parts(peak)
                bound = "memory" if by_bytes > by_flops else "products"
                cells.append(f"{1e3 * max(by_flops, by_bytes):.2f} ({bound})")
            lines.append((f"`{row.name}`", *cells))
        title = "## Forward and backward" if backward else "## Forward"
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        tables.append(f"{title}\n\n{table}")
    sources = "\n".join(
        f"* {name}: {peak.flops_per_second / 1e12:,.0f} TFLOP/s in bfloat16, "
        f"{peak.bytes_per_second / 1e12:,.2f} TB/s ({peak.source})"
        for name, peak in peaks.items()
    )
    return f"""# Floors of the kernels

The least time in which a chip could run a mixer whose form is a Pallas kernel: the longer of
products at the published rate and of inputs and results crossing the memory bus once. All figures
are *modelled*, from the formulas of `MIXERS`, for batch {batch}, {time:,} tokens, {heads} heads of
{size} channels, bfloat16; on a GPU `toolkit bench mixers` prints the share of the floor that each
reaches. A gradient counts three times the products of the forward pass. In parentheses what binds.
`python -m toolkit.bench.kernel_floors` writes this page.

{tables[0]}

{tables[1]}

## Peaks

{sources}"""


if __name__ == "__main__":
    print(floors_page())
