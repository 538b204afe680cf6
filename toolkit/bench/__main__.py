"""Worker of `toolkit bench`: python -m toolkit.bench SUITE CORES ROUNDS OUT ONLY."""

import sys
from pathlib import Path

from toolkit.bench import run_suite_here

if __name__ == "__main__":
    suite, cores, rounds, out, only = sys.argv[1:]
    # What a user types to have the same again: records quote the command line.
    sys.argv = ["toolkit", "bench", suite, "--rounds", rounds, *(["--only", only] if only else [])]
    run_suite_here(suite, int(cores), int(rounds), Path(out), only)
