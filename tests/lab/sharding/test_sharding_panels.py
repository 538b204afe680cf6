"""The two panels on sharding, driven from Python."""

import pytest

pytest.importorskip("ipywidgets")

from toolkit.lab.sharding.mesh import MeshPanel
from toolkit.lab.sharding.step import StepPanel, groups_of
from toolkit.lab.sharding.stored_steps import MESHES, SCHEMES

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
                cause = step._plots[1]
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


def test_messages_of_a_collective_stay_in_its_groups_and_a_bar_chooses_it() -> None:
    panel = StepPanel(mesh="2x4", scheme="zero3+tensor")
    groups = {
        axes: groups_of(panel.view.axes, axes)
        for axes in {collective.axes for collective in panel.view.collectives}
    }
    assert groups["model",] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups["data",] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    scene = panel.scene(panel.view)
    spans = {bar.start: pick for bar, pick in zip(scene.bars, scene.picks, strict=True)}
    for message in scene.messages:
        number = spans[max(start for start in spans if start <= message.start + 1e-9)]
        over = panel.view.collectives[number - 1].axes
        assert any({message.source, message.target} <= {*group} for group in groups[over])
    panel.player.selected = scene.picks.index(3)
    assert panel.collective == 3
    panel.player.selected = scene.picks.index(-1)  # what computes chooses nothing
    assert panel.collective == 3


def test_another_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="mesh: got '3x3', wanted one of"):
        MeshPanel(mesh="3x3")
