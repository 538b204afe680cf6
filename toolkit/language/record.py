"""The record of a run in its folder, `run.json`: its settings, and the shorter runs it extends."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from toolkit._files import sealed_json, write_whole
from toolkit.language.cores import read_run
from toolkit.language.run import TrainingRun
from toolkit.language.settings import HOW_IT_RUNS
from toolkit.language.tokens import TOKENIZER, find_special_tokens, write_special_tokens
from toolkit.measure import environment
from toolkit.training import Corpus


def configuration_of(
    run: TrainingRun, corpora: list[Corpus], validation: Corpus | None
) -> dict[str, Any]:
    """The settings that identify a run, in the form that JSON returns."""
    training = {
        field.name: getattr(run, field.name)
        for field in dataclasses.fields(run)
        if field.name not in ("config", *HOW_IT_RUNS)
    }
    facts = {
        "model": dataclasses.asdict(run.config),
        "training": training,
        "corpus": _one_or_all([_identity(corpus) for corpus in corpora]),
    }
    if validation is not None:
        facts["validation"] = _identity(validation)
    return json.loads(json.dumps(facts))


def _one_or_all(facts: list[dict[str, Any]]) -> dict[str, Any] | list[dict[str, Any]]:
    return facts if len(facts) > 1 else facts[0]


def _identity(corpus: Corpus) -> dict[str, Any]:
    return {"name": corpus.name, "size": corpus.size, "sha256": corpus.sha256}


def shorter_runs(
    configuration: dict[str, Any], directory: Path, extend: bool
) -> list[dict[str, Any]]:
    """The shorter runs that a run extends: the configurations that are in its folder."""
    if not _is_begun(directory):
        if extend:
            raise ValueError(
                f"extend: {str(directory)!r} holds no run; wanted one with checkpoints"
            )
        return []
    stored, wanted = read_run(directory), configuration["training"]["steps"]

    def steps_of(run: dict[str, Any]) -> int | None:
        """The steps of a run that differs in nothing else."""
        steps = run["training"]["steps"]
        is_same = run | {"training": run["training"] | {"steps": wanted}} == configuration
        return steps if is_same else None

    found = steps_of(stored["configuration"])
    if found is not None and (wanted < found or (wanted > found and not extend)):
        raise ValueError(
            f"steps: got {wanted}, and the run in {str(directory)!r} has {found}; wanted {found}, "
            "or more with `extend` (toolkit train RUN --extend STEPS)"
        )
    runs = [*stored.get("extended", []), stored["configuration"]]
    return [run for run in runs if (steps := steps_of(run)) is not None and steps < wanted]


def _is_begun(directory: Path) -> bool:
    """Whether a folder holds a run; one without a checkpoint is new."""
    saved = directory.glob("checkpoints/*")
    return (directory / "run.json").is_file() and any(entry.name.isdigit() for entry in saved)


def describe_run(
    configuration: dict[str, Any], shorter: list[dict[str, Any]], corpora: list[Corpus],
    directory: Path, tokenizer: Any, per_token: float | None, start: Path | None,
) -> None:  # fmt: skip
    """Write the record of a run at its first start, and after it was extended."""
    is_known = not shorter or read_run(directory)["configuration"] == configuration
    if jax.process_index() or (_is_begun(directory) and is_known):
        return
    facts = {
        "configuration": configuration,
        "corpus": _one_or_all([corpus.record() for corpus in corpora]),
        "environment": environment(),
        "bytes_per_token": per_token,
    }
    if shorter:
        facts["extended"] = shorter
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / "run.json", sealed_json(facts, indent=1))
        if tokenizer is not None:
            tokenizer.save(str(directory / TOKENIZER))
        if start is not None:
            write_special_tokens(directory, find_special_tokens(start))
    except OSError as error:
        raise OSError(
            f"directory: cannot write in {str(directory)!r} ({error.strerror}); "
            "wanted a folder with room, or the name of a new one"
        ) from error
