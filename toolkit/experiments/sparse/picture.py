"""The figure of the experiment on sparse decoding."""

import numpy as np

from toolkit.experiments.kit.chart import LOOKS, caption_below, draw_bar, two_panels
from toolkit.experiments.kit.results import MissingResultError, Results
from toolkit.experiments.sparse.claims import SYSTEMS, TOKENS
from toolkit.experiments.sparse.groups import TASK

LENGTHS, DEPTHS = (256, 1024), (0.0, 0.5, 1.0)


def needle(length: int, depth: float) -> str:
    """Name of the share of single needles found in texts of a length, at a depth."""
    return f"needle found, {length} tokens, depth {depth:g}"


def _finished(results: Results, label: str, name: str) -> list[float]:
    """A number of the runs of a setting that have it; some settings measure only a part."""
    try:
        return results.samples(label, name)
    except MissingResultError:
        return []


def draw(results: Results, caption: str):
    """Needles found and mass kept by system, and single needles by length and depth."""
    figure, (left, right) = two_panels()
    systems = [label for label in results.labels if label in SYSTEMS] or list(results.labels)
    names = [f"accuracy, {tokens} tokens" for tokens in TOKENS]
    names += [f"mass, {tokens} tokens" for tokens in TOKENS] + ["mass, heavy tails"]
    width = 0.8 / len(systems)
    for index, label in enumerate(systems):
        for place, name in enumerate(names):
            at = place + width * (index - (len(systems) - 1) / 2)
            if samples := _finished(results, label, name):
                draw_bar(left, at, samples, LOOKS[index % len(LOOKS)], 0.9 * width)
        left.bar(0, 0, color=LOOKS[index % len(LOOKS)].colour, label=label)
    left.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=8)
    left.set(ylim=(0, 1.15), title=f"{TASK.length} tokens, {TASK.pairs} needles; drawn: 4096 keys")
    left.legend(
        loc="upper center", ncols=len(systems), fontsize=8, columnspacing=1, handlelength=1.5
    )
    left.grid(axis="x", visible=False)
    needles = [(length, depth) for length in LENGTHS for depth in DEPTHS]
    samples = (
        _finished(results, label, needle(length, depth))
        for label in systems for length, depth in needles
    )  # fmt: skip
    shares = np.array([np.mean(found) if found else np.nan for found in samples])
    shares = shares.reshape(len(systems), -1)
    right.imshow(shares, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for row, line in enumerate(shares):
        for column, share in enumerate(line):
            if np.isnan(share):
                continue
            ink = "black" if share > 0.5 else "white"
            right.text(column, row, f"{share:.2f}", ha="center", va="center", color=ink, fontsize=8)
    right.set_xticks(range(len(needles)), [f"{n}\n{depth:g}" for n, depth in needles], fontsize=8)
    right.set_yticks(range(len(systems)), systems)
    right.grid(visible=False)
    right.set(title=f"one needle found with {TOKENS[0]} tokens", xlabel="text length, needle depth")
    caption_below(figure, f"Means over the seeds; dots: all seeds. {caption}")
    return figure
