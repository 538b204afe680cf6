r"""PQCache with keys and values in host memory: what crosses the link, and what hides the transfer.

The accelerator keeps the sinks, the recent tokens and a cache of blocks. A layer's step

    codes and centroids of the next layer         sent while this one computes
    keys and values of the selected tokens        sent once they are known, those cached left out

so that, with B bytes over a link of r bytes per second,

    seconds = compute + max(0, B_index / r - compute) + B_fetched / r

The cache holds the blocks whose tokens were selected most often so far (least frequently used goes
first). k-means runs on the host while the accelerator reads the rest of the prompt, for as many
iterations as that hides.

Source: Zhang et al. (2025), arXiv:2407.12820, and the released code for its constants.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from toolkit._checks import checked
from toolkit.attention._checks import check_choice, check_count

LEAST_ITERATIONS, MOST_ITERATIONS = 3, 300


class Offloaded(NamedTuple):
    """One layer's step with its keys and values on the host.

    Attributes:
        index_bytes: codes and centroids, of all key-value heads.
        fetched_bytes: keys and values that the accelerator lacks, likewise.
        seconds: of the step.
        hidden: share of the link's time that passes while something computes.

    Example:
        >>> Offloaded(100, 300, seconds=2.0, hidden=0.25).fetched_bytes
        300
    """

    index_bytes: int
    fetched_bytes: int
    seconds: float
    hidden: float


@checked
def offloaded_step(
    length: int, fetched: int, *,
    link: float, compute: float = 0.0, key: int = 128, value: int = 128, key_value_heads: int = 1,
    parts: int = 2, bits: int = 6, itemsize: int = 2,
) -> Offloaded:  # fmt: skip
    """Bytes over the host link and seconds of one layer's step.

        B_index   = heads (length parts bits / 8 + 2^bits key itemsize)
        B_fetched = heads fetched (key + value) itemsize

    Args:
        length: tokens seen so far.
        fetched: tokens per head that are selected and not on the accelerator: all selected ones
            times 1 - the share that `cached_share` finds.
        link: bytes per second between host and accelerator.
        compute: seconds that a layer computes, during which the next one's index is sent.
        key: size of a key.
        value: size of a value.
        key_value_heads: heads of keys and values.
        parts: groups that the channels of a key are cut into.
        bits: of a code, packed.
        itemsize: bytes of a number.

    Returns:
        An `Offloaded`.

    Source: Zhang et al. (2025), arXiv:2407.12820, section 3.

    Example:
        >>> step = offloaded_step(131072, 2048, link=25e9)
        >>> step.index_bytes, step.fetched_bytes, round(1e6 * step.seconds)
        (212992, 1048576, 50)
    """
    for name, number in (("length", length), ("fetched", fetched)):
        check_count(name, number, 0)
    sizes = {"key": key, "value": value, "key_value_heads": key_value_heads, "parts": parts}
    for name, number in sizes.items():
        check_count(name, number, 1)
    check_choice("bits", bits, range(1, 17))
    check_choice("itemsize", itemsize, (1, 2, 4, 8))
    if not link > 0:
        raise ValueError(f"link must be above 0 bytes per second; got {link}.")
    if compute < 0:
        raise ValueError(f"compute must be at least 0 seconds; got {compute}.")
    if fetched > length:
        raise ValueError(f"fetched must be at most length, {length}; got {fetched}.")
    codes = -(-length * parts * bits // 8)
    index = key_value_heads * (codes + 2**bits * key * itemsize)
    fetch = key_value_heads * fetched * (key + value) * itemsize
    sent = (index + fetch) / link
    hidden = min(index / link, compute)
    return Offloaded(index, fetch, compute + sent - hidden, hidden / sent)


@checked
def cached_share(
    selected: Int[np.ndarray, "steps tokens"], length: int, *, block: int = 128, blocks: int = 32
) -> Float[np.ndarray, "steps"]:
    """Share of each step's selected tokens that are already in a cache of the most used blocks.

    After every step the cache holds the `blocks` blocks whose tokens were selected most often since
    the first; of equal ones the first. It is empty at the start.

    Args:
        selected: tokens that each step of one head selects [steps, tokens].
        length: number of tokens.
        block: tokens of a block.
        blocks: capacity of the cache; 32 blocks of 128 are the release's 4096 tokens.

    Returns:
        Shares [steps].

    Example:
        >>> import numpy as np
        >>> cached_share(np.array([[0, 1], [0, 9], [9, 1]]), 16, block=4, blocks=1).tolist()
        [0.0, 0.5, 0.5]
    """
    for name, number in (("length", length), ("block", block), ("blocks", blocks)):
        check_count(name, number, 1)
    if length > 2**28:
        raise ValueError(f"length must be at most {2**28} tokens; got {length}.")
    if not selected.size or selected.min() < 0 or selected.max() >= length:
        raise ValueError(
            f"selected must hold tokens from 0 to {length - 1}; got shape {selected.shape}"
            + (f", {selected.min()} to {selected.max()}." if selected.size else ".")
        )
    uses = np.zeros(-(-length // block), np.int64)
    is_held = np.zeros(len(uses), bool)
    shares = np.empty(len(selected))
    for step, tokens in enumerate(selected):
        shares[step] = is_held[tokens // block].mean()
        np.add.at(uses, tokens // block, 1)
        kept = np.argsort(-uses, kind="stable")[:blocks]
        is_held[:] = False
        is_held[kept[uses[kept] > 0]] = True
    return shares


@checked
def hidden_iterations(prefill: float, first: float, iteration: float) -> int:
    """Iterations of k-means on the host that take no longer than reading the prompt.

        T = clip((t_prefill - t_3) / t_1 + 3, 3, 300)

    Args:
        prefill: seconds in which the accelerator reads the prompt.
        first: seconds of the first three iterations, set-up included.
        iteration: seconds of each further iteration.

    Returns:
        A whole number from 3 to 300.

    Source: the released code of PQCache; its times are regressions in the prompt's length.

    Example:
        >>> hidden_iterations(prefill=2.0, first=0.5, iteration=0.1)
        18
    """
    for name, seconds in (("prefill", prefill), ("first", first)):
        if seconds < 0:
            raise ValueError(f"{name} must be at least 0 seconds; got {seconds}.")
    if not iteration > 0:
        raise ValueError(f"iteration must be above 0 seconds; got {iteration}.")
    wanted = (prefill - first) / iteration + LEAST_ITERATIONS
    return int(min(max(wanted, LEAST_ITERATIONS), MOST_ITERATIONS))
