"""The check that contenders return the same arrays, which every suite makes before timing."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from toolkit._checks import checked


@checked
def agree(
    tolerance: float, *, norm: Literal["max", "rms"] = "max"
) -> Callable[[Mapping[str, Any]], None]:
    """A check that all contenders return the same arrays.

        norm(a - b) <= tolerance * norm(b)   for every array of every result

    Args:
        tolerance: the relative error allowed.
        norm: "max" for the largest magnitude; "rms" for the root mean square, which suits bfloat16,
            where single numbers have large rounding errors.

    Returns:
        A function of the results by name, for jax, NumPy and torch arrays on any device. What is
        on an accelerator is compared there.

    Source: "rms" is the criterion of flash-linear-attention's tests.

    Example:
        >>> check = agree(1e-6)
        >>> check({"ours": jnp.ones(3), "peer": jnp.ones(3)})
        >>> check({"ours": jnp.ones(3), "peer": jnp.zeros(3)})
        Traceback (most recent call last):
        ValueError: 'peer' and 'ours' disagree: relative error 1.0e+00, wanted at most 1e-06
    """
    size = {
        "max": lambda x: jnp.max(jnp.abs(x)),
        "rms": lambda x: jnp.sqrt(jnp.mean(jnp.square(x))),
    }
    measure = size[norm]

    def check(results: Mapping[str, Any]) -> None:
        names = list(results)
        first = _arrays(results[names[0]])
        if not all(jnp.isfinite(b).all() for b in first):
            raise ValueError(f"{names[0]!r} gave a number that is not finite")
        for name in names[1:]:
            for a, b in zip(_arrays(results[name]), first, strict=True):
                error = float(measure(a - b) / max(float(measure(b)), 1e-30))
                if not error <= tolerance:
                    raise ValueError(
                        f"{name!r} and {names[0]!r} disagree: relative error {error:.1e}, "
                        f"wanted at most {tolerance:.0e}"
                    )

    return check


def finite(results: Mapping[str, Any]) -> None:
    """The check of contenders with different results: no number is infinite or NaN."""
    for name, result in results.items():
        if not all(jnp.isfinite(x).all() for x in _arrays(result)):
            raise ValueError(f"{name!r} gave a number that is not finite")


def _arrays(result: Any) -> list[jax.Array]:
    return [_array(leaf) for leaf in jax.tree.leaves(result)]


def _array(leaf: Any) -> jax.Array:
    if hasattr(leaf, "detach"):  # a torch tensor
        leaf = leaf.detach()
        leaf = jnp.from_dlpack(leaf.contiguous()) if leaf.is_cuda else leaf.float().numpy()
    return jnp.asarray(leaf, jnp.float32)
