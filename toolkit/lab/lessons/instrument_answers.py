"""The answers to the instruments' opening questions, computed when a guess has been entered."""

from typing import Any

import numpy as np

from toolkit.lab.lessons.outline import Answer

GAP = "in the widest gap between rates that were tried"


def same_word() -> Answer:
    """The influence of earlier occurrences of a word on its last one, by two mixers."""
    from toolkit.lab.mixers.panel import MixerPanel
    from toolkit.lab.mixers.view import is_same

    view: Any = MixerPanel(left="retention", right="gdn", token=19).view
    earlier = [at for at in range(view.token) if is_same(view.words[at], view.words[view.token])]
    shares = {
        memory.title: 100 * float(memory.share(view.token, view.head)[np.array(earlier)].sum())
        for memory in (view.left, view.right)
    }
    (left, share), (right, other) = shares.items()
    words = (
        f"With {left} they have {share:.0f}% of the influence, with {right} {other:.0f}% (measured "
        f"here, head {view.head + 1}, random projections)."
    )
    return Answer(round(share), words)


def reach() -> Answer:
    """The bytes of which a looped model with windows can know."""
    from toolkit.lab.looped.panel import LoopPanel

    reach = 2 * 4 * (8 - 1) + 1
    grey = LoopPanel(pattern="window window", window=8, loops=4).view
    return Answer(
        reach,
        f"It can know of {reach} bytes (counted): each of 2 x 4 layers hands on 7 bytes beyond its "
        f"own, and there is the byte itself. After one loop it is 15. {grey.sentence()}",
    )


def share_held() -> Answer:
    """The share of weights, gradients and moments that ZeRO-1 leaves on a device."""
    from toolkit.lab.sharding.mesh import COPIES, MeshPanel

    view: Any = MeshPanel(mesh="2x4", scheme="zero1").view
    own, whole = (sum(map(of, COPIES)) for of in (view.bytes_of, view.bytes_whole))
    share = 100 * own / whole
    return Answer(
        round(share, 1),
        f"{share:.1f} per cent (modelled, counted from the layout): weights and gradients, half of "
        "all, stay whole; of Adam's two moments, the other half, an eighth is left. No cut of the "
        "moments alone gets below one half.",
    )


def slow_cable() -> Answer:
    """How much slower the best schedule is when one cable carries half."""
    from toolkit.lab.collectives.cut import CutPanel

    views: list[Any] = [
        CutPanel(network="mesh:3x3", cable=3, speed=speed).view for speed in (1.0, 0.5)
    ]
    whole, slow = (view.rates for view in views)
    lost, rings = (100 * float(1 - slow[name] / whole[name]) for name in ("trees", "rings"))
    return Answer(
        lost,
        f"{lost:.0f} per cent (modelled), from {float(whole['trees']):.4g} to "
        f"{float(slow['trees']):.4g} GB/s: the rank in the corner has two cables, and all that the "
        f"others have must come in over them. The rings lose {rings:.0f} per cent: theirs are so "
        "slow already that this cable waits.",
    )


def few_compressed() -> Answer:
    """How many of ten gradients it pays to compress."""
    from toolkit.lab.gradients.lanes import LanesPanel, LanesView

    view = LanesPanel(chips="h100:8", compressor="int8", search="best").view
    assert isinstance(view, LanesView)
    best, dense = view.shown, view.schedules["dense"]
    count = sum(name != "dense" for name in best.options())
    return Answer(
        count,
        f"{count} (modelled): on NVLink an eight-bit message costs the chip nearly what it saves "
        "the link, so only what is still on its way when the backward pass ends is worth it. "
        f"{1e3 * best.exposed:.2f} ms are exposed then, {1e3 * dense.exposed:.2f} ms if all are "
        "dense.",
    )


def latents_kept() -> Answer:
    """The share of the cache that each of two chips keeps."""
    from toolkit.lab.latent.decode import DecodePanel

    view: Any = DecodePanel(model="deepseek_v3", degree=2, slices=2).view
    kept = {cost.scheme: cost.cache_bytes for cost in view.costs}
    share = 100 * kept["tpla"] / kept["replicate"]
    return Answer(
        round(share, 1),
        f"{share:.1f} per cent (modelled, counted from the sizes): 512 / 2 + 64 of 512 + 64 "
        "numbers. The rotary key is read by every slice, so two chips together keep more than one.",
    )


def one_slow_stage() -> Answer:
    """When a pipeline with one slow stage ends."""
    from toolkit.schedules import Durations, one_forward_one_backward, simulate

    slow = simulate(one_forward_one_backward(4, 8), Durations(stages=(1, 1, 2, 1)))
    end, work = (int(time) for time in (slow.makespan, slow.work[2]))
    return Answer(
        end,
        f"{end} (modelled, exact): the slow device alone works {work}, and waits {end - work} for "
        "the first microbatch, at its last one's way back, and once between. One device in four "
        f"that is twice as slow makes all {end / 33:.2f} times as slow.",
    )


def pairs_dropped() -> Answer:
    """The share of pairs that a capacity of 1 drops."""
    from toolkit.lab.experts.tokens import ExpertPanel

    views: list[Any] = [
        ExpertPanel(model=model, layer=2, capacity=1.0).view for model in ("plain", "balanced")
    ]
    view = views[0]
    share, other = (100 * float((~view.is_kept).mean()) for view in views)
    return Answer(
        round(share),
        f"{share:.0f} per cent (measured here): the fullest expert has "
        f"{view.loads.max() / view.even:.1f} times an even load, and takes no more than one. The "
        f"model trained with a balance loss drops {other:.0f} per cent.",
    )


def needles_found() -> Answer:
    """How many needles a model finds whose heads read few pages."""
    from toolkit.lab.sparsity.drop import DropPanel

    found = {}
    for system in ("quest", "hata"):
        view: Any = DropPanel(system=system, budget=64, context=1024).view
        found[system] = int((view.answers == view.text.answers).sum())
    return Answer(
        found["quest"],
        f"It finds {found['quest']} (measured here). A needle is alone in its page, and fifteen "
        "tokens of noise widen the bound of every page alike. Tokens ranked one by one, as HATA "
        f"does by their hashes, find {found['hata']}.",
    )


def kept_activations() -> Answer:
    """The share of a chip's memory that is activations."""
    from toolkit.lab.planning.memory import ChipMemoryPanel
    from toolkit.measure import in_words

    view: Any = ChipMemoryPanel(model="llama-3-8b", chip="h100", fsdp=8, context=4096).view
    categories, total = view.categories, view.prediction.memory.total
    share = 100 * categories["activations"] / total
    return Answer(
        round(share),
        f"{share:.0f} per cent (modelled): {in_words(categories['activations'], 'bytes')} of "
        f"{in_words(total, 'bytes')}. ZeRO-3 cuts parameters, gradients and moments in eight; what "
        "32 layers keep of a chip's own sequence is whole.",
    )


def stall() -> Answer:
    """The largest gap of a text while prompts of others are read."""
    from toolkit.lab.serving.gantt import RequestsPanel

    view: Any = RequestsPanel(policy="first", load=40).view
    chunks: Any = RequestsPanel(policy="chunks", load=40).view
    gap = np.percentile([request.largest_gap for request in view.run.requests], 90)
    return Answer(
        round(1e3 * float(gap)),
        f"{1e3 * gap:.0f} ms (modelled), although nine of ten first tokens come within "
        f"{view.nine_of_ten('first_token')}: several prompts come in a row. In chunks beside the "
        f"rows it is {chunks.nine_of_ten('largest_gap')}.",
    )


def token_scan() -> Answer:
    """How many times as long a scan over tokens takes as chunks."""
    from toolkit.lab.speedups.speedup import SpeedupPanel

    view: Any = SpeedupPanel(method="gdn", work="forward+backward", tokens=2048).view
    (scan,) = (row for row in view.rows() if row.name == "toolkit, token scan")
    return Answer(round(scan.ratio, 1), view.sentence())


def next_rate() -> Answer:
    """Where a search with a Gaussian process tries next."""
    return Answer(
        GAP,
        "The next rate lies in the widest gap, wherever that is: a thousand standard deviations "
        "outweigh any mean, and the deviation is largest far from what was tried.",
    )
