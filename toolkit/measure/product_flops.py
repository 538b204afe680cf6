"""FLOPs of the matrix products and convolutions of a compiled program, in all notations.

CPUs and GPUs write `dot`, TPUs write products as convolutions, and GPUs call libraries: cuBLAS for
products, cuDNN for convolutions and attention. Other kernels (Pallas, Triton) count with the FLOPs
that they declare, or are unknown.

Source: OpenXLA, "HLO operation semantics" (Conv, Dot) and `HloCostAnalysis`: two FLOPs for each
    product whose factors are both in the arrays; padding and the zeros of dilation do not count.
"""

import math
import re

import numpy as np

from toolkit.measure.program_text import Instruction, integers, tuple_elements

_ARRAY = re.compile(r"\w+\[([\d,]*)\]")
_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")
_LIBRARY_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_BATCH_GROUPS = re.compile(r"\bbatch_group_count=(\d+)")
_TARGET = re.compile(r'\bcustom_call_target="([^"]*)"')
_DECLARED = re.compile(r'"cost_estimate":\{[^{}]*"flops":"?(\d+)')
_SCORES = re.compile(r'"intermediate_tensor_shape":\{[^\[]*"dimensions":\[([^\]]*)\]')
# A convolution's input, filter and output: an operand, or the result (None).
_FORWARD = (0, 1, None)
_CONVOLUTIONS = {"BackwardInput": (None, 1, 0), "BackwardFilter": (0, None, 1)}
# Custom calls that multiply no matrices: they rearrange, sort or annotate.
_PLAIN = re.compile(
    r"ConcatBitcast|SliceBitcast|AllocateBuffer|AssumeGatherIndicesInBound|Sharding|SPMD\w+|"
    r"MoveTo\w+|annotate_device_placement|X64\w+|TopK|PartialReduce|__topk\S*|__cub\$\S+|"
    r"cu_threefry2x32\w*|Pad\w+|LayoutConstraint|xla\.sdy\.\w+"
)


def product_flops(instruction: Instruction, shapes: dict[str, str]) -> float | None:
    """FLOPs of one instruction, given the shapes of its operands by name; 0 if it is not a product,
    None if unknown. (The inside of a fusion has separate lines.)"""
    if instruction.opcode == "dot":
        return _dot(instruction, shapes, _CONTRACTED)
    if instruction.opcode == "convolution":
        return _convolution(instruction, shapes, _FORWARD)
    return _call(instruction, shapes) if instruction.opcode == "custom-call" else 0.0


def call_target(instruction: Instruction) -> str:
    """The target of a custom call."""
    found = _TARGET.search(instruction.attributes)
    return found[1] if found else ""


def _call(instruction: Instruction, shapes: dict[str, str]) -> float | None:
    target = call_target(instruction)
    if declared := _DECLARED.search(instruction.attributes):
        return float(declared[1])
    if target.startswith("__cublas$"):
        return _dot(instruction, shapes, _LIBRARY_CONTRACTED)
    if kind := re.match(
        r"__cudnn\$conv(BackwardInput|BackwardFilter|Forward|BiasActivation)", target
    ):
        return _convolution(instruction, shapes, _CONVOLUTIONS.get(kind[1], _FORWARD))
    if target.startswith("__cudnn$fmha"):
        return _attention(instruction, shapes, "Backward" in target)
    return 0.0 if _PLAIN.fullmatch(target) else None


def _sizes(shape: str) -> list[int]:
    found = _ARRAY.search(shape)
    return integers(found[1]) if found else []


def _result(instruction: Instruction) -> list[int]:
    """Sizes of the result; of a library's call, which returns its workspace too, the first."""
    return _sizes(
        tuple_elements(instruction.shape)[0]
        if instruction.shape.startswith("(")
        else instruction.shape
    )


def _operand(instruction: Instruction, shapes: dict[str, str], at: int) -> list[int]:
    return _sizes(shapes.get(instruction.operand_names[at], ""))


def _dot(
    instruction: Instruction, shapes: dict[str, str], contracted: re.Pattern[str]
) -> float | None:
    found, left = (
        contracted.search(instruction.attributes.replace("\\", "")),
        _operand(instruction, shapes, 0),
    )
    if found is None or not left:
        return None
    return (
        2.0 * math.prod(_result(instruction)) * math.prod(left[axis] for axis in integers(found[1]))
    )


def _attention(instruction: Instruction, shapes: dict[str, str], is_backward: bool) -> float | None:
    """Scores and sums over values; the backward pass computes the scores anew, and four products.

    A causal mask halves them: cuDNN leaves out what it hides.
    """
    attributes = instruction.attributes.replace("\\", "")
    scores = _SCORES.search(attributes)
    key, value = _operand(instruction, shapes, 0)[-1:], _operand(instruction, shapes, 2)[-1:]
    if scores is None or not key or not value:
        return None
    products = 3 * key[0] + 2 * value[0] if is_backward else key[0] + value[0]
    share = 0.5 if '"mask_type":"CAUSAL"' in attributes else 1.0
    return 2.0 * share * math.prod(integers(scores[1])) * products


def _convolution(
    instruction: Instruction, shapes: dict[str, str], places: tuple[int | None, ...]
) -> float | None:
    labels, window = _LABELS.search(instruction.attributes), _WINDOW.search(instruction.attributes)
    if labels is None:
        return None
    found = [
        _result(instruction) if at is None else _operand(instruction, shapes, at) for at in places
    ]
    if any(len(sizes) != len(axes) for sizes, axes in zip(found, labels.groups(), strict=True)):
        return None
    given, weights, out = (
        dict(zip(axes, sizes, strict=True))
        for axes, sizes in zip(labels.groups(), found, strict=True)
    )
    rules = dict(part.split("=") for part in window[1].split()) if window else {}
    groups = _BATCH_GROUPS.search(instruction.attributes)
    total = given["b"] // (int(groups[1]) if groups else 1) * weights["i"] * weights["o"]
    for at, axis in enumerate(sorted(label for label in given if label.isdecimal())):
        steps = (
            int(_rule(rules, name, at, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        before = int(_rule(rules, "pad", at, "0_0").split("_")[0])
        total *= _pairs(given[axis], weights[axis], out[axis], before, *steps)
    return 2.0 * total


def _rule(rules: dict[str, str], name: str, at: int, default: str) -> str:
    return rules[name].split("x")[at] if name in rules else default


def _pairs(given, taps, out, before, stride, spread, gap) -> int:
    """Pairs of output and tap along one axis that meet an input: at (stride o + gap t - before),
    which must be `spread` times a place of the input."""
    offset = gap * np.arange(taps) - before
    # stride o = -offset modulo spread has solutions where their common divisor divides the offset.
    common = math.gcd(stride, spread)
    period = spread // common
    solvable = offset % common == 0
    inverse = pow(stride // common, -1, period) if period > 1 else 0
    first = (-offset // common * inverse) % period
    low = np.maximum(0, -(offset // stride))  # the least o at or after the first input
    high = np.minimum(out - 1, ((given - 1) * spread - offset) // stride)
    low = low + (first - low) % period
    return int(np.where(solvable & (high >= low), (high - low) // period + 1, 0).sum())
