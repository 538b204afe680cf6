"""`toolkit tour`: train, compare, measure and shard, and report on one page.

Each stage stores its result in the tour's folder, so that an interrupted tour resumes, even in the
middle of a training run.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from toolkit._files import read_sealed_json, sealed_json, write_whole
from toolkit.bench.mixers.layer_costs import DECODE, KEPT, PREFILL, Layer, measure_pieces
from toolkit.lab.tour.page import TourResults, write_tour_page
from toolkit.language import (
    TrainedModel,
    TrainingRun,
    stream_text,
    train_language_model,
)
from toolkit.looped import LoopedConfig, match_parameters, parameter_count
from toolkit.measure import environment
from toolkit.training import Corpus, load_corpus

PROMPT = "The statement "
SAMPLE_LENGTH = 400
BATCH, SEQUENCE_LENGTH = 8, 128

# Of the layer whose costs are measured, in float32.
LAYER = Layer(heads=8, head_size=64, bytes_per_number=4)
LENGTHS = {PREFILL: (512, 1024, 2048, 4096, 8192), DECODE: (1024, 4096, 16384, 65536)}

LABELS = {
    "plain": "plain softmax",
    "looped": "looped softmax",
    "hybrid": "looped Gated DeltaNet hybrid",
}


def contenders() -> dict[str, LoopedConfig]:
    """The three models of the tour, at matched parameters.

    Four layers once, the same four layers twice, and a hybrid of three Gated DeltaNet layers and
    one softmax layer twice.
    """
    plain = LoopedConfig.tiny("full full full full", loops=1)
    looped = LoopedConfig.tiny("full full full full", loops=2)
    hybrid = LoopedConfig.tiny("gdn gdn gdn full", loops=2)
    return {
        "plain": plain,
        "looped": match_parameters(looped, plain),
        "hybrid": match_parameters(hybrid, plain),
    }


def run_tour(
    directory: Path,
    *,
    steps: int = 160,
    text: Sequence[Path] = (),
    fresh: bool = False,
    cores: int = 1,
) -> Path:
    """Run the tour on this machine and write its page.

    Args:
        directory: folder of the results; a tour found there is resumed.
        steps: training steps of each model.
        text: files and folders to train on; none means the language manual's prose.
        fresh: delete the results of an earlier tour in `directory`.
        cores: cores that share every batch, after `toolkit.parallel.use_cores`.

    Returns:
        The path of `index.html`.

    Raises:
        CorpusError: when the text cannot be used.
        KeyboardInterrupt: when stopped; the next call resumes.

    Cost: Two to three minutes on two cores, about 1 GB of memory at its peak.

    Example:
        >>> from pathlib import Path
        >>> page = run_tour(Path("tour"), steps=20)  # doctest: +SKIP
    """
    if steps < 10:
        raise ValueError(f"steps: got {steps}, wanted at least 10")
    directory = Path(directory)
    source = tuple(str(path) for path in text) or "prose"
    corpus = load_corpus(source)
    runs = {
        name: TrainingRun(
            config, source, steps=steps, batch=BATCH, sequence_length=SEQUENCE_LENGTH, cores=cores
        )
        for name, config in contenders().items()
    }
    _open_folder(directory, runs, corpus, fresh)
    started = time.perf_counter()

    trained: dict[str, TrainedModel] = {}
    samples = {}
    for number, (name, run) in enumerate(runs.items(), 1):
        print(
            f"\n[{number}/5] {LABELS[name]}: {parameter_count(run.config):,} parameters, "
            f"loops {run.config.loops}, {steps} steps on {corpus.name} ({corpus.size:,} bytes)",
            flush=True,
        )
        trained[name] = train_language_model(run, directory / name, corpus=corpus)
        if trained[name].stopped_by is not None:
            raise KeyboardInterrupt
        samples[name] = _once(
            directory / name / "sample.json",
            lambda name=name: "".join(stream_text(trained[name].model, PROMPT, SAMPLE_LENGTH)),
        )
        print(f"      held-out loss {trained[name].evaluation_loss:.3f} nats per byte")

    print("\n[4/5] cost against context: softmax and Gated DeltaNet, one layer", flush=True)
    costs = _once(directory / "costs.json", measure_costs)

    print("\n[5/5] one train step on 8 simulated devices, as the compiler made it", flush=True)
    sharded = _once(directory / "sharded.json", _sharded_step)

    results = TourResults(
        LABELS, runs, trained, PROMPT, samples, costs=costs, sharded=sharded, corpus=corpus
    )
    page = write_tour_page(results, directory)
    print(f"\n{time.perf_counter() - started:.0f} seconds")
    return page


def measure_costs() -> list[dict[str, Any]]:
    """Seconds of a prefill and of a decode step at each context, and the bytes kept (modelled).

    Softmax and Gated DeltaNet, each first compared with its reference. It takes about 20 seconds on
    two cores, most of it compilation.
    """
    points = []
    places = 1 + sum(map(len, LENGTHS.values()))
    pieces = measure_pieces(LAYER, lengths=LENGTHS, mixers=("full", "gdn"), rounds=3)
    for _, _, _, new in tqdm(pieces, total=places, desc="costs", unit="piece"):
        points += new
    return [
        dataclasses.asdict(point) | {"kept": LAYER.cost(point.mixer, KEPT, "bytes", point.tokens)}
        for point in points
    ]


def _open_folder(
    directory: Path, runs: dict[str, TrainingRun], corpus: Corpus, fresh: bool
) -> None:
    """Make the folder, or refuse one that holds a different tour.

    Numbers of one page come from one machine and one set of versions, so these count as settings.
    """
    facts = {name: dataclasses.asdict(run) for name, run in runs.items()}
    here = {name: environment()[name] for name in ("device", "versions")}
    text = json.dumps({"runs": facts, "corpus": corpus.sha256, **here}, sort_keys=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    marker = directory / "tour.json"
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"directory: {str(directory)!r} is a file; wanted a folder")
    if fresh and marker.exists():
        shutil.rmtree(directory)
    if directory.exists() and any(directory.iterdir()) and not marker.exists():
        raise ValueError(
            f"directory: {str(directory)!r} holds files that are no tour; choose another"
        )
    if marker.exists() and fingerprint not in marker.read_text():
        raise ValueError(
            f"directory: {str(directory)!r} holds a tour of other settings, text, machine or "
            "versions; start over with --fresh, or choose another --directory"
        )
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(marker, json.dumps({"fingerprint": fingerprint}).encode())


def _once(path: Path, work: Callable[[], Any]) -> Any:
    """The stored result of a stage, or the result of running it now."""
    if path.exists():
        print(f"      already done: {path.name}")
        return read_sealed_json(path.read_bytes(), str(path))["result"]
    result = work()
    write_whole(path, sealed_json({"result": result}))
    return result


def _sharded_step() -> dict[str, Any]:
    """Run in a process of its own: devices must be simulated before jax starts."""
    command = [sys.executable, "-m", "toolkit.lab.tour.sharded_step"]
    done = subprocess.run(
        command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the sharded step failed with status {done.returncode}; see above")
    return json.loads(done.stdout)
