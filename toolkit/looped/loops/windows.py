"""`LoopedConfig.windows`: the windows of the "full" layers in each loop, as one string.

"full -> 512 -> 256 -> 128" is four loops, one word for all "full" layers in each; a part may have
one word for each such layer instead, and one part alone serves all loops.
"""


def parsed_windows(text: str, loops: int, full: int) -> tuple[tuple[int | None, ...], ...]:
    """The window of each of `full` layers for every loop; None sees all tokens."""
    parts = [part.split() for part in text.split("->")]
    if not full:
        raise ValueError(f'windows is {text!r}; the pattern has no "full" layer.')
    if len(parts) not in (1, loops) or any(len(words) not in (1, full) for words in parts):
        raise ValueError(
            f'windows {text!r} must have 1 or {loops} parts joined by "->", one per loop, each of '
            f'1 or {full} words, one per "full" layer.'
        )
    for word in (word for words in parts for word in words):
        if word != "full" and (not word.isdecimal() or int(word) < 1):
            raise ValueError(
                f'windows {text!r} names {word!r}; write "full" or a number of tokens.'
            )
    per_loop = [
        tuple(None if word == "full" else int(word) for word in words) * (full // len(words))
        for words in parts
    ]
    return tuple(per_loop) * (loops // len(per_loop))
