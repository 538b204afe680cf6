"""A mixer of another package: registered by a call, or by the entry point of what is installed."""

import dataclasses
import subprocess
import sys
import textwrap

import pytest

from toolkit.attention import MIXERS, mixer, register
from toolkit.looped import LAYERS, register_layer


@pytest.fixture
def mine():
    row = dataclasses.replace(MIXERS["gla"], name="mine", title="Mine")
    register(row)
    yield row
    del MIXERS["mine"]


def test_a_registered_row_is_looked_up_as_any_other(mine):
    assert mixer("mine") == mine
    assert [*MIXERS][-1] == "mine"
    again = dataclasses.replace(mine, title="Mine, second try")  # a cell that is run twice
    assert register(again) is MIXERS["mine"]


def test_what_is_the_packages_own_stays(mine):
    with pytest.raises(ValueError, match="name: got 'gla', which is one of the package's own"):
        register(dataclasses.replace(mine, name="gla"))
    with pytest.raises(ValueError, match="name: got 'my mixer', wanted one word"):
        register(dataclasses.replace(mine, name="my mixer"))
    with pytest.raises(TypeError, match="row must be"):
        register("gla")
    assert MIXERS["gla"].title == "Gated linear attention"
    with pytest.raises(TypeError, match="layer: got int, wanted a subclass of MixingLayer"):
        register_layer(int)
    with pytest.raises(ValueError, match="one of the package's own"):
        register_layer(type("Other", (LAYERS["gla"],), {}))


MODULE = """
import dataclasses
from toolkit.attention import MIXERS, register
from toolkit.looped import LAYERS, LoopedConfig, register_layer

register(dataclasses.replace(MIXERS["gla"], name="theirs", title="Theirs"))

@register_layer
class Theirs(LAYERS["gla"]):
    word = "theirs"
"""
USE = """
import warnings
import jax, jax.numpy as jnp
from flax import nnx
from toolkit.looped import LoopedConfig, LoopedLM, generate

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    config = LoopedConfig.tiny("theirs full", loops=1, width=16, heads=2)
assert [str(w.message) for w in caught if "did not load" in str(w.message)] == [
    "broken_module, of entry point 'broken', did not load: No module named 'broken_module'"
], [str(w.message) for w in caught]
model = LoopedLM(config, rngs=nnx.Rngs(0))
assert generate(model, jnp.ones((1, 3), int), length=2).shape == (1, 2)
from toolkit.attention import mixer
assert mixer("theirs").title == "Theirs"
print("written")
"""


@pytest.mark.slow
def test_an_installed_package_registers_by_its_entry_point(tmp_path):
    """As pip leaves it: a module, and metadata beside it that names the module."""
    site = tmp_path / "site"
    metadata = site / "their_mixer-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "their_mixer.py").write_text(MODULE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-mixer\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[toolkit.mixers]\ntheirs = their_mixer\nbroken = broken_module\n"
    )
    script = f"import sys; sys.path.insert(0, {str(site)!r})\n" + textwrap.dedent(USE)
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "written\n"
