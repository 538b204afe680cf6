"""What a message costs on chips and links.

A message of n numbers on a chip with memory bandwidth M and links of rate L costs

    encode   (4 + w) n / M        reads float32, writes w bytes per number; sparse: 16 n / M
    send     per collective (D - 1) delay + bytes / L; the second encoding, (4 + w) n / M
    decode   (4 + w) n / M
"""

from collections.abc import Callable

from toolkit.measure import Link
from toolkit.parallel.gradients import Exchange
from toolkit.parallel.gradients.peers import Along, Peers
from toolkit.planning.gradients.lanes import Cost
from toolkit.planning.time.seconds import Constants
from toolkit.planning.time.step import transfer_seconds

SORT_BYTES = 16  # read and written per number to find the largest


def message_cost(
    exchange: Exchange,
    along: Along,
    numbers: float,
    link_of: Callable[[Peers], Link],
    rate: float,
    constants: Constants,
    *,
    is_scattered: bool = False,
) -> Cost:
    """Seconds of one message of so many numbers, on chips that read and write `rate` bytes/s."""
    row, how = exchange.of_gradients, exchange.how
    length = max(1, int(numbers) // along.peers.size)
    scatters = how.scatter_sends if is_scattered else None
    send = sum(
        transfer_seconds(link_of(peers), sent, peers.size, constants)
        for peers, sent in (scatters or how.sends)(row, along, length)
        if peers.size > 1
    )
    if row.name == "float32":
        return Cost(0.0, send)
    if exchange.pattern == "far":  # the near sums are dense
        numbers /= along.near.size
    if row.is_sparse or row.is_linear:
        return Cost(SORT_BYTES * numbers / rate, send)
    once = (4 + row.payload_bytes(max(1, int(numbers))) / max(1, numbers)) * numbers / rate
    own = once + (8 * numbers / rate if exchange.memory is not None else 0)
    is_encoded_twice = exchange.pattern != "gather" and not scatters
    return Cost(own, send + is_encoded_twice * once, once)
