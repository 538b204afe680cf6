"""Every recurrent mixer: its chunks against its own token scan, transformers and the machine.

What `toolkit bench mixers` runs on a CPU: per mixer, sequences forward and backward (here), a step
of decoding (`mixer_steps.py`) and sequences that double (`linear_time.py`). On a GPU it runs the
shapes that flash-linear-attention publishes (`mixers_gpu.py`). Suite `gdn` times one of them the
way a user calls it, and longer.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from toolkit.attention import MIXERS, Mixer, mixer
from toolkit.bench.agreement import agree
from toolkit.bench.harness import Case, PlannedCase, Yardstick, bound
from toolkit.bench.mixers import gpu as mixers_gpu
from toolkit.bench.mixers import linear_time
from toolkit.bench.mixers import steps as mixer_steps
from toolkit.bench.mixers.inputs import direction, mixer_form, mixer_inputs, output_weight
from toolkit.bench.mixers.matrix_products import matrix_flops
from toolkit.bench.mixers.transformers_forms import transformers_form
from toolkit.bench.peers import plain_and_spread, torch_contender

TIME, HEADS = 2048, 8
FORWARD_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3
OURS, SCAN, PEER = "toolkit, chunked", "toolkit, token scan", "transformers, torch"
GDN_PEER = "transformers, torch chunk"
# Least ratios wanted, of the other's time over ours, forward+backward.
WANTED = {SCAN: 10.0, PEER: 3.0}
# Head sizes, and the least fraction wanted of the machine's matmul rate.
SIZES: dict[int, float | None] = {64: None, 128: 0.5}
MATMUL = "float32 matmul rate"
MATMUL_SIZE = 1024
CHECKED_TOKENS = 256
# Suite gdn: (time, heads, head size) -> least ratios wanted of transformers' time over ours.
GDN_SHAPES = {
    (2048, 8, 64): {"forward": 4.0, "forward+backward": 4.0},
    (2048, 4, 128): {"forward": 4.0, "forward+backward": 4.0},
    (8192, 8, 64): {"forward+backward": 8.0},
    (8192, 4, 128): {"forward+backward": 8.0},
}
MOST_SCANNED = 2048  # tokens: the gradient of a longer scan would keep 3 GB of states


def recurrent_rows() -> list[Mixer]:
    """The rows of `MIXERS` that keep a state of fixed size."""
    return [row for row in MIXERS.values() if row.is_recurrent]


def cases(cores: int) -> Iterator[PlannedCase]:
    """The whole suite: sequences, steps and doubled sequences; on a GPU, fla's shapes."""
    if jax.default_backend() == "gpu":
        yield from mixers_gpu.cases(recurrent_rows())
        return
    for row in recurrent_rows():
        for size in SIZES:
            for backward in (False, True):
                yield PlannedCase(
                    f"{row.name} {direction(backward)} B=1 T={TIME} H={HEADS} D={size} float32",
                    partial(sequence_case, row, TIME, size, cores, backward=backward),
                )
    yield from mixer_steps.cases(recurrent_rows())
    yield from linear_time.cases(recurrent_rows())


def sequence_case(
    row: Mixer, time: int, size: int, cores: int, name: str, *, backward: bool
) -> Case:
    """One mixer on one shape, all contenders on the same cores and the same inputs.

    The token scan takes part at head size 64 only: its gradient keeps a state per token.
    """
    arrays = mixer_inputs(row, time, HEADS, size)
    weight = output_weight(row, arrays)
    args = (weight, *arrays) if backward else tuple(arrays)
    form = partial(mixer_form, row, backward=backward)
    contenders = plain_and_spread(OURS, form(implementation=None), args, cores)
    ours = list(contenders)[-1]
    if size <= 64:
        scan = plain_and_spread(SCAN, form(implementation="scan"), args, cores)
        contenders[SCAN] = scan.popitem()[1]
    if (peer := _transformers(row, arrays, weight if backward else None, cores)) is not None:
        contenders[PEER] = peer
    if backward:
        flops = matrix_flops(mixer_form(row, "xla", backward=True), *args)
        how = "matrix products counted in the program"
    else:
        flops = row.forward_flops(1, time, HEADS, size, size, **row.options)
        how = "modelled work"
    return Case(
        name=name,
        contenders=contenders,
        check=_check(row, args, backward, alone=SCAN not in contenders and PEER not in contenders),
        ours=ours,
        targets=WANTED if backward else {},
        note=f"{how}: {flops / 1e9:.2f} GFLOP; the token scan after use_cores(), torch on "
        f"{cores} threads",
        yardstick=matmul_yardstick(flops, SIZES.get(size)),
    )


def gated_delta_net_cases(cores: int) -> Iterator[PlannedCase]:
    """Forward and forward+backward at each of `GDN_SHAPES`: suite `gdn`."""
    for time, heads, size in GDN_SHAPES:
        for backward in (False, True):
            yield PlannedCase(
                f"gated_delta_net {direction(backward)} B=1 T={time} H={heads} D={size} float32",
                partial(_gated_delta_net_case, (time, heads, size), cores, backward),
            )


def _gated_delta_net_case(
    shape: tuple[int, int, int], cores: int, backward: bool, name: str
) -> Case:
    row, (time, heads, size) = mixer("gdn"), shape
    arrays = mixer_inputs(row, time, heads, size)
    weight = output_weight(row, arrays)
    args = (weight, *arrays) if backward else tuple(arrays)
    chunked, scan = (mixer_form(row, form, backward=backward) for form in ("xla", "scan"))
    contenders = plain_and_spread(OURS, chunked, args, cores)
    best = list(contenders)[-1]
    if not (backward and time > MOST_SCANNED):
        contenders[SCAN] = bound(jax.jit(scan), args)
    if (peer := _transformers(row, arrays, weight if backward else None, cores)) is not None:
        contenders[GDN_PEER] = peer
    targets = {SCAN: 1.0}
    if (ratio := GDN_SHAPES[shape].get(direction(backward))) is not None:
        targets[GDN_PEER] = ratio
    flops = row.forward_flops(1, time, heads, size, size)
    return Case(
        name=name,
        contenders=contenders,
        check=agree(GRADIENT_TOLERANCE if backward else FORWARD_TOLERANCE),
        ours=best,
        targets=targets,
        note=f"modelled forward work: {flops / 1e9:.2f} GFLOP",
    )


def _transformers(
    row: Mixer, arrays: list[jax.Array], weight: jax.Array | None, threads: int
) -> Callable[[], Any] | None:
    """The peer, where transformers has the mixer."""
    if (form := transformers_form(row.name)) is None:
        return None
    cotangent = None if weight is None else np.asarray(weight)
    return torch_contender(form, [np.asarray(x) for x in arrays], cotangent, threads)


def matmul_yardstick(flops: float, least: float | None) -> Yardstick:
    """This machine's float32 matmul rate, on all cores of the process."""
    square = jnp.ones((MATMUL_SIZE, MATMUL_SIZE))
    return Yardstick(
        name=MATMUL,
        call=bound(jax.jit(jnp.matmul), (square, square)),
        work=2 * MATMUL_SIZE**3,
        ours=flops,
        unit="FLOP",
        least=least,
    )


def _check(
    row: Mixer, args: tuple[jax.Array, ...], backward: bool, *, alone: bool
) -> Callable[[Mapping[str, Any]], None]:
    """All contenders agree; one alone is held against the token scan of its first tokens."""
    judge = agree(GRADIENT_TOLERANCE if backward else FORWARD_TOLERANCE)

    def against_scan(_: Mapping[str, Any]) -> None:
        short = [x[:, :CHECKED_TOKENS] for x in args]
        judge(
            {
                name: jax.jit(mixer_form(row, form, backward=backward))(*short)
                for name, form in ((OURS, "xla"), (SCAN, "scan"))
            }
        )

    return against_scan if alone else judge
