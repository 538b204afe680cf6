"""Export of a run's model to one file, with the record of its training."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from toolkit._checks import checked
from toolkit.language.cores import read_run
from toolkit.language.load import load_language_model
from toolkit.language.run import loss_unit
from toolkit.language.tokens import (
    TOKENIZER,
    find_special_tokens,
    tokenizer_beside,
    write_special_tokens,
)
from toolkit.looped import parameter_count, save_model
from toolkit.training import read_metrics

SUFFIX = ".safetensors"


@checked
def export_language_model(
    directory: Path, path: Path, *, dtype: str = "float16"
) -> tuple[Path, Path]:
    """Write the newest parameters of a run to one file, with the record of their training beside
    it.

    Args:
        directory: a folder written by `train_language_model`.
        path: the file of parameters, ending in .safetensors; the record is the same name with
            .json.
        dtype: how numbers are stored, see `toolkit.looped.save_model`.

    Returns:
        The two paths.

    Raises:
        FileNotFoundError: when the folder holds no run, or no checkpoint yet.

    Example:
        >>> from toolkit.looped import LoopedConfig
        >>> run = TrainingRun(LoopedConfig.tiny("window"), steps=1, batch=1, sequence_length=8)
        >>> trained = train_language_model(run, "run", is_progress_shown=False)
        >>> [path.name for path in export_language_model("run", "small.safetensors")]
        ['small.safetensors', 'small.json']
    """
    path = Path(path)
    if path.suffix != SUFFIX:
        raise ValueError(f"path: got {str(path)!r}, wanted a name that ends in {SUFFIX}")
    model = load_language_model(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_model(model, path, dtype=dtype)
    facts = read_run(Path(directory))
    # A run of an earlier version does not record it; its tokens are bytes unless it read an array.
    texts = facts["configuration"]["training"]["text"]
    is_array = any(
        str(text).endswith(".npy") for text in ([texts] if isinstance(texts, str) else texts)
    )
    per_token = facts.setdefault("bytes_per_token", None if is_array else 1.0)
    if (tokenizer := Path(directory) / TOKENIZER).is_file():
        shutil.copyfile(tokenizer, tokenizer_beside(path))
    write_special_tokens(path, find_special_tokens(Path(directory)))
    facts["result"] = _result(Path(directory), per_token) | {
        "parameters": parameter_count(model.config),
        "stored_as": dtype,
        "size_bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    record = path.with_suffix(".json")
    record.write_text(json.dumps(facts, indent=1) + "\n")
    return path, record


def _result(directory: Path, bytes_per_token: float | None) -> dict[str, Any]:
    """The last step and losses of the training, from its metrics."""
    rows = read_metrics(directory / "metrics.jsonl")
    evaluated = [row for row in rows if "evaluation_loss" in row]
    return {
        "steps": rows[-1]["step"] if rows else 0,
        "held_out_loss": evaluated[-1]["evaluation_loss"] if evaluated else None,
        "held_out_loss_unit": loss_unit(bytes_per_token),
        "training_seconds": round(sum(row.get("seconds", 0.0) for row in rows), 1),
    }
