"""Lessons: predictions behind a lock, exercises that check themselves, progress on disk.

What a notebook in `tutorials/` uses is `Lesson` (`lesson.py`): `predict`, `check`, `hint`,
`export`. A lesson itself is a module of `subjects/` with an `OUTLINE` of questions and exercises
(`outline.py`), and `catalogue.py` lists them. What its pictures share is in `drawing.py`.
`prediction.py` is the lock, `progress.py` the file, `pages.py` the learner's page and, with
`gather`, the teacher's.
"""
