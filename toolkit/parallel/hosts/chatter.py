"""Redirect the output of C++ libraries to a file.

gloo and the partitioner write straight to the file descriptors, between the lines of a progress
bar. Python's own output is not redirected.
"""

import os
import sys
from pathlib import Path


def library_output_to(path: Path) -> None:
    """Redirect the standard streams to a file for all code except `sys.stdout` and `sys.stderr`."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        stream.flush()
        kept = open(  # noqa: SIM115  stays open as long as the process
            os.dup(descriptor), "w", buffering=1, encoding=stream.encoding, errors=stream.errors
        )
        setattr(sys, name, kept)
        os.dup2(file, descriptor)
    os.close(file)
