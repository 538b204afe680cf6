"""The table of suites, and the processes they run in."""

import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit._checks import checked
from toolkit.bench.harness import PlannedCase, Suite, run_case
from toolkit.bench.peers import has_torch
from toolkit.measure import read_records, write_records

SUITES: dict[str, Suite] = {
    "gdn": Suite(
        "toolkit.bench.mixers.suite:gated_delta_net_cases",
        (2,),
        "Gated DeltaNet against its token scan and transformers",
    ),
    "mixers": Suite(
        "toolkit.bench.mixers.suite:cases",
        (2,),
        "every recurrent mixer against scan, transformers, machine; fla on a GPU",
    ),
    "maxtext": Suite(
        "toolkit.bench.maxtext:cases",
        (2,),
        "Gated DeltaNet against MaxText's own form in JAX, where MaxText is installed",
    ),
    "softmax": Suite(
        "toolkit.bench.softmax:cases", (1, 2), "blockwise softmax against jax.nn and torch SDPA"
    ),
    "decode": Suite(
        "toolkit.bench.mixers.steps:decode_cases", (2,), "one token of decoding against torch SDPA"
    ),
    "latent": Suite(
        "toolkit.bench.mixers.steps:latent_cases",
        (1,),
        "a step of latent attention against one read; on a GPU its kernel, by cut of the latents",
    ),
    "sparse": Suite(
        "toolkit.bench.sparse:cases",
        (2,),
        "a step of every sparse decoder against the dense one, 16k to 128k",
    ),
    "experts": Suite(
        "toolkit.bench.experts:cases", (2,), "forms of a mixture of experts against ragged_dot"
    ),
    "exits": Suite(
        "toolkit.bench.exits:cases",
        (2,),
        "early exits and mixtures of recursions, trained first: tokens per second against loss",
    ),
    "looped": Suite(
        "toolkit.bench.looped:cases", (2,), "looped models: decoding at 8k, training steps, writing"
    ),
    "serving": Suite(
        "toolkit.bench.serving:cases",
        (2,),
        "a trace of requests through the engine and transformers' continuous batching",
    ),
    "training": Suite(
        "toolkit.bench.training:cases",
        (2,),
        "a training step against plain JAX and PyTorch's Llama",
    ),
    "utilisation": Suite(
        "toolkit.bench.runs.utilisation:cases",
        (2,),
        "600M parameters, looped and plain, against plain JAX, with the MFU; on a GPU",
    ),
    "checkpoints": Suite(
        "toolkit.bench.runs.checkpoints:cases",
        (2,),
        "reading a checkpoint of 1 GB, and saving one while training goes on",
    ),
    "compiling": Suite(
        "toolkit.bench.runs.compiling:cases",
        (2,),
        "tracing and compiling a gradient: experts beside dense layers, scanned and unrolled",
    ),
    "startup": Suite("toolkit.bench.startup:cases", (2,), "import toolkit against import jax"),
}


@checked
def run_suites(
    names: Sequence[str] = (), *,
    rounds: int = 7, out: Path | None = None, only: str = "", plot: bool = False,
    recorded: Path | None = None, suites: Mapping[str, Suite] = SUITES,
) -> None:  # fmt: skip
    """Run suites, print their tables and write their records.

    Args:
        names: which suites; none means all.
        rounds: interleaved rounds of timing.
        out: folder for `<suite>.json` files; none means `runs/bench`.
        only: run the cases whose name contains this string; none means all.
        plot: also draw the figure of suite `mixers`.
        recorded: draw that figure from this file of records instead, and run nothing.
        suites: the suites to choose from, by name.

    Raises:
        RuntimeError: when a suite fails, as when contenders disagree.

    Example:
        >>> from pathlib import Path
        >>> run_suites(["startup"], rounds=3, out=Path("bench"))  # doctest: +SKIP
    """
    for name in names:
        if name not in suites:
            raise ValueError(f"suites: got {name!r}, wanted some of {', '.join(suites)}")
    if rounds < 1:
        raise ValueError(f"rounds: got {rounds}, wanted at least 1")
    if (plot or recorded) and (names and "mixers" not in names):
        raise ValueError(f"plot: only suite mixers has a figure; got {', '.join(names)}")
    if recorded is not None:
        _draw(recorded, out or Path("runs/bench"), is_recorded=True)
        return
    if not has_torch():
        print("PyTorch is not installed, so its contenders are left out: install extra `oracle`.")
    folder = out or Path("runs/bench")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or suites:
        records = []
        for cores in suites[name].cores:
            with tempfile.TemporaryDirectory() as scratch:
                part = Path(scratch) / "records.json"
                command = [sys.executable, "-m", "toolkit.bench", name, suites[name].cases]
                command += [str(cores), str(rounds), str(part), only]
                if subprocess.run(command, check=False).returncode:
                    raise RuntimeError(f"suite {name!r} on {cores} cores failed; see above")
                records += read_records(part)
        if not records:
            raise ValueError(f"only: no case of suite {name} has {only!r} in its name")
        write_records(folder / f"{name}.json", records)
        print(f"\nrecorded: {folder / name}.json")
        if plot and name == "mixers":
            _draw(folder / "mixers.json", folder, is_recorded=False)


def _draw(records: Path, folder: Path, *, is_recorded: bool) -> None:
    from toolkit.bench.mixers.figure import draw_mixers  # matplotlib, only when it is wanted

    path = draw_mixers(read_records(records), folder / "mixers.png", is_recorded=is_recorded)
    print(f"figure: {path}")


@checked
def run_suite_here(
    name: str, cores: int, rounds: int, out: Path, only: str = "",
    suites: Mapping[str, Suite] = SUITES,
) -> None:  # fmt: skip
    """Run one suite in this process, before jax has started.

    Args:
        name: the suite.
        cores: cores to keep to, and host devices to make.
        rounds: interleaved rounds of timing.
        out: the JSON file of records.
        only: run the cases whose name contains this string.
        suites: the suites to choose from, by name.

    Raises:
        UncheckedRatioError: when contenders disagree.

    Example:
        >>> from pathlib import Path
        >>> run_suite_here("startup", cores=1, rounds=3, out=Path("startup.json"))  # doctest: +SKIP
    """
    import jax

    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))[:cores]
        os.sched_setaffinity(0, allowed)
    jax.config.update("jax_num_cpu_devices", cores)
    # Where torch shares a GPU, jax must not take most of its memory at the start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    records = []
    for case in pkgutil.resolve_name(suites[name].cases)(cores):
        if only not in case.name:
            continue
        if isinstance(case, PlannedCase):
            case = case.build(case.name)
        records += run_case(case, rounds=rounds, cores=cores)
    write_records(out, records)
