"""FLOPs as the compiler's text tells them: convolutions, libraries' calls, kernels."""

import itertools

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st

from toolkit.measure import program_cost
from toolkit.measure.product_flops import product_flops
from toolkit.measure.program_text import read_computations

# The compiler's count includes the few elements that are added or cut beside the products.
BESIDE = 0.02


def flops_of(text: str) -> list[float | None]:
    """FLOPs of every line of the text of a program."""
    computations, _ = read_computations(text)
    return [
        product_flops(line, {each.name: each.shape for each in lines})
        for lines in computations.values()
        for line in lines
    ]


def written(*lines: str) -> float | None:
    """FLOPs of the last of some lines."""
    body = "\n".join(f"  {line}" for line in lines)
    return flops_of(f"HloModule m\n\nENTRY %main () -> f32[] {{\n{body}\n}}\n")[-1]


def convolve(x, w, **rules):
    labels = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, dimension_numbers=labels, **rules)


@pytest.mark.parametrize(
    "rules",
    [
        {"window_strides": (1, 1), "padding": "SAME"},  # once 1/7.3 of them
        {"window_strides": (2, 2), "padding": "VALID"},
        {"window_strides": (1, 1), "padding": "SAME", "rhs_dilation": (2, 3)},
        {"window_strides": (2, 1), "padding": ((3, 1), (0, 2)), "lhs_dilation": (3, 2)},
        {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 4},
    ],
)
def test_a_convolution_and_its_gradients_are_those_of_the_compiler(rules):
    x = jax.ShapeDtypeStruct((2, 13, 11, 16), jnp.float32)
    w = jax.ShapeDtypeStruct((3, 3, 16 // rules.get("feature_group_count", 1), 8), jnp.float32)
    out = jax.eval_shape(lambda x, w: convolve(x, w, **rules), x, w)
    of_input = jax.linear_transpose(lambda x: convolve(x, jnp.ones(w.shape), **rules), x)
    of_filter = jax.linear_transpose(lambda w: convolve(jnp.ones(x.shape), w, **rules), w)
    counted = 0
    for function, shapes in (
        (lambda x, w: convolve(x, w, **rules), (x, w)), (of_input, (out,)), (of_filter, (out,)),
    ):  # fmt: skip
        compiled = jax.jit(function).lower(*shapes).compile()
        found = flops_of(compiled.as_text() or "")
        if None in found:
            continue  # a call of the backend's own, which tells nothing
        counted += 1
        assert sum(filter(None, found)) == pytest.approx(program_cost(compiled).flops, rel=BESIDE)
    assert counted


sizes = st.integers(1, 6)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(sizes, sizes, sizes, st.integers(0, 4), sizes, sizes, sizes)
def test_pairs_of_output_and_tap_that_meet_an_input(given, taps, out, pad, stride, spread, gap):
    """Against counting them one by one."""
    meet = sum(
        place >= 0 and place % spread == 0 and place // spread < given
        for place in (
            stride * o + gap * tap - pad for o, tap in itertools.product(range(out), range(taps))
        )
    )
    window = f"size={taps} stride={stride} pad={pad}_0 lhs_dilate={spread} rhs_dilate={gap}"
    found = written(
        f"%x = f32[2,{given},3] parameter(0)",
        f"%w = f32[{taps},3,5] parameter(1)",
        f"%y = f32[2,{out},5] convolution(%x, %w), window={{{window}}}, dim_labels=b0f_0io->b0f",
    )
    assert found == 2 * 2 * 3 * 5 * meet


def test_a_product_with_a_batch_as_a_tpu_writes_it():
    found = written(
        "%x = bf16[8,2048,128] parameter(0)",
        "%w = bf16[8,128,512] parameter(1)",
        "%y = bf16[8,2048,512] convolution(%x, %w), window={size=8 stride=7 lhs_dilate=8}, "
        "dim_labels=0bf_0io->0bf",
    )
    assert found == 2 * 8 * 2048 * 128 * 512


GEMM = (
    '{"gemm_backend_config":{"alpha_real":1,"beta":0,"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["AXIS"],"rhs_contracting_dimensions":["1"],'
    '"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}'
)


@pytest.mark.parametrize("target", ["gemm", "lt$matmul", "lt$matmul$f8"])
@pytest.mark.parametrize(("axis", "left"), [(1, "[64,32]"), (0, "[32,64]")])
@pytest.mark.parametrize("quote", ['"', '\\"'])  # older compilers escaped it
def test_cublas_multiplies(target, axis, left, quote):
    """Once 0: a step on a GPU computed nothing."""
    config = GEMM.replace("AXIS", f"{axis}").replace('"', quote)
    found = written(
        f"%x = bf16{left} parameter(0)",
        "%w = bf16[48,32] parameter(1)",
        "%y = (bf16[64,48]{1,0}, s8[33554432]{0}) custom-call(%x, %w), "
        f'custom_call_target="__cublas${target}", backend_config={config}',
    )
    assert found == 2 * 64 * 48 * 32


CONVOLUTION = 2 * 32 * 12 * 12 * 9 * 64 * 128  # "valid": 14 -> 12


@pytest.mark.parametrize(
    ("kind", "shapes", "result"),
    [
        ("convForward", ("[32,14,14,64]", "[128,3,3,64]"), "[32,12,12,128]"),
        ("convBiasActivationForward", ("[32,14,14,64]", "[128,3,3,64]"), "[32,12,12,128]"),
        ("convBackwardFilter", ("[32,14,14,64]", "[32,12,12,128]"), "[128,3,3,64]"),
        ("convBackwardInput", ("[32,12,12,128]", "[128,3,3,64]"), "[32,14,14,64]"),
    ],
)
def test_cudnn_convolves(kind, shapes, result):
    found = written(
        *(f"%{name} = f16{shape} parameter(0)" for name, shape in zip("xw", shapes, strict=True)),
        f"%y = (f16{result}{{3,2,1,0}}, u8[0]{{0}}) custom-call(%x, %w), window={{size=3x3}}, "
        f'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn${kind}"',
    )
    assert found == CONVOLUTION


@pytest.mark.parametrize(("mask", "share"), [("NO_MASK", 1.0), ("CAUSAL", 0.5)])
@pytest.mark.parametrize(("kind", "products"), [("", 2), ("Backward", 5)])
def test_cudnn_attends(mask, share, kind, products):
    lines = [f"%{name} = bf16[2,256,4,64] parameter(0)" for name in "qkv"]
    result = "(bf16[2,256,4,64]{3,2,1,0}, f32[2,4,256]{2,1,0}, u8[0]{0})"
    found = written(
        *lines,
        f"%o = {result} custom-call(%q, %k, %v), "
        f'custom_call_target="__cudnn$fmhaSoftmax{kind}", backend_config='
        '{"cudnn_fmha_backend_config":{"fmha_scale":0.125,"intermediate_tensor_shape":'
        '{"element_type":"BF16","dimensions":["2","4","256","256"],"tuple_shapes":[]},'
        f'"mask_type":"{mask}"}}}}',
    )
    assert found == share * products * 2 * 2 * 4 * 256 * 256 * 64


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        ('"tpu_custom_call", backend_config={"custom_call_config":{"body":"x","cost_estimate":'
         '{"flops":"12345","transcendentals":"3","bytes_accessed":"77"}}}', 12345),
        ('"tpu_custom_call", backend_config={"custom_call_config":{"body":"x"}}', None),
        ('"__gpu$xla.gpu.triton"', None),
        ('"__cublas$gemm"', None),  # a form without dimensions
        ('"ConcatBitcast"', 0),
        ('"TopK"', 0),
    ],
)  # fmt: skip
def test_kernels_count_what_their_authors_declared(call, flops):
    line = f"%y = f32[8,8] custom-call(%x), custom_call_target={call}"
    assert written("%x = f32[8,8] parameter(0)", line) == flops
