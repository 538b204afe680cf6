"""Arguments are checked once, by annotations: axes, shared sizes and dtypes, ranges, no values."""

import sys
import threading
from dataclasses import dataclass
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int, Int8

from toolkit import checking
from toolkit._annotations import AtLeast, Between, Known, Multiple, PowerOfTwo, SameDtype
from toolkit._checks import check_fields, checked

ALIKE = SameDtype("x and y")
GROUPED = Multiple("many", "few", "the heads of x", "the heads of y")


@dataclass(frozen=True)
class Held:
    rows: Annotated[Float[Array, "batch few size"], ALIKE, GROUPED]
    length: Int[Array, "batch"]


@checked
def call(
    x: Annotated[Float[Array, "batch many size"], ALIKE],
    y: Annotated[Float[Array, "batch few size"], ALIKE, GROUPED],
    *,
    bias: Float[Array, "#batch #many"] | None = None,
    gate: Annotated[Float[Array, "batch"], Between("a gate", 0.0, 1.0)] | None = None,
    held: Held | None = None,
    count: Annotated[int, AtLeast(1, " token")] = 1,
    chunk: Annotated[int, PowerOfTwo(4)] | None = None,
    cap: Annotated[float, Known()] | None = None,
    name: Literal["a", "b"] | None = None,
    title: str = "",
    code: Int8[Array, "many"] | None = None,
):
    return x


X, Y = jnp.ones((2, 4, 3)), jnp.ones((2, 2, 3))
HALF = Y.astype(jnp.bfloat16)
LENGTH = jnp.zeros(2, jnp.int32)
WRONG = [
    ({"y": Y[:1]}, ValueError, r"y \[batch, few, size\] must have shape \(2, 2, 3\); got"),
    ({"y": Y[..., 0]}, ValueError, r"y must have 3 axes \[batch, few, size\]"),
    ({"y": HALF}, TypeError, "x and y must share one dtype; got y bfloat16 beside float32"),
    ({"y": Y.astype(int)}, TypeError, "y must be floating point; got int"),
    ({"y": Y.tolist()}, TypeError, "y must be an array; got list"),
    ({"x": X[:, :3]}, ValueError, "the heads of x must be a multiple of .* of y; got 3 and 2"),
    ({"x": X[:0], "y": Y[:0]}, ValueError, "at least one batch; got batch = 0"),
    ({"bias": jnp.ones((2, 3))}, ValueError, "bias .* must have 4 or 1 along many; got shape"),
    ({"held": Held(Y[:, :1], LENGTH)}, ValueError, r"held.rows \[.*must have shape \(2, 2, 3"),
    ({"held": Held(HALF, LENGTH)}, TypeError, "got held.rows bfloat16 beside float32"),
    ({"held": Held(Y, LENGTH[:1])}, ValueError, r"held.length \[batch\] must have shape \(2,\)"),
    ({"held": Y}, TypeError, "held must be a Held or None; got float32"),
    ({"count": 0}, ValueError, "count must be at least 1 token; got 0"),
    ({"count": 2**31}, ValueError, r"count must be below 2\*\*31; got 2147483648"),
    ({"count": 1.0}, TypeError, "count must be an int; got 1.0"),
    ({"chunk": 12}, ValueError, "chunk must be a power of two and at least 4; got 12"),
    ({"cap": jnp.ones(())}, TypeError, r"cap must be known when compiling; got .*float32\[\]"),
    ({"cap": float("nan")}, ValueError, "cap must be a finite number or None; got nan"),
    ({"name": "c"}, ValueError, "name must be 'a' or 'b' or None; got 'c'"),
    ({"code": LENGTH}, TypeError, "code must be int8; got int32"),
    ({"title": 3}, TypeError, "title must be a string; got 3"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_wrong_argument_is_refused_in_one_line(number):
    changed, error, message = WRONG[number]
    arguments = {"x": X, "y": Y} | changed
    for _ in "twice":  # the second time by what the first has noted
        with pytest.raises(error, match=message) as caught:
            call(**arguments)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "right",
    [
        {"bias": jnp.ones((1, 4))},
        {"bias": np.ones((2, 1), np.float32)},
        {"gate": jnp.full(2, 7.0)},  # whose values are not read
        {"held": Held(Y, LENGTH)},
        {"held": Held(np.ones((2, 2, 3), np.float32), np.zeros(2, int))},
        {"count": np.int64(3), "chunk": 8, "cap": 0.5, "name": "a"},
    ],
)
def test_a_right_argument_passes(right):
    for _ in "twice":
        assert call(X, Y, **right) is X
    jax.jit(lambda x, y: call(x, y, **right))(X, Y)
    jax.vmap(lambda x, y: call(x, y, **right))(X[None], Y[None])
    time, batch = jax.export.symbolic_shape("t, 2")
    shape = jax.ShapeDtypeStruct((batch, 4, time), jnp.float32)
    if "held" not in right:
        jax.eval_shape(lambda x: call(x, x[:, :2], **right), shape)


def test_values_are_read_inside_checking_alone():
    gate = jnp.array([0.5, 2.0])
    message = r"gate is a gate and must be in \[0, 1\]; got 0.5 to 2"
    call(X, Y, gate=gate)
    with checking():
        with pytest.raises(ValueError, match=message):
            call(X, Y, gate=gate)
        call(X, Y, gate=gate / 2)
        jax.jit(lambda gate: call(X, Y, gate=gate))(gate)  # traced: there is no value
        other = threading.Thread(target=call, args=(X, Y), kwargs={"gate": gate})
        other.start()  # another thread is not checked
        other.join()
        with pytest.raises(ValueError, match=message):
            call(X, Y, gate=gate)
    call(X, Y, gate=gate)


def test_fields_of_an_instance_share_sizes_too():
    check_fields(Held(Y, LENGTH))
    with pytest.raises(ValueError, match=r"length \[batch\] must have shape \(2,\); got \(3,\)"):
        check_fields(Held(Y, jnp.zeros(3, int)))


def test_a_subclass_is_looked_at_closely_once():
    class Base:
        pass

    class Derived(Base):
        pass

    @checked
    def takes(value: Base, number: int):
        return value, number

    def close_looks(*args):
        calls = []
        sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_filename))
        try:
            takes(*args)
        finally:
            sys.setprofile(None)
        return sum(name.endswith("_kinds.py") for name in calls)

    takes(Base(), 1)
    assert close_looks(Derived(), 1) > 0
    assert close_looks(Derived(), 1) == 0
    with pytest.raises(TypeError):
        takes(object(), 1)
    with pytest.raises(TypeError):
        takes(Derived(), True)
