"""axe-core on a page: what it finds that keeps somebody out. It comes from npm."""

import functools
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

PACKAGE = "axe-core@4.14.1"


@functools.cache
def script() -> str:
    """The text of axe-core; the test is skipped where npm cannot bring it."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not on PATH")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", PACKAGE, "--silent", "--pack-destination", folder]
        if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
            pytest.skip(f"npm could not bring {PACKAGE}")
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as packed:
            content = packed.extractfile("package/axe.min.js")
            assert content is not None
            return content.read().decode()


def serious_violations(page: Any, within: str = "body") -> list[str]:
    """Rule and first place of each serious or critical violation within a part of a page."""
    page.evaluate(script())
    found = page.evaluate("within => axe.run(within)", within)
    return [
        f"{each['id']}: {each['nodes'][0]['html'][:200]}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]
