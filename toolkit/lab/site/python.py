"""What the site needs to check exercises in the browser and to set formulas, without a network.

Pyodide and MathJax are npm packages; they are taken when the site is built and lie beside its
pages. The package comes as an archive of the modules that the judges import.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import toolkit

# Their judges and solutions are plain Python. The others need NumPy or JAX, of which neither npm
# nor PyPI has a build for Pyodide.
EXERCISES = {
    "attention_cost": ("score_flops", "longest_context", "merge"),
    "pipeline": ("microbatches_for", "one_f_one_b", "beat"),
    "kill_worker": ("batch_at", "save", "best_interval"),
    "ring": ("ring_bytes",),
    "pipeline_on_devices": ("places", "early"),
    "trees_and_cuts": ("bound", "find_cut"),
    "real_trace": ("busy", "self_time", "exposed"),
    "fewer_bits": ("to_int8", "to_e4m3", "to_blocks"),
}
# Folder beside the pages -> npm package and the files of it.
VENDORED = {
    "python": (
        "pyodide@314.0.7",
        ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip",
         "pyodide-lock.json"),
    ),
    "mathjax": ("mathjax@3.2.2", ("es5/tex-svg.js",)),
}  # fmt: skip
_LIST = """
import sys
sys.path.insert(0, {static!r})
import exercise
sys.path.insert(0, {root!r})
for lesson in {lessons!r}:
    exercise.load(lesson)
print(*sorted(name for name in sys.modules if name.partition(".")[0] == "toolkit"))
"""


def vendor(static: Path) -> Iterator[Path]:
    """Put Pyodide, MathJax and the judges' modules into the folder of static files."""
    npm = shutil.which("npm")
    if npm is None:
        raise ValueError("npm is not on PATH; it brings Python and MathJax into the site")
    for folder, (package, files) in VENDORED.items():
        (static / folder).mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as place:
            command = [npm, "pack", package, "--silent", "--pack-destination", place]
            if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
                raise ValueError(f"npm could not bring {package}")
            (archive,) = Path(place).glob("*.tgz")
            with tarfile.open(archive) as packed:
                for file in files:
                    content = packed.extractfile(f"package/{file}")
                    assert content is not None
                    path = static / folder / Path(file).name
                    path.write_bytes(content.read())
                    yield path
    yield pack_judges(static)


def pack_judges(static: Path) -> Path:
    """The archive of the modules that judges import; all but the package is absent."""
    root = Path(toolkit.__file__).parents[1]
    code = _LIST.format(static=str(static), root=str(root), lessons=tuple(EXERCISES))
    # -S: what is installed is hidden, as it is in the browser.
    listed = subprocess.run(
        [sys.executable, "-S", "-E", "-c", code], check=True, capture_output=True, text=True
    )
    path = static / "python/toolkit.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in listed.stdout.split():
            file = root / name.replace(".", "/")
            file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
            archive.write(file, file.relative_to(root))
    shutil.copy(static / "exercise.py", static / "python")
    return path
