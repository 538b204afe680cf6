"""What libraries in C++ write to the standard streams goes to a file of its own.

gloo reports every connection, and the partitioner whatever it finds odd, straight to the file
descriptors, between the lines of a progress bar. Python's own output stays where it was.
"""

import os
import sys
from pathlib import Path


def library_output_to(path: Path) -> None:
    """Lets `sys.stdout` and `sys.stderr` write where they did, and all other code to a file."""
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
