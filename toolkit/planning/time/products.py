"""How fast chips multiply: published rates by kind of number, and the waves of a GPU's tiles.

A GPU cuts the result of a product into tiles, one per multiprocessor at a time: of n tiles on p
multiprocessors the last of ceil(n / p) waves may be nearly empty, but takes as long as a full one.

Source: NVIDIA, Matrix Multiplication Background User's Guide, 2023, on tile and wave quantisation.
"""

import functools
import math

from toolkit.looped import LoopedConfig
from toolkit.measure import Peak
from toolkit.planning.memory.sizes import layer_tensors

HAS_FLOAT8 = (
    "L4", "L40S", "H100", "H800", "H20", "H200", "B200", "GB200", "B300", "GB300", "MI300X",
    "TPU v7x", "TPU7x",
)  # fmt: skip
# NVIDIA's white papers and data sheets. Without a row, tiles are not counted.
MULTIPROCESSORS = {
    "A100 40GB SXM": 108, "A100 80GB SXM": 108, "A100 40GB PCIe": 108, "A100 80GB PCIe": 108,
    "H100 SXM": 132, "H100 PCIe": 114, "H100 NVL": 132, "H800 SXM": 132, "H200 SXM": 132,
    "H200 NVL": 132, "H20": 78,
}  # fmt: skip
TILES = ((256, 128), (128, 256), (128, 128))
# float16 without tensor cores, over with them: NVIDIA A100 white paper, 78 and 312 TFLOP/s. Batched
# products of rows that are no multiple of 16 bytes long do not reach them.
UNALIGNED, ALIGNMENT = 4.0, 8


def product_rate(chip: Peak, kind: str) -> float:
    """FLOPs per second of products; of float8 twice the rate of bfloat16, where chips have it."""
    has = any(chip.name == name or chip.name.startswith(f"{name} ") for name in HAS_FLOAT8)
    return chip.flops_per_second * (2 if kind != "bfloat16" and has else 1)


@functools.lru_cache(maxsize=1 << 16)
def waves(config: LoopedConfig, word: str, fed: str, tensor: int, tokens: int, chip: str) -> float:
    """Time of a layer's products, forward, over that of full waves."""
    processors, work, took = MULTIPROCESSORS.get(chip), 0, 0.0
    for shape, cut in layer_tensors(config, word, fed):
        if processors and len(shape) == 2:
            inner, columns = (n // tensor if i == cut else n for i, n in enumerate(shape))
            work += inner * tokens * columns
            took += inner * min(_passed(tokens, columns, *tile, processors) for tile in TILES)
    return took / work if work else 1.0


def _passed(rows: int, columns: int, height: int, width: int, processors: int) -> float:
    """Numbers of a result, with those that full waves would have had too. Tiles of few rows are
    less high, and few tiles divide the inner dimension (split-K)."""
    height = min(height, rows)
    tiles = -(-rows // height) * -(-columns // width)
    parts = max(1, processors // tiles)
    return math.ceil(tiles * parts / processors) * processors / parts * height * width
