"""The handcrafted schedules of a shape, recognised by its placement: seeds of a search."""

from collections.abc import Iterator

from toolkit.schedules.chunked_orders import breadth_first, dual_pipe_v, interleaved, zero_bubble_v
from toolkit.schedules.orders import gpipe, one_forward_one_backward, zero_bubble_h1, zero_bubble_h2
from toolkit.schedules.schedule import Schedule, Task
from toolkit.schedules.search.shapes import Shape


def handcrafted(shape: Shape, microbatches: int) -> list[Schedule]:
    """The known schedules of a shape's placement; `search_schedule` begins with them.

    Those of a chain, of loops and of a V are recognised. A schedule with whole backward passes is
    also one of a shape with halves.

    Args:
        shape: the blocks of one microbatch, such as `shape_of` makes.
        microbatches: how many.

    Returns:
        The schedules; none for other placements.

    Example:
        >>> from toolkit.schedules import gpipe
        >>> [each.name for each in handcrafted(shape_of(gpipe(2, 4)), 4)]
        ['GPipe', '1F1B']
    """
    return list(_found(shape, microbatches))


def _found(shape: Shape, m: int) -> Iterator[Schedule]:
    names = [block.name for block in shape if isinstance(block.name, Task)]
    if len(names) < len(shape) or any(len(block.devices) > 1 for block in shape):
        return
    where = {name.stage: block.devices[0] for name, block in zip(names, shape, strict=True)}
    placement = tuple(where[stage] for stage in sorted(where))
    p, is_split = 1 + max(placement), any(name.kind == "W" for name in names)
    chunks = len(placement) // p
    if placement == tuple(range(p)):
        yield from (gpipe(p, m), one_forward_one_backward(p, m))
        if is_split:
            yield zero_bubble_h1(p, m)
            if m >= 2 * p - 1:
                yield zero_bubble_h2(p, m)
    elif placement == tuple(range(p)) * chunks:
        yield breadth_first(p, m, chunks)
        if m % p == 0:
            yield interleaved(p, m, chunks)
    elif placement == (*range(p), *reversed(range(p))) and is_split:
        if m >= 2 * p - 1:
            yield zero_bubble_v(p, m)
        if m >= 2 * p:
            yield dual_pipe_v(p, m)
