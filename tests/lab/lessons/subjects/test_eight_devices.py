"""Times in the lessons on sharding: modelled on simulated devices, measured on real ones."""

import re
from types import SimpleNamespace

import jax
import pytest

pytest.importorskip("anywidget")

from lesson_answers.pipeline_on_devices import early

from toolkit.lab.lessons.subjects import meshes, pipeline_on_devices, ring, shard_transformer
from toolkit.lab.lessons.subjects.parts import eight_devices


def programs():
    return {
        "04": meshes.compile_mlp(meshes.MEGATRON),
        "05": ring.compile_ring(lambda x, axis, devices: jax.lax.psum(x, axis)),
        "06": shard_transformer.compile_block(shard_transformer.MEGATRON),
    }


def test_simulated_devices_are_modelled():
    assert "times are modelled" in eight_devices.find_devices()
    for lesson, program in programs().items():
        assert "(modelled for v5e:8: " in eight_devices.how_long(program), lesson


def test_what_is_modelled_is_products_and_messages():
    copied = dict.fromkeys(meshes.SHAPES, jax.P()) | {"x": meshes.MEGATRON["x"]}
    said = [
        eight_devices.how_long(meshes.compile_mlp(layout, scale=64))
        for layout in (meshes.MEGATRON, copied)
    ]
    assert "\N{MICRO SIGN}s of messages" in said[0]
    assert ", 0 ns of messages" in said[1]  # nothing to send where every device has both weights


def test_eight_chips_are_measured(monkeypatch):
    compiled = programs()
    # Eight devices that call themselves TPUs; their programs are those of the simulated ones.
    chip = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    monkeypatch.setattr(eight_devices, "simulate_devices", pytest.fail)
    assert eight_devices.find_devices() == eight_devices.described(jax.devices())
    assert eight_devices.described([chip] * 8) == "8 devices, TPU v5 lite: times are measured"
    for lesson, program in compiled.items():
        said = eight_devices.how_long(program, chip)
        assert said.endswith("s (measured; TPU v5 lite)"), (lesson, said)


@pytest.mark.slow
def test_a_learner_s_order_runs_as_one_program_with_the_gradients_of_one_device():
    words = pipeline_on_devices.ran_own(early)
    apart = float(re.search(r"differ by (\S+) of", words)[1])
    assert words.startswith("yours: loss ")
    assert apart < 1e-5
    assert "46 ticks, 92 permutes counted in the program for 224 messages" in words
    assert "places for 15 activations" in words
    assert "is missing" in pipeline_on_devices.ran_own(lambda *sizes: early(*sizes)[:-1])
