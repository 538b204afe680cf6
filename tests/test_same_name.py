"""Another package named `toolkit` is named in one line, by the first import and by `info`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import toolkit
from toolkit._same_name import MARK

OURS = str(Path(toolkit.__file__).parent.parent)


@pytest.fixture(params=["toolkit/__init__.py", "toolkit.py"])
def theirs(request, tmp_path):
    file = tmp_path / request.param
    file.parent.mkdir(exist_ok=True)
    file.touch()
    return tmp_path


def imported(*folders):
    code = "import toolkit, sys; print(toolkit.__version__)"
    path = os.pathsep.join(map(str, folders))
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def test_the_first_import_names_what_it_hides(theirs):
    done = imported(OURS, theirs)
    assert done.stdout.strip() == toolkit.__version__
    assert f"hides {theirs / 'toolkit'}" in done.stderr
    assert done.stderr.count("hides") == 1


def test_a_copy_and_a_folder_without_code_hide_nothing(tmp_path):
    for name in ("copy", "bare"):
        (tmp_path / name / "toolkit").mkdir(parents=True)
    (tmp_path / "copy/toolkit/__init__.py").touch()
    (tmp_path / "copy/toolkit" / MARK).touch()
    assert not imported(OURS, tmp_path / "copy", tmp_path / "bare").stderr


def test_info_names_what_hides_it(theirs):
    command = [sys.executable, "-P", "-m", "toolkit", "info"]
    environment = os.environ | {"PYTHONPATH": OURS}
    done = subprocess.run(command, cwd=theirs, env=environment, capture_output=True, text=True)
    assert f"Python imports {theirs / 'toolkit'}" in done.stdout
    assert not done.returncode
