"""What `implementation=None` means: the best form that a record shows, platform by platform.

A form that nobody has measured is not claimed to be the best: a kernel ("pallas", "cudnn",
"splash") must be asked for by name until a record in data/measurements shows what it gains on its
platform and a row here cites it. Until then our own kernels, "pallas", are experimental and warn
so. A kernel has a gradient and no other derivative, and XLA cannot cut it over devices: it is
chosen where the process has one device, and what it refuses, float32 say, runs in the form of any
platform. Below some length the forms of XLA differ by little and are chosen by length
(`DENSE_UP_TO`); NSA and DSA count what their two forms cost.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax


class Known(NamedTuple):
    """A form known to be the best of a family on a platform."""

    # "softmax", "recurrent" for all mixers with a state, or "latent" for a step of latent
    # attention; without a row for any platform it is the form of XLA
    family: str
    # "cpu", "cuda", "tpu" or "rocm"; None for all that have no row of their own
    platform: str | None
    implementation: str  # the form
    record: str  # file in data/measurements
    case: str  # the case in it, with its contenders: the form, and what it is faster than
    form: str  # the name of the form there
    slower: str  # the name of what it is faster than


BEST_KNOWN = (
    Known(
        "softmax",
        None,
        "blockwise",
        "amd-epyc-2-cores/softmax.json",
        "softmax forward+backward causal B=1 T=2048 H=8 D=64 float32 | 1 cores",
        "toolkit, blockwise",
        "jax.nn",
    ),
    Known(
        "softmax",
        "cuda",
        "cudnn",
        "nvidia-h100/accelerator.json",
        "softmax forward+backward causal B=4 T=4096 H=16/4 D=128 bfloat16 | 1 cores",
        "toolkit, cudnn",
        "toolkit, blockwise",
    ),
    Known(
        "recurrent",
        "cuda",
        "pallas",
        "nvidia-h100/accelerator.json",
        "gdn forward+backward B=2 T=16384 H=16 D=128 bfloat16 | 1 cores",
        "toolkit, pallas",
        "toolkit, xla",
    ),
    Known(
        "latent",
        "cuda",
        "pallas",
        "nvidia-h100/accelerator.json",
        "latents of 576, H=16 B=8 context=32768 bfloat16 | 1 cores",
        "toolkit, pallas",
        "toolkit, xla",
    ),
    Known(
        "recurrent",
        None,
        "xla",
        "amd-epyc-2-cores/mixers.json",
        "gdn forward+backward B=1 T=2048 H=8 D=64 float32 | 2 cores",
        "toolkit, chunked",
        "toolkit, token scan",
    ),
)


def in_best_form(
    family: str,
    implementation: str | None,
    form: Callable[[str], Callable[..., Any]],
    *args: Any,
    known: Sequence[Known] = BEST_KNOWN,
) -> Any:
    """form(implementation)(*args); None for the best known of the platform that runs it."""
    if implementation is not None:
        return form(implementation)(*args)
    forms = {row.platform: form(row.implementation) for row in known if row.family == family}
    default, here = forms[None] if None in forms else form("xla"), _platform()
    # What this process cannot run need not be traced.
    if here not in forms or jax.device_count() > 1 or not _takes(forms[here], args):
        return default(*args)
    return lax.platform_dependent(*args, **{here: forms[here]}, default=default)


def _platform() -> str:
    return {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())


def _takes(run: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a form does not refuse these arguments."""
    try:
        jax.eval_shape(run, *args)
    except (NotImplementedError, TypeError, ValueError):
        return False
    return True


def warn_experimental(family: str, known: Sequence[Known] = BEST_KNOWN) -> None:
    """Warn that kernels are experimental, until a record of this platform is cited."""
    here = _platform()
    if not any(row[:3] == (family, here, "pallas") for row in known):
        warnings.warn(
            f'implementation="pallas" is experimental: no record shows what the "{family}" kernels '
            f'gain on {here}, or that they were run there; implementation="xla" is tested.',
            stacklevel=2,
        )
