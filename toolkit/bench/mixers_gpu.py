"""stub"""


def cases(rows):
    yield from ()
