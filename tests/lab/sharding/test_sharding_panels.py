"""The two panels on sharding, driven from Python."""

import pytest

pytest.importorskip("ipywidgets")

from toolkit.lab.sharding.mesh import MeshPanel
from toolkit.lab.sharding.mlp_step import MESHES, SCHEMES
from toolkit.lab.sharding.step import StepPanel

# Together they draw for longer than the first tier has time.
pytestmark = pytest.mark.slow


@pytest.mark.nightly
def test_every_entry_of_the_menus_is_drawn_and_told() -> None:
    panel = MeshPanel()
    step = StepPanel().follow(panel)
    for mesh in MESHES:
        for scheme in SCHEMES:
            panel.change(mesh=mesh, scheme=scheme)
            assert (step.mesh, step.scheme) == (mesh, scheme)
            slider = step.page.controls["collective"].inputs[0]
            assert slider.max == len(step.view.collectives)
            for number in range(1, slider.max + 1):
                step.collective = number
                cause = step._plots[2]
                axes = cause._body.axes.get_window_extent()
                assert cause._body.get_window_extent().y0 >= axes.y0 - 2
                assert cause._body.get_window_extent().x1 <= axes.x1


def test_the_chosen_device_is_framed_where_it_holds_a_part() -> None:
    panel = MeshPanel(mesh="4x2", scheme="tensor", device=5)
    weights = panel._plots[3]
    shown = [words.get_text() for words in weights.words if words.get_visible()]
    assert shown == ["0 2 4 6", "1 3 5 7"]
    assert weights._frame.get_x() == pytest.approx(0.5)
    whole = panel._plots[-1]
    assert [words.get_text() for words in whole.words if words.get_visible()] == ["all 8"]


def test_another_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="mesh: got '3x3', wanted one of"):
        MeshPanel(mesh="3x3")
