"""What fits: models against clusters, under well-known schemes."""

from collections.abc import Sequence

from toolkit._checks import checked
from toolkit.looped import LoopedConfig
from toolkit.planning.clusters import cluster
from toolkit.planning.model_checks import check_model
from toolkit.planning.models import model_of
from toolkit.planning.predict import Prediction, prediction_of
from toolkit.planning.strategy import Strategy
from toolkit.planning.time.seconds import constants_of

MOST = 64  # models, and numbers of chips, on one map
MOST_SEQUENCES = 1024
_TENSOR = 4


def schemes(chips: int) -> dict[str, Strategy]:
    """The six schemes for a number of chips; with tensor parallelism if it is divisible by four."""
    tensor = _TENSOR if chips % _TENSOR == 0 else 1
    shards = chips // tensor
    return {
        "data parallel": Strategy(data=chips),
        "ZeRO-1": Strategy(data=chips, shard_optimizer=True),
        "ZeRO-3": Strategy(fsdp=chips),
        "ZeRO-3, recomputing": Strategy(fsdp=chips, recompute="layer"),
        "ZeRO-3 x tensor": Strategy(fsdp=shards, tensor=tensor),
        "ZeRO-3 x tensor, recomputing": Strategy(fsdp=shards, tensor=tensor, recompute="layer"),
    }


@checked
def what_fits(
    models: Sequence[str | LoopedConfig],
    chips: Sequence[str],
    *,
    sequences_per_chip: int = 1,
    sequence_length: int = 2048,
) -> dict[tuple[int, int, str], Prediction | None]:
    """Predict every model on every cluster under six named schemes.

    Args:
        models: configurations, or names of them.
        chips: clusters by name, such as "h100:8".
        sequences_per_chip: batch size per chip, the same for all schemes of a cluster.
        sequence_length: tokens per sequence.

    Returns:
        (index of the model, index of the cluster, scheme) -> its `Prediction`, or None if the
        scheme does not divide the model.

    Cost: Below two seconds for ten models on ten clusters.

    Example:
        >>> found = what_fits(["llama-3-8b"], ["h100:1", "h100:8"])
        >>> found[0, 0, "data parallel"].fits, found[0, 1, "ZeRO-3, recomputing"].fits
        (False, True)
    """
    for name, given in (("models", models), ("chips", chips)):
        if len(given) > MOST:
            raise ValueError(f"{name} must be at most {MOST}; got {len(given)}")
    if not 1 <= sequences_per_chip <= MOST_SEQUENCES:
        raise ValueError(
            f"sequences_per_chip must be 1 to {MOST_SEQUENCES}; got {sequences_per_chip}"
        )
    configs, clusters = [model_of(model) for model in models], [cluster(name) for name in chips]
    cuts = [schemes(where.chips) for where in clusters]
    found: dict[tuple[int, int, str], Prediction | None] = {}
    for row, config in enumerate(configs):
        check_model(config, Strategy(), sequences_per_chip, sequence_length)
        for column, (where, named) in enumerate(zip(clusters, cuts, strict=True)):
            batch = sequences_per_chip * where.chips
            for name, strategy in named.items():
                sizes = (config, strategy, batch, sequence_length)
                found[row, column, name] = _predicted(where, *sizes)
    return found


def _predicted(where, config, strategy, batch, length):
    try:
        check_model(config, strategy, batch, length)
    except ValueError:
        return None
    return prediction_of(config, where, strategy, batch, length, None, constants_of(where, None))
