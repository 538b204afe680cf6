"""Simulated devices come before everything, and meshes say what they are."""

import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType

from toolkit.parallel import make_mesh, simulate_devices


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_one_call_before_jax_starts():
    done = run_python(
        "from toolkit.parallel import simulate_devices\n"
        "simulate_devices(3)\n"
        "import jax\n"
        "assert len(jax.devices()) == 3 and jax.devices()[0].platform == 'cpu'\n"
        "simulate_devices(3)\n"
    )
    assert done.returncode == 0, done.stderr


def test_too_late_is_explained():
    jax.devices()
    with pytest.raises(RuntimeError, match=r"simulate_devices\(4\) came too late.* 8 cpu device"):
        simulate_devices(4)
    assert len(jax.devices()) == 8


def test_again_with_the_same_number_is_fine():
    jax.devices()
    simulate_devices(8)
    assert len(jax.devices()) == 8


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "8"])
def test_counts_that_are_not(count):
    with pytest.raises((TypeError, ValueError), match=r"want an integer|must be an int"):
        simulate_devices(count)


@pytest.mark.parametrize(
    ("word", "kind"), [("auto", AxisType.Auto), ("explicit", AxisType.Explicit)]
)
def test_axis_types_are_said(word, kind):
    mesh = make_mesh({"data": 4, "model": 2}, axis_type=word)
    assert mesh.axis_types == (kind, kind)
    assert dict(mesh.shape) == {"data": 4, "model": 2}


def test_auto_is_the_default_and_some_devices_will_do():
    mesh = make_mesh({"data": 2}, devices=jax.devices()[2:4])
    assert mesh.axis_types == (AxisType.Auto,)
    assert set(mesh.devices.flat) == set(jax.devices()[2:4])


@pytest.mark.parametrize(
    ("axes", "options", "message"),
    [
        ({"data": 4}, {}, r"data 4 = 4 devices, but there are 8 .*simulate_devices\(4\)"),
        ({"data": 4, "model": 4}, {}, "data 4 x model 4 = 16 devices, but there are 8"),
        ({"data": 0}, {}, "axis 'data' has size 0: want a positive integer"),
        ({"data": 8.0}, {}, "axis 'data' has size 8.0"),
        ({"data": 8}, {"axis_type": "manual"}, "axis_type must be one of 'auto', 'explicit'"),
        ({}, {}, "axes is empty"),
    ],
)
def test_wrong_meshes_are_named(axes, options, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(axes, **options)
