"""What a user waits for: `import toolkit` beside `import jax`, each in a process of its own."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from toolkit.bench.harness import Case


def cases(cores: int) -> Iterator[Case]:
    """Import times."""
    del cores  # an import runs on one
    yield Case(
        name="import, whole process",
        contenders={"import toolkit": _run("import toolkit"), "import jax": _run("import jax")},
        check=_succeeded,
        ours="import toolkit",
        targets={"import jax": 1 / 1.1},
    )


def _run(statement: str) -> Callable[[], int]:
    command = [sys.executable, "-c", statement]
    return lambda: subprocess.run(command, check=False).returncode


def _succeeded(results: Mapping[str, Any]) -> None:
    for name, status in results.items():
        if status != 0:
            raise ValueError(f"{name!r} ended with status {status}")
