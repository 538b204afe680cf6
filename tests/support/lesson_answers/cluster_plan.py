"""Answers to the exercises on fitting a model into a cluster."""

from toolkit.planning import Strategy


def state_bytes(parameters, data, fsdp, tensor, shard_optimizer):
    cut = fsdp * tensor
    return 4 * parameters / cut + 8 * parameters / (cut * (data if shard_optimizer else 1))


def everything_cut(parameters, data, fsdp, tensor, shard_optimizer):
    return 12 * parameters / (data * fsdp * tensor)


def search(chips, predicted, must_fit=True, least_tensor=1, rank=lambda found: found.step_seconds):
    found = []
    for data in range(1, chips + 1):
        for tensor in range(least_tensor, chips + 1):
            if chips % (data * tensor) == 0:
                for word in ("none", "elementwise", "layer"):
                    fsdp = chips // (data * tensor)
                    strategy = Strategy(data=data, fsdp=fsdp, tensor=tensor, recompute=word)
                    found.append(predicted(strategy))
    possible = [one for one in found if one is not None and (one.fits or not must_fit)]
    return min(possible, key=rank).strategy


ANSWERS = {
    "state_bytes": (
        state_bytes,
        [
            (everything_cut, "data 8: 12.05 GB; wanted 96.36"),
            (
                lambda parameters, data, fsdp, tensor, **_: 12 * parameters / fsdp / tensor,
                "cut: 96",
            ),
            (lambda parameters, **sizes: 4 * parameters / sizes["fsdp"], "wanted 96.36"),
            (lambda parameters: parameters, "unexpected keyword argument"),
        ],
    ),
    "strategy": (
        lambda: Strategy(fsdp=8, recompute="elementwise"),
        [
            (lambda: Strategy(data=8), "needs 217 GB per chip, of which activations 89"),
            (lambda: Strategy(fsdp=8), "needs 112 GB per chip, of which activations"),
            (lambda: Strategy(fsdp=8, recompute="layer"), "most goes to: recomputed"),
            (lambda: Strategy(tensor=8, recompute="layer"), "most goes to: tensor communication"),
            (lambda: Strategy(fsdp=4), "strategy takes 4 chips"),
            (lambda: {"fsdp": 8}, "That is dict; wanted a Strategy"),
        ],
    ),
    "search": (
        search,
        [
            (lambda chips, predicted: search(chips, predicted, False), "does not fit"),
            (lambda chips, predicted: Strategy(fsdp=chips, recompute="layer"), "s is possible"),
            (
                lambda chips, predicted: Strategy(fsdp=chips, recompute="elementwise"),
                "llama-3-70b on h100:64, 32 sequences: fsdp 64, recompute elementwise does not",
            ),
            (lambda chips, predicted: search(chips, predicted, least_tensor=2), "is possible"),
            (
                lambda chips, predicted: search(
                    chips, predicted, rank=lambda found: found.memory.total
                ),
                "is possible",
            ),
            (lambda chips, predicted: "fsdp", "That is str"),
        ],
    ),
}
