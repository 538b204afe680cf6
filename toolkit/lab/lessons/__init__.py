"""Lessons: predictions behind a lock, exercises that check themselves, progress on disk.

A notebook in `tutorials/` uses `Lesson` (`lesson.py`): `predict`, `check`, `hint`, `hand_in`. The
content of a lesson is a module of `subjects/` with an `OUTLINE` of questions and exercises
(`outline.py`), listed in `catalogue.py`. `drawing.py` holds shared drawings. `prediction.py` is the
lock, `hand_in.py` the last box, `box.py` what boxes share, `progress.py` the file, `pages.py` the
learner's page and, with `gather`, the teacher's; `room.py` shows that one live.
"""
