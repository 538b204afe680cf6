"""Loading a trained model from a run's folder, an exported file or a published checkpoint."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from toolkit._checks import checked
from toolkit.language.cores import read_run
from toolkit.language.run import TrainingRun
from toolkit.looped import LoopedConfig, LoopedLM, load_checkpoint, load_model, parameter_count
from toolkit.looped.checkpoints.hub import PUBLISHED
from toolkit.looped.feed_forward import RouterState
from toolkit.training import Checkpoints, TrainState, evaluation_params


@checked
def load_language_model(directory: Path) -> LoopedLM:
    """Load the newest model of a run's folder, an exported file, or a published checkpoint.

    Args:
        directory: a folder written by `train_language_model`, or by `training.fit` with the
            configuration {"model": dataclasses.asdict(config), "training":
            dataclasses.asdict(recipe)}; a file written by `toolkit.looped.save_model`; or what
            `toolkit.looped.load_checkpoint` reads: a folder with a config.json, or "owner/name".

    Raises:
        FileNotFoundError: when the folder holds no run, or no checkpoint yet.
        ValueError: when its run.json, or the file, cannot be understood.
        CheckpointError: when no checkpoint can be read.

    Example:
        >>> from flax import nnx
        >>> from toolkit.looped import LoopedConfig, LoopedLM, save_model
        >>> save_model(LoopedLM(LoopedConfig.tiny("window"), rngs=nnx.Rngs(0)), "small.safetensors")
        >>> load_language_model("small.safetensors").config.pattern
        'window'
    """
    if Path(directory).is_file():
        return load_model(directory)
    if is_published(directory):
        return load_checkpoint(directory)
    described = Path(directory) / "run.json"
    try:
        stored = read_run(described.parent) if described.is_file() else _fitted(Path(directory))
        config = LoopedConfig(**stored["configuration"]["model"])
        run = TrainingRun(config, **stored["configuration"]["training"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"directory: {str(described)!r} is damaged or of another version ({error})"
        ) from error
    _check_size(config, described)
    graph, params, bias = parts_of(LoopedLM(config, rngs=nnx.Rngs(run.seed)))
    state = TrainState.create(params, run.make_optimizer(), bias)
    with Checkpoints(Path(directory) / "checkpoints", is_read_only=True) as checkpoints:
        own, *shorter = (
            {"configuration": found}
            for found in (stored["configuration"], *stored.get("extended", []))
        )
        restored = checkpoints.restore_latest(state, own, shorter)
    if restored is None:
        raise FileNotFoundError(
            f"directory: {str(directory)!r} has no checkpoint yet; let training reach its first one"
        )
    bias = restored[0].model_state
    return nnx.merge(graph, evaluation_params(restored[0]), *(() if bias is None else (bias,)))


def model_to_start_from(source: str, **changes: Any) -> LoopedLM:
    """The model of anything that `load_language_model` reads, with another `dtype` or `remat`."""
    if is_published(Path(source)):
        return load_checkpoint(source, **changes)
    trained = load_language_model(Path(source))
    config = dataclasses.replace(trained.config, **changes)
    model = LoopedLM(config, rngs=nnx.Rngs(0))
    nnx.update(model, nnx.state(trained))
    return model


def parts_of(model: LoopedLM) -> tuple[nnx.GraphDef, nnx.State, nnx.State | None]:
    """Structure, parameters, and what routers keep if the model has any, which no optimiser
    moves."""
    graph, bias, params = nnx.split(model, RouterState, ...)
    return graph, params, bias if jax.tree.leaves(bias) else None


def _fitted(directory: Path) -> dict[str, Any]:
    """What `fit` was told of its run, from the newest checkpoint."""
    found = None
    if (directory / "checkpoints").is_dir():
        with Checkpoints(directory / "checkpoints", is_read_only=True) as checkpoints:
            found = checkpoints.newest_metadata()
    if found is None:
        raise FileNotFoundError(
            f"directory: {str(directory)!r} holds no run.json; "
            "wanted a folder written by `toolkit train` or `toolkit tour`, an exported file, or a "
            "folder of a published checkpoint with its config.json"
        )
    if not {"model", "training"} <= found.get("configuration", {}).keys():
        raise ValueError(
            "wanted the configuration of `fit` to have 'model', dataclasses.asdict of the "
            "LoopedConfig, and 'training', that of the Recipe"
        )
    return found


def is_published(directory: Path) -> bool:
    """Whether this is a published checkpoint: a folder with a config.json, or "owner/name"."""
    if Path(directory).exists():
        has = [(Path(directory) / name).is_file() for name in ("config.json", "run.json")]
        return has == [True, False]
    return bool(PUBLISHED.fullmatch(str(directory)))


def _check_size(config: LoopedConfig, described: Path) -> None:
    """Refuse a model that is larger than the checkpoints, before building it."""
    files = described.parent.glob("checkpoints/[0-9]*/**/*")
    on_disk = sum(file.stat().st_size for file in files if file.is_file())
    # Four bytes, twelve with the optimiser; compression saves little.
    if on_disk and on_disk < 2 * (parameters := parameter_count(config)):
        raise ValueError(
            f"directory: {str(described)!r} describes {parameters:,} parameters; the checkpoints "
            f"hold {on_disk:,} bytes"
        )
