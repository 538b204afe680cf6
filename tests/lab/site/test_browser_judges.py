"""Judges in plain Python: with every library absent they decide as they do beside them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("anywidget")

from toolkit.lab.site.python import EXERCISES

ROOT = Path(__file__).resolve().parents[3]
CODE = """
import importlib, inspect, json, sys
sys.path[:0] = [{root!r}, {root!r} + "/docs/_static", {root!r} + "/tests/support"]
import exercise
exercise.PRESENT.add("lesson_answers")
found = {{}}
for lesson, names in {exercises!r}.items():
    outline = exercise.load(lesson)
    exercise.StandIn.is_loading = True
    answers = importlib.import_module(f"lesson_answers.{{lesson}}").ANSWERS
    exercise.StandIn.is_loading = False
    from toolkit.lab.lessons.outline import WrongAnswer
    for name in names:
        solution, wrong = answers[name]
        judge, said, show = outline.exercise(name).judge, [], lambda drawing: None
        for function, reason in wrong:
            try:
                judge(function, show)
            except WrongAnswer as error:
                said.append(reason in str(error))
        found[f"{{lesson}} {{name}}"] = [judge(solution, show)[:5], said]
source = "def delta_step(*arrays): return 0"
found["numpy"] = exercise.check("attention_memory", "delta_step", source)
print(json.dumps(found))
"""


def test_judges_need_no_library() -> None:
    code = CODE.format(root=str(ROOT), exercises=EXERCISES)
    run = subprocess.run(
        [sys.executable, "-S", "-E", "-c", code], capture_output=True, text=True, check=False
    )
    # The control: a judge that needs NumPy is refused, and passes nothing.
    assert "numpy.random.default_rng is not in the browser" in run.stderr
    code = code.replace('found["numpy"] = ', "# ")
    run = subprocess.run(
        [sys.executable, "-S", "-E", "-c", code], capture_output=True, text=True, check=True
    )
    found = json.loads(run.stdout)
    assert len(found) == sum(map(len, EXERCISES.values()))
    for name, (right, said) in found.items():
        assert right == "Right", name
        assert said, name
        assert all(said), name
