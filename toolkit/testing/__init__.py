"""The contract of token mixers, for mixers of other packages.

check_mixer     run all of it on a row, and on its layer

sequences.py    of every mixer: value and gradient, precision, steps, causality, documents, NaN
states.py       of those with a state of one size: groups, documents, gates at their limits
layers.py       of a layer in a looped model: steps, causality, a training step
"""

from collections.abc import Callable
from typing import Any

import jax

from toolkit._checks import checked
from toolkit.attention import Mixer
from toolkit.testing.sequences import sequence_contracts
from toolkit.testing.states import state_contracts

DEVICES = 4


@checked
def check_mixer(row: Mixer, *, word: str | None = None, is_grouped: bool = True) -> list[str]:
    """Run the whole contract of token mixers on your own mixer.

    Its functions are compared with its `reference`, in float64 and bfloat16, at odd lengths and at
    one token; with themselves in pieces and steps, packed, under `vmap` and `shard_map`; and with
    NaN and infinities in places that must not matter.

    Args:
        row: a row as for `toolkit.attention.register`; if it selects tokens, with options so small
            that most of a sequence of 37 tokens is not seen.
        word: its layer's word in `toolkit.looped.LAYERS`, to run the contract of layers too.
        is_grouped: whether fewer heads of q and k than of v are allowed.

    Returns:
        The names of the contracts that hold.

    Raises:
        AssertionError: when contracts are broken; names each with its first line.
        RuntimeError: with fewer than four devices; call `toolkit.parallel.simulate_devices(4)`
            first.

    Cost: About a minute on two cores, most of it compilation.

    Example:
        >>> from toolkit.attention import MIXERS
        >>> holds_everywhere = lambda: check_mixer(MIXERS["full"], word="full")
    """
    if len(jax.devices()) < DEVICES:
        raise RuntimeError(
            f"check_mixer wants {DEVICES} devices and jax has {len(jax.devices())}: call "
            f"toolkit.parallel.simulate_devices({DEVICES}) first"
        )
    contracts: dict[str, tuple[Callable[[Any], None], Any]] = {
        name: (contract, row) for name, contract in sequence_contracts().items()
    }
    if row.is_recurrent:
        found = state_contracts(is_grouped=is_grouped)
        contracts |= {name: (contract, row) for name, contract in found.items()}
    if word is not None:
        from toolkit.testing.layers import layer_contracts

        contracts |= {f"layer_{n}": (contract, word) for n, contract in layer_contracts().items()}
    kept, broken = [], []
    for name, (contract, given) in contracts.items():
        try:
            if given is row:
                with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
                    contract(given)
            else:
                contract(given)
            kept.append(name)
        except Exception as error:  # an assertion, or whatever the mixer raises
            line = next((line for line in str(error).splitlines() if line.strip()), "")
            broken.append(f"{name}: {type(error).__name__} {line.strip()}")
    if broken:
        raise AssertionError(
            f"{row.name}: {len(broken)} of {len(contracts)} contracts do not hold\n"
            + "\n".join(broken)
        )
    return kept


__all__ = ["check_mixer"]
