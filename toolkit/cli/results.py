"""The subcommands of `toolkit` that time, test and show the methods: bench, experiment, eject."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from toolkit.cli.unread import refuse_changed, refuse_unread


def bench(
    suites: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    rounds: int = 7,
    out: Path | None = None,
    only: str = "",
    plot: bool = False,
    recorded: Path | None = None,
    all: bool = False,
    record: Path | None = None,
    minutes: float = 30.0,
    interpret: Literal["", "cuda", "tpu"] = "",
) -> None:
    """Time ours and its peers side by side, correctness first; writes a record.

    Args:
        suites: which to run (none: all of them).
        rounds: interleaved rounds of timing.
        out: folder for the records (none: runs/bench).
        only: run the cases whose name contains this string, such as "gdn forward".
        plot: also draw the ratios of suite mixers.
        recorded: draw them from this file of an earlier run instead, and run nothing.
        all: on a GPU or TPU, check every kernel and time it beside peers, into one file; run again
            to resume.
        record: that file (none: runs/bench/accelerator.json).
        minutes: with --all, begin nothing more after them.
        interpret: with --all on a CPU, rehearse with the kernels of this platform interpreted.
    """
    given = dict(locals())
    if all:
        refuse_unread(bench, given, "all", ("record", "minutes", "rounds", "only", "interpret"))
        from toolkit.bench.accelerator.record_all import FAILED, record_all

        path = record or Path("runs/bench/accelerator.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        found = record_all(path, minutes=minutes, rounds=rounds, only=only, interpret=interpret)
        failed = sum(FAILED in entry.name for entry in found)
        print(f"\nrecorded: {path}, {len(found)} records, {failed} failed; see docs/results.md")
        return
    if recorded is not None:
        refuse_unread(bench, given, "recorded", ("suites", "out", "plot"))
    own = {name: given[name] for name in ("record", "minutes", "interpret")}
    refuse_changed(bench, own, "without --all, which alone reads it")
    from toolkit.bench import SUITES, run_suites
    from toolkit.lab import sliders

    known = SUITES | {"sliders": sliders.SUITE}
    run_suites(
        suites, rounds=rounds, out=out, only=only, plot=plot, recorded=recorded, suites=known
    )


def experiment(
    name: Annotated[str, tyro.conf.Positional] = "",
    directory: Path | None = None,
    seeds: int = 5,
    only: str = "",
    runs: Path | None = None,
    recorded: Path | None = None,
    list: bool = False,
) -> None:
    """Train small models until a claim is seen or contradicted; run again to resume.

    Args:
        name: name of the experiment.
        directory: the experiment's folder (none: runs/experiments/NAME).
        seeds: number of seeds per setting.
        only: run the settings whose name contains this string.
        runs: the file of finished runs (none: runs.jsonl in the folder); a file in data/experiments
            refuses runs from a tree with uncommitted changes.
        recorded: only print and draw this file of finished runs.
        list: print the names of all experiments.
    """
    given = dict(locals())
    from toolkit.experiments import EXPERIMENTS, load_experiment, run_experiment, show_recorded

    if list:
        refuse_unread(experiment, given, "list", ())
        for known, summary in EXPERIMENTS.items():
            print(f"{known:<14} {summary}")
        return
    found = load_experiment(name)
    directory = directory or Path("runs/experiments") / name
    if recorded is not None:
        refuse_unread(experiment, given, "recorded", ("name", "directory"))
        show_recorded(found, recorded, directory)
        return
    if found.devices > 1:
        from toolkit.parallel import simulate_devices

        simulate_devices(found.devices)
    if not run_experiment(found, directory, seeds=seeds, only=only, runs=runs):
        sys.exit(130)


def eject(name: Annotated[str, tyro.conf.Positional], out: Path | None = None) -> None:
    """Print one linear-time mixer as a readable file that imports only jax.

    Args:
        name: the function or its word, such as gated_delta_net or gdn.
        out: write it here instead; the file checks itself when it is run.
    """
    from toolkit.eject import eject as source_of

    if out is None:
        print(source_of(name))
    elif out.exists():
        raise ValueError(f"out: {str(out)!r} exists; wanted the name of a new file")
    else:
        out.write_text(source_of(name), encoding="utf-8")
        print(f"{out}: it checks itself with  python {out}")
