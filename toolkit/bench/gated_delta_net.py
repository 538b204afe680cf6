"""Gated DeltaNet against its own token scan and against Hugging Face's PyTorch form."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from toolkit.attention import gated_delta_net, mixer
from toolkit.bench.agreement import agree
from toolkit.bench.harness import Case, bound, weighted_gradient
from toolkit.bench.mixer_inputs import mixer_inputs
from toolkit.bench.peers import over_heads, torch_contender
from toolkit.bench.transformers_forms import transformers_form

FORWARD_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3

# (time, heads, head size) -> least ratios wanted of transformers' time over ours.
SHAPES = {
    (2048, 8, 64): {"forward": 4.0, "forward+backward": 4.0},
    (2048, 4, 128): {"forward": 4.0, "forward+backward": 4.0},
    (8192, 8, 64): {"forward+backward": 8.0},
    (8192, 4, 128): {"forward+backward": 8.0},
}


def _form(implementation: str) -> Callable[..., jax.Array]:
    return lambda *args: gated_delta_net(*args, implementation=implementation)[0]


def cases(cores: int) -> Iterator[Case]:
    """Forward and forward+backward at each of `SHAPES`.

    Args:
        cores: cores this process may use; heads are spread over as many host devices.

    Returns:
        The comparisons.

    Source:
        Peer: `torch_chunk_gated_delta_rule`, transformers (Qwen3-Next).
    """
    for (time, heads, size), wanted in SHAPES.items():
        arrays = tuple(mixer_inputs(mixer("gdn"), time, heads, size))
        weight = jax.random.normal(jax.random.key(1), arrays[2].shape)
        flops = mixer("gdn").forward_flops(1, time, heads, size, size)

        chunked, scan = _form("xla"), _form("scan")
        for direction in ("forward", "forward+backward"):
            backward = direction == "forward+backward"

            def ours(form: Callable[..., jax.Array], backward: bool = backward) -> Callable:
                return weighted_gradient(form, 5) if backward else form

            args = (weight, *arrays) if backward else arrays
            contenders: dict[str, Callable[[], Any]] = {}
            contenders["toolkit, chunked"] = bound(jax.jit(ours(chunked)), args)
            if cores > 1:
                contenders["toolkit, chunked, heads on devices"] = over_heads(
                    ours(chunked), args, cores
                )
            if not (backward and time > 2048):  # the scan would keep 3 GB of states
                contenders["toolkit, token scan"] = bound(jax.jit(ours(scan)), args)
            if (form := transformers_form("gdn")) is not None:
                contenders["transformers, torch chunk"] = torch_contender(
                    form,
                    [np.asarray(x) for x in arrays],
                    np.asarray(weight) if backward else None,
                    cores,
                )
            best = "toolkit, chunked, heads on devices" if cores > 1 else "toolkit, chunked"
            yield Case(
                name=f"gated_delta_net {direction} B=1 T={time} H={heads} D={size} float32",
                contenders=contenders,
                check=agree(GRADIENT_TOLERANCE if backward else FORWARD_TOLERANCE),
                ours=best,
                targets={
                    "toolkit, token scan": 1.0,
                    **(
                        {"transformers, torch chunk": wanted[direction]}
                        if direction in wanted
                        else {}
                    ),
                },
                note=f"modelled forward work: {flops / 1e9:.2f} GFLOP",
            )
