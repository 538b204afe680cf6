"""The index that `toolkit lab` opens: every notebook with picture, needs, progress and links."""

import io
import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("nbformat")

from PIL import Image

from toolkit.lab.lessons.catalogue import LESSONS
from toolkit.lab.lessons.progress import FOLDER_VARIABLE, Progress
from toolkit.lab.notebooks.index import FOLDERS, progress_of, read_entries, table, write_index
from toolkit.lab.notebooks.lesson_pictures import PICTURES
from toolkit.lab.notebooks.server import make_workspace

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def entries():
    return [entry for folder in FOLDERS for entry in read_entries(ROOT, folder)]


def test_every_notebook_says_what_it_is_and_what_it_needs(entries):
    assert len(entries) == len([*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("tutorials/*.ipynb")])
    for entry in entries:
        assert entry.title, entry.path
        assert "GB" in entry.needs, entry.path
        assert set(entry.links) == {"Colab", "Kaggle", "Binder", "Site"}, entry.path
        picture = Image.open(io.BytesIO(entry.picture))
        assert picture.width == 300, entry.path
        assert len(entry.picture) < 30_000, entry.path
        if entry.path.startswith("tutorials/"):
            assert int(entry.minutes) <= 60, entry.path
            assert entry.gain, entry.path
            assert entry.guesses, entry.path
    names = {entry.name for entry in entries}
    assert set(LESSONS) <= names
    assert set(PICTURES) <= names
    simulated = [entry.name for entry in entries if entry.devices.startswith("8")]
    assert simulated == [
        "meshes", "ring", "shard_transformer", "cluster_plan", "pipeline_on_devices",
    ]  # fmt: skip


def test_progress_is_told(entries, tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    ring = next(entry for entry in entries if entry.name == "ring")
    assert progress_of(ring, ROOT) == "0 of 2 guesses, 0 of 2 exercises"
    progress = Progress("ring")
    for at in range(2):
        progress.add("guess", f"q{at}", guess=1)
        progress.add("check", f"e{at}", is_right=at == 0)
    assert progress_of(ring, ROOT) == "2 of 2 guesses, 1 of 2 exercises"
    progress.add("check", "e1", is_right=True)
    assert progress_of(ring, ROOT) == "\N{CHECK MARK} 2 of 2 guesses, 2 of 2 exercises"
    (tmp_path / "ring.jsonl").write_text("nonsense")
    assert "ring.jsonl cannot be read" in progress_of(ring, ROOT)


def test_the_index_is_one_file_whose_links_lead_somewhere(entries, tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    cells = json.loads(write_index(tmp_path).read_text())["cells"]
    text = "".join("".join(cell["source"]) for cell in cells)
    pictures = {name for cell in cells for name in cell.get("attachments", {})}
    for entry in entries:
        assert f"]({entry.path})" in text
        assert f"attachment:{entry.name}.png" in text
        assert f"{entry.name}.png" in pictures


def test_the_tables_of_the_site_lead_to_its_own_pages(entries):
    lines = table(entries, None, "pictures/{}.png").splitlines()
    assert len({line.count(" | ") for line in lines if "---" not in line}) == 1
    assert not any("github.io" in line for line in lines)


def test_a_workspace_keeps_what_a_learner_wrote_and_leaves_the_lessons_alone(tmp_path):
    before = {path: path.read_bytes() for path in (ROOT / "tutorials").glob("*.ipynb")}
    root = make_workspace(tmp_path / "mine")
    copies = {path.name for path in (root / "tutorials").glob("*.ipynb")}
    assert copies == {path.name for path in before}
    ring, meshes = (root / f"tutorials/{name}.ipynb" for name in ("05_ring", "04_meshes"))
    answered = ring.read_text().replace("    ...", "    return 1", 1)
    assert answered != ring.read_text()
    ring.write_text(answered)
    meshes.unlink()
    make_workspace(tmp_path / "mine")
    assert ring.read_text() == answered
    assert meshes.read_bytes() == before[ROOT / "tutorials/04_meshes.ipynb"]
    assert {path: path.read_bytes() for path in before} == before
