"""Scenes as data, their stills, and the widget that plays them, without a browser."""

import dataclasses

import pytest

pytest.importorskip("anywidget")

from toolkit.lab.collectives.ring import RingPanel
from toolkit.lab.kit.player import Player
from toolkit.lab.kit.scene import Bar, Kind, Message, Node, Scene
from toolkit.lab.kit.still import still

SCENE = Scene(
    end=3.0, words="One message.", nodes=(Node("0", 0, 0.5), Node("1", 1, 0.5)), edges=((0, 1),),
    messages=(Message(1, 0, 2.0, 3.0), Message(0, 1, 0.0, 1.5, "F0")), lanes=("0", "1"),
    bars=(Bar(0, 0, 1, "F0"), Bar(1, 1, 2, "B0", 1)),
    kinds=(Kind("forward", "#a8cfe8"), Kind("backward", "#08306b")),
    levels=(([0.0], [1.0]), ([0.0, 1.5], [0.0, 1.0])),
)  # fmt: skip


def test_the_page_gets_columns_and_messages_by_their_start() -> None:
    found = SCENE.as_json()
    assert found["messages"]["source"] == [0, 1]
    assert found["bars"] == {
        "lane": [0, 1], "start": [0, 1], "end": [1, 2], "label": ["F0", "B0"], "kind": [0, 1],
    }  # fmt: skip
    assert [kind["is_dark"] for kind in found["kinds"]] == [False, True]
    assert Scene(1.0, "nothing").as_json()["bars"]["lane"] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"end": 0.0}, "end: got 0.0"),
        ({"messages": (Message(0, 2, 0, 1),)}, "messages: got number 2, wanted 0 to 1"),
        ({"bars": (Bar(5, 0, 1),)}, "bars: got number 5"),
        ({"bars": (Bar(0, 0, 1, "", 7),)}, "kinds: got number 7"),
        ({"levels": (([0.0], [1.0]),)}, "levels: got 1 for 2 nodes"),
    ],
)
def test_a_scene_that_cannot_be_drawn_is_refused(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SCENE, **changes)


def test_a_still_shows_what_flies_at_its_time() -> None:
    def circles(time: float) -> int:
        return sum(line.get_marker() == "o" for line in still(SCENE, time).axes[0].lines)

    assert [circles(time) for time in (0.5, 1.7, 2.5)] == [1, 0, 1]


def test_a_moved_bar_reaches_whoever_asked() -> None:
    player, moves = Player(SCENE), []
    assert not player.movable
    player.on_move(lambda bar, place: moves.append((bar, place)))
    player._handle_custom_msg({"bar": 1, "place": 0}, [])
    player._handle_custom_msg({"hello": 1}, [])
    assert (player.movable, moves) == (True, [(1, 0)])
    player.time = 1.0
    player.show(dataclasses.replace(SCENE, words="The same, as long."))
    assert player.time == 1.0
    player.show(dataclasses.replace(SCENE, end=9.0))
    assert player.time == -1.0
    assert player.still()[:4] == b"\x89PNG"


def test_a_played_panel_saves_its_scene_beside_its_plots(tmp_path) -> None:
    RingPanel(devices=3).save(tmp_path / "ring.svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ring-scene.svg", "ring.svg"]
    scene, plots = (tmp_path / f"ring{part}.svg" for part in ("-scene", ""))
    assert scene.read_text() != plots.read_text()
