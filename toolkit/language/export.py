"""Export of a run's model to one file or a Hugging Face folder, with the record of its training."""

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
from toolkit.looped import parameter_count, save_checkpoint, save_model
from toolkit.training import read_metrics

SUFFIX = ".safetensors"


@checked
def export_language_model(
    directory: Path, path: Path, *, dtype: str = "float16", style: str | None = None
) -> tuple[Path, Path]:
    """Write the newest parameters of a run to one file, or to a folder for Hugging Face
    transformers, with the record of their training.

    Args:
        directory: a folder written by `train_language_model`.
        path: the file of parameters, ending in .safetensors, and the record is the same name with
            .json; with a `style` the new folder, in which the record is training.json.
        dtype: how numbers are stored, see `toolkit.looped.save_model`.
        style: the `model_type` of the folder's config.json, see `toolkit.looped.save_checkpoint`;
            the tokenizer and the special tokens come along. None: one file.

    Returns:
        The two paths.

    Raises:
        FileNotFoundError: when the folder holds no run, or no checkpoint yet.
        ValueError: when models of this style cannot express the run's.

    Example:
        >>> from toolkit.looped import LoopedConfig
        >>> run = TrainingRun(LoopedConfig.tiny("window"), steps=1, batch=1, sequence_length=8)
        >>> trained = train_language_model(run, "run", is_progress_shown=False)
        >>> [path.name for path in export_language_model("run", "small.safetensors")]
        ['small.safetensors', 'small.json']
    """
    path, directory = Path(path), Path(directory)
    if style is None and path.suffix != SUFFIX:
        raise ValueError(
            f"path: got {str(path)!r}, wanted a name that ends in {SUFFIX}, or a style"
        )
    model, special = load_language_model(directory), find_special_tokens(directory)
    if style is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_model(model, path, dtype=dtype)
        if (tokenizer := directory / TOKENIZER).is_file():
            shutil.copyfile(tokenizer, tokenizer_beside(path))
        write_special_tokens(path, special)
    else:
        ids = {"bos_token_id": special.start, "eos_token_id": special.stops}
        how: Any = {"dtype": dtype, "settings": ids, "tokenizer": directory}
        save_checkpoint(model, path, style=style, **how)
    facts = read_run(directory)
    # A run of an earlier version does not record it; its tokens are bytes unless it read an array.
    texts = facts["configuration"]["training"]["text"]
    is_array = any(
        str(text).endswith(".npy") for text in ([texts] if isinstance(texts, str) else texts)
    )
    per_token = facts.setdefault("bytes_per_token", None if is_array else 1.0)
    files = [path] if style is None else sorted(path.glob(f"*{SUFFIX}"))
    facts["result"] = _result(directory, per_token) | {
        "parameters": parameter_count(model.config),
        "stored_as": dtype,
        "size_bytes": sum(file.stat().st_size for file in files),
        "sha256": hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest(),
    }
    record = path.with_suffix(".json") if style is None else path / "training.json"
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
