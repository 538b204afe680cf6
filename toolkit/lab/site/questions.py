"""Locked questions of lessons and notebooks, answered beforehand for pages without a kernel."""

import math
from typing import Any

from toolkit.lab.lessons.catalogue import load_outline
from toolkit.lab.lessons.outline import Question
from toolkit.lab.site.replay import as_recorded, as_recording, origin


def record_questions(lesson: str) -> bytes:
    """Every question of a lesson with its answer, in the form of a recording without rows."""
    outline = load_outline(lesson)
    return as_recording({question.name: _answered(question) for question in outline.questions})


def _answered(question: Question) -> dict[str, Any]:
    """A question as the page asks it; what was measured to answer it is told as recorded."""
    answer = question.answer()
    return {
        "text": question.text,
        "options": question.options,
        "unit": question.unit,
        "low": question.low if math.isfinite(question.low) else None,
        "high": question.high if math.isfinite(question.high) else None,
        "words": as_recorded(answer.words),
        "origin": f"Computed in advance on {origin()}.",
    }
