"""What each system of sparse decoding keeps: needles found, mass, errors, bytes with the index.

The model is `data/models/retrieval.safetensors`, the texts and the drawn data are new with every
seed. Layer 0, which does the retrieval, decodes the questions sparsely; all else is dense.
"""

import functools
from dataclasses import dataclass

from toolkit.attention.sparse import FixedTokens, MassTarget
from toolkit.experiments.chart import LOOKS, caption_below, draw_bar, two_panels
from toolkit.experiments.experiment import Column, Experiment, Workspace
from toolkit.experiments.results import Results
from toolkit.experiments.sparse import model
from toolkit.experiments.sparse.data import Drawn, gaussian, heavy_tailed
from toolkit.experiments.sparse.quality import Quality, at_small_budgets, of_drawn, of_retrieval
from toolkit.experiments.tasks import Retrieval
from toolkit.experiments.verdicts import Claim, above, below

TASK = Retrieval(pairs=64, length=1024, queries=32)
TOKENS, DRAWN_TOKENS, TARGET = (64, 256), 256, 0.9
LENGTHS, DEPTHS, TEXTS = (256, 1024), (0.0, 0.5, 1.0), 16
SYSTEMS = ("oracle", "quest", "tactic", "hata", "pqcache", "window", "random")
_ADAPTIVE, _AS_MANY = f"oracle, mass {TARGET}", "oracle, as many tokens"


@dataclass(frozen=True)
class Setting:
    """A system; or the oracle on heavy tails alone, with a mass or with as many tokens to fill."""

    system: str
    budget: str = "tokens"


def _needle(length: int, depth: float) -> str:
    return f"needle found, {length} tokens, depth {depth:g}"


def _of(kind: str, quality: Quality) -> dict[str, float]:
    return {f"{name}, {kind}": float(value) for name, value in quality._asdict().items()}


@functools.cache
def _params() -> model.Params:
    return model.load()


def _execute(setting: Setting, seed: int, workspace: Workspace) -> dict:
    selector, heavy = at_small_budgets(setting.system), heavy_tailed(seed)
    if setting.budget != "tokens":
        adaptive = of_drawn(heavy, selector, MassTarget(TARGET))
        if setting.budget == "mass":
            return _of("heavy tails", adaptive)
        return _of("heavy tails", of_drawn(heavy, selector, FixedTokens(round(adaptive.tokens))))
    outcome = _of("heavy tails", of_drawn(heavy, selector, FixedTokens(DRAWN_TOKENS)))
    flat: Drawn = gaussian(seed)
    outcome |= _of("Gaussian", of_drawn(flat, selector, FixedTokens(DRAWN_TOKENS)))
    for place, tokens in enumerate(TOKENS):
        found, quality = of_retrieval(_params(), TASK, selector, FixedTokens(tokens), seed)
        outcome |= {f"accuracy, {tokens} tokens": found, **_of(f"{tokens} tokens", quality)}
        workspace.progress((place + 1) / (len(TOKENS) + len(LENGTHS)))
    for length in LENGTHS:
        for depth in DEPTHS:
            task = Retrieval(pairs=32, length=length, queries=1, depth=depth)
            budget = FixedTokens(TOKENS[0])
            found, _ = of_retrieval(_params(), task, selector, budget, seed, batch=TEXTS)
            outcome[_needle(length, depth)] = found
    return outcome


def _draw(results: Results, caption: str):
    figure, (left, right) = two_panels()
    systems = [label for label in results.labels if label in SYSTEMS]
    names = [f"accuracy, {tokens} tokens" for tokens in TOKENS]
    names += [f"mass, {tokens} tokens" for tokens in TOKENS] + ["mass, heavy tails"]
    width = 0.8 / len(systems)
    for index, label in enumerate(systems):
        for place, name in enumerate(names):
            at = place + width * (index - (len(systems) - 1) / 2)
            draw_bar(left, at, results.samples(label, name), LOOKS[index % len(LOOKS)], 0.9 * width)
        left.bar(0, 0, color=LOOKS[index % len(LOOKS)].colour, label=label)
    left.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=8)
    left.set(ylim=(0, 1.15), title=f"{TASK.length} tokens, {TASK.pairs} needles; drawn: 4096 keys")
    left.legend(
        loc="upper center", ncols=len(systems), fontsize=8, columnspacing=1, handlelength=1.5
    )
    left.grid(axis="x", visible=False)
    needles = [(length, depth) for length in LENGTHS for depth in DEPTHS]
    shares = [[sum(found) / len(found) for length, depth in needles
               if (found := results.samples(label, _needle(length, depth)))]
              for label in systems]  # fmt: skip
    right.imshow(shares, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for row, line in enumerate(shares):
        for column, share in enumerate(line):
            ink = "black" if share > 0.5 else "white"
            right.text(column, row, f"{share:.2f}", ha="center", va="center", color=ink, fontsize=8)
    right.set_xticks(range(len(needles)), [f"{n}\n{depth:g}" for n, depth in needles], fontsize=8)
    right.set_yticks(range(len(systems)), systems)
    right.grid(visible=False)
    right.set(title=f"one needle found with {TOKENS[0]} tokens", xlabel="text length, needle depth")
    caption_below(figure, f"Means over the seeds; dots: all seeds. {caption}")
    return figure


_OTHERS = [name for name in SYSTEMS if name != "oracle"]
EXPERIMENT = Experiment(
    name="sparse",
    title="What does sparse decoding drop, and does a model notice?",
    settings={name: Setting(name) for name in SYSTEMS}
    | {_ADAPTIVE: Setting("oracle", "mass"), _AS_MANY: Setting("oracle", "as many")},
    execute=_execute,
    columns=(
        *(Column(f"accuracy, {tokens} tokens") for tokens in TOKENS),
        *(Column(f"kilobytes, {tokens} tokens", "kB", 0) for tokens in TOKENS),
        Column("mass, heavy tails"),
        Column("worst_mass, heavy tails"),
        Column("error, heavy tails"),
        Column("tokens, heavy tails", "tokens", 0),
        Column("kilobytes, heavy tails", "kB", 0),
        Column("mass, Gaussian"),
    ),
    claims=(
        Claim(
            f"the {TOKENS[0]} best of {TASK.length} tokens find nine needles in ten",
            above(f"accuracy, {TOKENS[0]} tokens", ["oracle"], 0.9),
        ),
        Claim(
            f"the last {TOKENS[0]} find fewer than two",
            below(f"accuracy, {TOKENS[0]} tokens", ["window"], 0.2),
        ),
        Claim(
            "needles stand alone, so tokens ranked one by one find more of them than pages",
            above(f"accuracy, {TOKENS[0]} tokens", ["hata", "pqcache"], ["quest"]),
        ),
        Claim(
            "no system keeps more mass than the oracle",
            above("mass, heavy tails", ["oracle"], _OTHERS),
        ),
        Claim(
            "at equal tokens a mass target has the better 5th percentile of mass",
            above("worst_mass, heavy tails", [_ADAPTIVE], [_AS_MANY]),
        ),
        Claim(
            "and the larger error overall",
            above("error, heavy tails", [_ADAPTIVE], [_AS_MANY]),
        ),
        Claim(
            "Gaussian keys are not sparse: a sixteenth of them holds less than half of the mass",
            below("mass, Gaussian", ["oracle"], 0.5),
        ),
    ),
    draw=_draw,
    beyond="texts of language: `toolkit audit-sparse` runs every system on a model of yours.",
    minutes=4,
)
