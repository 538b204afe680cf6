"""Rules that tell which dimensions of operands and results are cut together.

A rule writes an operation as an einsum: every dimension gets a letter, and dimensions with the same
letter are one loop that can be sharded. A letter of operands only is summed over (devices then hold
partial results); a dimension without a letter cannot be cut.

    x[B, D] @ w[D, F] -> y[B, F]      letters  (b d), (d f) -> (b f),   d is summed

Source: OpenXLA, "Shardy: sharding propagation" (factors of an operation); Yuan et al., "OneFlow",
2021, section 3 (split, broadcast and partial signatures).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Letters = tuple[int | None, ...]
Shape = tuple[int, ...]

_SECOND = 100  # from here on, the letters of a second operand
REDUCTIONS = ("reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod")
# Linear in all partial operands at once, so that sums commute with them.
LINEAR = (
    *("add", "sub", "add_any", "neg", "convert_element_type", "reshape", "transpose", "squeeze"),
    *("reduce_sum", "broadcast_in_dim", "slice", "split", "concatenate", "copy"),
)


@dataclass(frozen=True)
class Rule:
    """An operation as an einsum: letters of each operand and result, and which are summed.

    An `exchanged` letter stays cut, but the pieces change devices.
    """

    operands: tuple[Letters, ...]
    results: tuple[Letters, ...]
    summed: frozenset[int] = frozenset()
    exchanged: frozenset[int] = frozenset()


def rule_of(equation: Any) -> Rule:
    """The rule of a jaxpr equation; without letters if the operation is unknown."""
    inputs = [tuple(getattr(atom.aval, "shape", ())) for atom in equation.invars]
    outputs = [tuple(getattr(atom.aval, "shape", ())) for atom in equation.outvars]
    known = _RULES.get(equation.primitive.name)
    if known is not None:
        return known(equation.params, inputs, outputs)
    return _elementwise(equation.params, inputs, outputs)


def _elementwise(params: dict, inputs: list[Shape], outputs: list[Shape]) -> Rule:
    """Dimensions of equal position and size share a letter; those of size 1 are repeated."""
    shape = outputs[0] if outputs else ()

    def letters(other: Shape) -> Letters:
        if len(other) != len(shape):
            return (None,) * len(other)
        return tuple(i if size == shape[i] else None for i, size in enumerate(other))

    return Rule(tuple(map(letters, inputs)), tuple(map(letters, outputs)))


def _dot_general(params: dict, inputs: list[Shape], outputs: list[Shape]) -> Rule:
    (left_sum, right_sum), (left_batch, right_batch) = params["dimension_numbers"]
    left, right = list(range(len(inputs[0]))), [_SECOND + i for i in range(len(inputs[1]))]
    for a, b in (
        *zip(left_sum, right_sum, strict=True),
        *zip(left_batch, right_batch, strict=True),
    ):
        right[b] = left[a]
    out = [left[i] for i in left_batch]
    out += [left[i] for i in range(len(left)) if i not in (*left_sum, *left_batch)]
    out += [right[i] for i in range(len(right)) if i not in (*right_sum, *right_batch)]
    return Rule((tuple(left), tuple(right)), (tuple(out),), frozenset(left[i] for i in left_sum))


def _reduce(params: dict, inputs: list[Shape], outputs: list[Shape]) -> Rule:
    letters = tuple(range(len(inputs[0])))
    axes = params["axes"]
    out = tuple(letter for letter in letters if letter not in axes)
    return Rule((letters,) * len(inputs), (out,) * len(outputs), frozenset(axes))


def _along(params: dict, inputs: list[Shape], outputs: list[Shape]) -> Rule:
    """Operations along one axis, which must be whole: cumulative sums, sorting, argmax."""
    axes = params.get("axes") or (params.get("axis", params.get("dimension", 0)),)
    letters = tuple(None if i in axes else i for i in range(len(inputs[0])))
    kept = tuple(i for i in range(len(inputs[0])) if i not in axes)
    outs = tuple(letters if len(out) == len(letters) else kept for out in outputs)
    return Rule((letters,) * len(inputs), outs)


def _parted(params: dict, inputs: list[Shape], outputs: list[Shape]) -> Rule:
    """Parts of one dimension, such as queries, keys and values: each is cut like the whole."""
    letters = tuple(range(len(inputs[0])))
    axis = params["axis"] if "axis" in params else params["dimension"]
    operands, results = (letters,) * len(inputs), (letters,) * len(outputs)
    return Rule(operands, results, exchanged=frozenset({axis}))


def _broadcast(params: dict, inputs: list[Shape], outputs: list[Shape]) -> Rule:
    out = tuple(range(len(outputs[0])))
    places = params["broadcast_dimensions"]
    same = [i if inputs[0][k] == outputs[0][i] else None for k, i in enumerate(places)]
    return Rule((tuple(same), *((None,) * len(size) for size in inputs[1:])), (out,))


def _transpose(params: dict, inputs: list[Shape], outputs: list[Shape]) -> Rule:
    return Rule((tuple(range(len(inputs[0]))),), (tuple(params["permutation"]),))


def reshape_rule(params: dict, inputs: list[Shape], outputs: list[Shape]) -> Rule:
    """Of dimensions that merge or split, the outermost share a letter; inner ones cannot be cut
    into contiguous pieces.
    """
    source, target = inputs[0], outputs[0]
    left: list[int | None] = [None] * len(source)
    right: list[int | None] = [None] * len(target)
    i = j = 0
    while i < len(source) and j < len(target):
        if source[i] == 1 or target[j] == 1:
            i, j = i + (source[i] == 1), j + (target[j] == 1 and source[i] != 1)
            continue
        left[i] = right[j] = i
        a, b = source[i], target[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * source[i], i + 1
            else:
                b, j = b * target[j], j + 1
    return Rule((tuple(left),), (tuple(right),))


def _squeeze(params: dict, inputs: list[Shape], outputs: list[Shape]) -> Rule:
    gone = {i % len(inputs[0]) for i in params["dimensions"]}
    kept = tuple(i for i in range(len(inputs[0])) if i not in gone)
    return Rule((tuple(range(len(inputs[0]))),), (kept,))


def _same_sizes(params: dict, inputs: list[Shape], outputs: list[Shape]) -> Rule:
    """Slices, pads, updates: dimensions of unchanged size keep their letter."""
    out = outputs[0]

    def letters(shape: Shape) -> Letters:
        if len(shape) != len(out):
            return (None,) * len(shape)
        return tuple(i if size == out[i] else None for i, size in enumerate(shape))

    kept = [letters(row) for row in inputs]
    arrays = [row for row, shape in zip(kept, inputs, strict=True) if len(shape) == len(out)]
    # A dimension of which one operand has only a part cannot be cut in the others.
    whole = {i for i in range(len(out)) if all(row[i] is not None for row in arrays)}
    return Rule(
        tuple(tuple(i if i in whole else None for i in row) for row in kept),
        (tuple(i if i in whole else None for i in range(len(out))),),
    )


def _gather(params: dict, inputs: list[Shape], outputs: list[Shape]) -> Rule:
    """Row lookup: with a table cut by rows, every device finds some rows and zeros for the
    others."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    table, indices = inputs
    operand: list[int | None] = [
        i if size == table[i] or i in numbers.collapsed_slice_dims else None
        for i, size in enumerate(sizes)
    ]
    batching = dict(
        zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    # The last dimension of the indices holds the coordinates; a batching dimension is the table's.
    places: list[int | None] = [batching.get(k, _SECOND + k) for k in range(len(indices) - 1)]
    for i in numbers.operand_batching_dims:
        operand[i] = i
    inner = [
        i
        for i in range(len(table))
        if i not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    windows, batches = iter(operand[i] for i in inner), iter(places)
    out = tuple(
        next(windows) if k in numbers.offset_dims else next(batches) for k in range(len(outputs[0]))
    )
    summed = frozenset(i for i in numbers.collapsed_slice_dims if table[i] > 1)
    return Rule((tuple(operand), (*places, None)), (out,), summed)


def _scatter_add(params: dict, inputs: list[Shape], outputs: list[Shape]) -> Rule:
    """The transpose of a lookup: rows of updates are summed into a table."""
    numbers = params["dimension_numbers"]
    table, indices, updates = inputs
    batching = dict(
        zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    places: list[int | None] = [batching.get(k, _SECOND + k) for k in range(len(indices) - 1)]
    inner = iter(
        [
            i
            for i in range(len(table))
            if i not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        ]
    )
    operand: list[int | None] = list(range(len(table)))
    batches, moved = iter(places), []
    for k, size in enumerate(updates):
        if k in numbers.update_window_dims:
            i = next(inner)
            operand[i] = i if size == table[i] else None
            moved.append(operand[i])
        else:
            moved.append(next(batches))
    summed = frozenset(letter for letter in places if letter is not None and letter >= _SECOND)
    return Rule((tuple(operand), (*places, None), tuple(moved)), (tuple(operand),), summed)


def _convolution(params: dict, inputs: list[Shape], outputs: list[Shape]) -> Rule:
    numbers = params["dimension_numbers"]
    left, right, out = (_without_letters(given) for given in (*inputs, outputs[0]))
    if params["feature_group_count"] == params["batch_group_count"] == 1:
        batch, channels, *_ = numbers.lhs_spec
        filters, inner, *_ = numbers.rhs_spec
        left[batch] = out[numbers.out_spec[0]] = 0
        left[channels] = right[inner] = 1
        right[filters] = out[numbers.out_spec[1]] = 2
    return Rule((tuple(left), tuple(right)), (tuple(out),), frozenset({1}))


def _without_letters(shape: Shape) -> list[int | None]:
    return [None] * len(shape)


def _nothing(params: dict, inputs: list[Shape], outputs: list[Shape]) -> Rule:
    return Rule(
        tuple((None,) * len(shape) for shape in inputs),
        tuple((None,) * len(shape) for shape in outputs),
    )


_RULES: dict[str, Callable[[dict, list[Shape], list[Shape]], Rule]] = {
    "dot_general": _dot_general,
    "reduce_sum": _reduce,
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort"), _along),
    **dict.fromkeys(("split", "concatenate"), _parted),
    **dict.fromkeys(("argmax", "argmin"), _along),
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": reshape_rule,
    "squeeze": _squeeze,
    **dict.fromkeys(("slice", "pad", "dynamic_slice"), _same_sizes),
    "dynamic_update_slice": _same_sizes,
    "gather": _gather,
    **dict.fromkeys(("scatter-add", "scatter_add"), _scatter_add),
    "conv_general_dilated": _convolution,
    **dict.fromkeys(("rng_bit_generator", "top_k", "fft", "scatter"), _nothing),
}


def flops_of(equation: Any) -> float:
    """FLOPs of a product; other operations count as zero."""
    if equation.primitive.name == "dot_general":
        (left_sum, _), _ = equation.params["dimension_numbers"]
        shape: Sequence[int] = equation.invars[0].aval.shape
        contracted = math.prod(shape[i] for i in left_sum)
        return 2.0 * contracted * math.prod(equation.outvars[0].aval.shape)
    if equation.primitive.name == "conv_general_dilated":
        kernel, numbers = equation.invars[1].aval.shape, equation.params["dimension_numbers"]
        return (
            2.0
            * math.prod(equation.outvars[0].aval.shape)
            * (math.prod(kernel) / kernel[numbers.rhs_spec[0]])
        )
    return 0.0
