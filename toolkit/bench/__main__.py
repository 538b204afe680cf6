"""Worker of `toolkit bench`: python -m toolkit.bench SUITE CASES CORES ROUNDS OUT ONLY."""

import sys
from pathlib import Path

from toolkit.bench import Suite, run_suite_here

if __name__ == "__main__":
    name, cases, cores, rounds, out, only = sys.argv[1:]
    # What a user types to have the same again: records quote the command line.
    sys.argv = ["toolkit", "bench", name, "--rounds", rounds, *(["--only", only] if only else [])]
    suites = {name: Suite(cases, (int(cores),), summary="")}
    run_suite_here(name, int(cores), int(rounds), Path(out), only, suites)
