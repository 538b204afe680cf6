"""Solutions pass, and wrong answers fail for the stated reason."""

import importlib

import pytest

pytest.importorskip("anywidget")

from toolkit.lab.lessons.catalogue import LESSONS, load_outline
from toolkit.lab.lessons.drawing import png_of
from toolkit.lab.lessons.outline import WrongAnswer


def answers_of(lesson):
    return importlib.import_module(f"lesson_answers.{lesson}").ANSWERS


# Their judges compile.
SECOND_TIER = {
    "attention_memory", "first_token", "memory_ledger", "meshes", "own_kernel", "ring",
    "shard_transformer", "skip_and_compress",
}  # fmt: skip
EVERY = [
    pytest.param(
        lesson, one.name, marks=[pytest.mark.slow] if lesson in SECOND_TIER else [],
        id=f"{lesson}-{one.name}",
    )
    for lesson in LESSONS
    for one in load_outline(lesson).exercises
]  # fmt: skip


@pytest.mark.parametrize(("lesson", "exercise"), EVERY)
def test_solutions_pass_and_wrong_answers_fail_for_their_reason(lesson, exercise):
    judge = load_outline(lesson).exercise(exercise).judge
    solution, wrong = answers_of(lesson)[exercise]
    drawn = []
    assert judge(solution, drawn.append).startswith("Right")
    png_of(drawn[-1])
    for function, reason in wrong:
        with pytest.raises(WrongAnswer) as said:
            judge(function, drawn.append)
        assert reason in str(said.value), said.value
