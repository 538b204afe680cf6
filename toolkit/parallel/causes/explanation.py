"""A compiled program explained, to print and to draw."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax.sharding import Mesh

from toolkit.measure import in_words
from toolkit.measure.tables import text_table
from toolkit.parallel.causes.cause import ExplainedCollective, MemoryRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Explanation:
    """A compiled program explained: `print` it, or `draw` it.

    Attributes:
        mesh: the devices; None for a program of one device.
        collectives: each communication with its cause, in program order.
        memory: bytes per device by category.

    Example:
        >>> x = jnp.ones((8, 8))
        >>> explanation = explain(jax.jit(jnp.dot).lower(x, x).compile())
        >>> [row.compiled for row in explanation.memory if row.category == "all arguments"]
        [512]
    """

    mesh: Mesh | None
    collectives: tuple[ExplainedCollective, ...]
    memory: tuple[MemoryRow, ...]

    @property
    def bytes_sent(self) -> float:
        """Bytes a device sends per execution of the program."""
        return sum(item.collective.total_bytes_sent for item in self.collectives)

    def __str__(self) -> str:
        """The explanation as text: a line for the mesh, a table of causes, a table of memory."""
        axes = "one device"
        if self.mesh is not None:
            axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        if not self.collectives:
            return f"mesh: {axes}; no collectives\n\n{self._memory_table()}"
        rows = [("", "collective", "over", "bytes", "runs", "sent", "line", "cause")]
        for number, item in enumerate(self.collectives, 1):
            collective = item.collective
            row = (
                f"{number}",
                collective.kind,
                "+".join(item.axes) or "?",
                f"{collective.bytes:,}",
                f"{'' if collective.is_count_exact else '~'}{collective.count}",
                f"{collective.total_bytes_sent:,.0f}",
                item.source,
                f"{item.before} -> {item.after}: {item.origin} -> {item.wanted_by}",
            )
            rows.append(row)
        head = f"mesh: {axes}; a device sends {in_words(self.bytes_sent, 'bytes')} (compiled)"
        return f"{head}\n{text_table(rows, '<<<>>><<')}\n\n{self._memory_table()}"

    def draw(self) -> "Figure":
        """Two bar charts: bytes sent by each collective with its cause, and memory by category."""
        from toolkit.parallel.causes.drawing import draw_explanation

        return draw_explanation(self.collectives, self.memory)

    def _memory_table(self) -> str:
        rows = [("bytes per device", "predicted", "compiled")]
        for row in self.memory:
            predicted, compiled = (
                "" if size is None else f"{size:,}" for size in (row.predicted, row.compiled)
            )
            rows.append((row.category, predicted, compiled))
        return text_table(rows, "<>>")
