"""Random damage to files, and the assertion that none of it goes unnoticed."""

import numpy as np

CORRUPTIONS = 250  # of each kind of file


def corrupted(content, generator):
    """Content with a bit flipped, a byte changed, dropped or added, an end cut off, or 16 bytes
    doubled.
    """
    at = int(generator.integers(len(content)))
    kind = generator.integers(6)
    byte = bytes([int(generator.integers(256))])
    if kind == 0:
        flipped = content[at] ^ (1 << int(generator.integers(8)))
        return content[:at] + bytes([flipped]) + content[at + 1 :]
    if kind == 1:
        return content[:at] + byte + content[at + 1 :]
    if kind == 2:
        return content[:at] + content[at + 1 :]
    if kind == 3:
        return content[:at] + byte + content[at:]
    if kind == 4:
        return content[:at]
    return content[: at + 16] + content[at:]


def outcome_of(read):
    try:
        return read(), None
    except ValueError as error:
        return None, str(error)


def assert_none_silent(path, read, is_log=False):
    """Every corruption is a ValueError of one line, or changes nothing; a log may lose its end."""
    content, whole = path.read_bytes(), read()
    generator, noticed = np.random.default_rng(0), 0
    for _ in range(CORRUPTIONS):
        path.write_bytes(corrupted(content, generator))
        found, fault = outcome_of(read)
        if fault is None:
            assert found == (whole[: len(found)] if is_log else whole)
        else:
            noticed += 1
            assert path.name in fault
            assert "\n" not in fault
    path.write_bytes(content)
    assert read() == whole
    assert noticed > CORRUPTIONS * (0.7 if is_log else 0.95)
