"""State-based recall: memory addressed by pointers that are swapped before the question."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from toolkit.experiments.tasks.batch import Batch

POINTERS = 5
PAD, INIT, OPS, QUERY, BIT, POINTER, ADDRESS = 0, 1, 2, 3, 4, 6, 11
"""Numbers of tokens: BIT and BIT + 1 are the bits, POINTER.. the five variables, ADDRESS..
the addresses."""
PASS = 0.90
"""Accuracy at which a number of cells is passed; ignoring the swaps gives about 0.6."""


@dataclasses.dataclass(frozen=True)
class StateBasedRecall:
    """Follow five pointers through swaps, then read the memory at one of them.

        b_0 .. b_{n-1} INIT p a_p (five times) OPS p q (m swaps) QUERY p      answer: the bit

    Solving it takes both halves: tracking a state (the swaps) and recall (the bit at an address).

    Attributes:
        cells: n, bits of memory; as many addresses.
        swaps: m, swaps of two different pointers (None: as many as cells).
        most_cells: n of the last stage, which fixes the vocabulary (None: `cells`).

    Source: Olmo Hybrid (arXiv:2604.03444), state-based recall; LT2's curriculum is n = m from 8
        to 256.
    """

    cells: int
    swaps: int | None = None
    most_cells: int | None = None

    def __post_init__(self):
        if self.cells < POINTERS:
            raise ValueError(f"cells: got {self.cells}, wanted at least {POINTERS} addresses")
        if (self.most_cells or self.cells) < self.cells or self.operations < 1:
            raise ValueError(
                f"most_cells, swaps: got {self.most_cells}, {self.swaps}, wanted at least "
                f"{self.cells} and 1"
            )

    @property
    def operations(self) -> int:
        """The number of swaps."""
        return self.cells if self.swaps is None else self.swaps

    @property
    def vocabulary(self) -> int:
        """Padding, three words, two bits, five pointers, addresses."""
        return ADDRESS + (self.most_cells or self.cells)

    @property
    def length(self) -> int:
        """n + 2 m + 14."""
        return self.cells + 2 * self.operations + 14

    def draw(self, key: Array, batch: int) -> Batch:
        """Sequences with the question at the last position; see the class."""
        return self.draw_with_moves(key, batch)[0]

    def draw_with_moves(self, key: Array, batch: int) -> tuple[Batch, Bool[Array, "batch"]]:
        """`draw`, and whether the queried pointer ended at another address than it began."""
        tokens, answers, has_moved = self._sequences(key, batch, 1.0)
        return self._asked_at_the_end(tokens, answers), has_moved

    def draw_easier(self, key: Array, batch: int, share: float | Array) -> Batch:
        """A step on the way to the task: that share of the swaps, and hints.

        Padding stands in place of the last swaps. Behind a declaration "p a" the bit at a is asked
        for. In a swap "p q", p asks for the bit at p's current address, like the question, and q
        for its new address, which tells more about the state than one bit.
        """
        tokens, answers, _ = self._sequences(key, batch, share)
        return Batch(tokens, answers, answers > 0)

    def _asked_at_the_end(self, tokens: Array, answers: Array) -> Batch:
        mask = jnp.broadcast_to(jnp.arange(self.length) == self.length - 1, tokens.shape)
        return Batch(tokens, jnp.where(mask, answers, 0), mask)

    def _sequences(
        self, key: Array, batch: int, share: float | Array
    ) -> tuple[Int[Array, "batch time"], Int[Array, "batch time"], Bool[Array, "batch"]]:
        """Tokens, the question and hints at every position (0 where there is none), what moved."""
        for_bits, for_start, for_swaps, for_query = jax.random.split(key, 4)
        bits = jax.random.bernoulli(for_bits, shape=(batch, self.cells)).astype(jnp.int32)
        order = jax.random.uniform(for_start, (batch, self.cells)).argsort(axis=1)
        start = order[:, :POINTERS].astype(jnp.int32)
        first, second = jax.random.split(for_swaps)
        p = jax.random.randint(first, (batch, self.operations), 0, POINTERS)
        offset = jax.random.randint(second, (batch, self.operations), 1, POINTERS)
        q = (p + offset) % POINTERS  # another pointer than p, uniformly
        is_done = jnp.arange(self.operations) < self.operations * share
        # A pointer swapped with itself changes nothing.
        end, given = _swapped(start, p, jnp.where(is_done, q, p))
        queried = jax.random.randint(for_query, (batch, 1), 0, POINTERS)
        final = jnp.take_along_axis(end, queried, axis=1)

        def word(token: int) -> Int[Array, "batch one"]:
            return jnp.full((batch, 1), token)

        def bit_at(address: Int[Array, "batch count"]) -> Int[Array, "batch count"]:
            return BIT + jnp.take_along_axis(bits, address, axis=1)

        def behind(first: Array, second: Array) -> Int[Array, "batch pairs"]:
            return jnp.stack([first, second], 2).reshape(batch, -1)

        names = jnp.broadcast_to(POINTER + jnp.arange(POINTERS), (batch, POINTERS))
        swaps = behind(*(jnp.where(is_done, POINTER + pointer, PAD) for pointer in (p, q)))
        hints = (jnp.where(is_done, hint, 0) for hint in (bit_at(given), ADDRESS + given))
        tokens = [BIT + bits, word(INIT), behind(names, ADDRESS + start), word(OPS), swaps]
        answers = [jnp.zeros_like(bits), word(0), behind(0 * names, bit_at(start)), word(0)]
        answers += [behind(*hints), word(0), bit_at(final)]
        tokens = jnp.concatenate([*tokens, word(QUERY), POINTER + queried], axis=1)
        has_moved = (final != jnp.take_along_axis(start, queried, axis=1))[:, 0]
        return tokens.astype(jnp.int32), jnp.concatenate(answers, axis=1), has_moved


def _swapped(
    addresses: Int[Array, "batch pointers"],
    p: Int[Array, "batch operations"],
    q: Int[Array, "batch operations"],
) -> tuple[Int[Array, "batch pointers"], Int[Array, "batch operations"]]:
    """Addresses after exchanging those of p[:, i] and q[:, i] in turn, and what each gave q."""
    row = jnp.arange(len(addresses))

    def swap(cells: Array, pair: tuple[Array, Array]) -> tuple[Array, Array]:
        a, b = pair
        cells = cells.at[row, a].set(cells[row, b]).at[row, b].set(cells[row, a])
        return cells, cells[row, b]

    end, given = jax.lax.scan(swap, addresses, (p.T, q.T))
    return end, given.T
