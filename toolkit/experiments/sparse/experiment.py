"""Systems of sparse decoding compared: needles found, mass, errors, bytes with the index.

The model is `data/models/retrieval.safetensors`, the texts and the drawn data are new with every
seed. Layer 0, which does the retrieval, decodes the questions sparsely; all else is dense. Beside
it: whether Tactic keeps its target, whether correcting the tail ever hurts, and what a budget does
to the perplexity of text (`calibration.py`, `texts.py`).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from toolkit.attention.sparse import FixedTokens, MassTarget, Selector
from toolkit.attention.sparse.decode.tactic import Tactic
from toolkit.experiments.kit.chart import LOOKS, caption_below, draw_bar, two_panels
from toolkit.experiments.kit.experiment import Column, Experiment, Workspace
from toolkit.experiments.kit.results import MissingResultError, Results
from toolkit.experiments.kit.verdicts import Claim, Judge, above, below, fails, in_words
from toolkit.experiments.sparse import model
from toolkit.experiments.sparse.calibration import LAWS, Reached, reached
from toolkit.experiments.sparse.data import Drawn, gaussian, heavy_tailed
from toolkit.experiments.sparse.quality import (
    Quality,
    at_small_budgets,
    fewer_tokens,
    of_drawn,
    of_retrieval,
)
from toolkit.experiments.sparse.texts import perplexity
from toolkit.experiments.tasks import Retrieval

TASK = Retrieval(pairs=64, length=1024, queries=32)
TOKENS, DRAWN_TOKENS, TARGET = (64, 256), 256, 0.9
LENGTHS, DEPTHS, TEXTS = (256, 1024), (0.0, 0.5, 1.0), 16
TARGETS, TEXT_TOKENS = (0.5, 0.75, TARGET), (40, 64, 112)
SYSTEMS = ("oracle", "quest", "tactic", "hata", "pqcache", "window", "random")
_ADAPTIVE, _AS_MANY = f"oracle, mass {TARGET}", "oracle, as many tokens"
_OTHER_LAWS = tuple(law for law in LAWS if law != "a / x + b")
_ALL_KINDS = ("heavy tails", "Gaussian", *(f"{tokens} tokens" for tokens in TOKENS))
_INDEXED = ("quest", "tactic", "hata", "pqcache")
_CORRECTED = ("tactic", "hata", "pqcache", "quest", "window")


@dataclass(frozen=True)
class Setting:
    """A system and its test.

    Attributes:
        system: its name; "dense" reads everything, on texts.
        budget: "tokens" for the whole protocol; "tail", its errors with the tail corrected; "text",
            its perplexity; a number, a mass to reach on heavy tails, and a law's name, that mass by
            another law than Tactic's; "mass" and "as many", for the oracle; "equal bytes", so many
            fewer tokens that index and tokens together read what the tokens of the others do.
    """

    system: str
    budget: str = "tokens"


def _needle(length: int, depth: float) -> str:
    return f"needle found, {length} tokens, depth {depth:g}"


def _perplexity(tokens: int) -> str:
    return f"perplexity, {tokens} tokens"


def _of(kind: str, quality: Quality | Reached) -> dict[str, float]:
    return {f"{name}, {kind}": float(value) for name, value in quality._asdict().items()}


@functools.cache
def _params() -> model.Params:
    return model.load()


def _execute(setting: Setting, seed: int, workspace: Workspace) -> dict:
    if setting.budget == "text":
        return _on_text(setting, seed)
    selector, heavy = at_small_budgets(setting.system), heavy_tailed(seed)
    if setting.budget in LAWS:
        assert isinstance(selector, Tactic)
        return _of("heavy tails", reached(heavy, selector, setting.budget, TARGET))
    if setting.budget == "equal bytes":
        return _at_equal_bytes(selector, seed)
    if setting.budget not in ("tokens", "tail"):
        if isinstance(selector, Tactic):  # the paper's form, which the other laws stand beside
            selector = replace(selector, stops_by="fit")
        asked = float(setting.budget) if setting.budget in map(str, TARGETS) else TARGET
        adaptive = of_drawn(heavy, selector, MassTarget(asked))
        if setting.budget != "as many":
            return _of("heavy tails", adaptive)
        return _of("heavy tails", of_drawn(heavy, selector, FixedTokens(round(adaptive.tokens))))
    tail = {"corrects_tail": setting.budget == "tail"}
    outcome = _of("heavy tails", of_drawn(heavy, selector, FixedTokens(DRAWN_TOKENS), **tail))
    flat: Drawn = gaussian(seed)
    outcome |= _of("Gaussian", of_drawn(flat, selector, FixedTokens(DRAWN_TOKENS), **tail))
    for place, tokens in enumerate(TOKENS):
        found, quality = of_retrieval(_params(), TASK, selector, FixedTokens(tokens), seed, **tail)
        outcome |= {f"accuracy, {tokens} tokens": found, **_of(f"{tokens} tokens", quality)}
        workspace.progress((place + 1) / (len(TOKENS) + len(LENGTHS)))
    for length in LENGTHS if setting.budget == "tokens" else ():
        for depth in DEPTHS:
            task = Retrieval(pairs=32, length=length, queries=1, depth=depth)
            budget = FixedTokens(TOKENS[0])
            found, _ = of_retrieval(_params(), task, selector, budget, seed, batch=TEXTS)
            outcome[_needle(length, depth)] = found
    return outcome | (_on_text(setting, seed) if setting.budget == "tail" else {})


def _at_equal_bytes(selector: Selector, seed: int) -> dict:
    """Of the most tokens asked for; where an index leaves too few of them there is no number."""
    outcome, most = {}, max(TOKENS)
    for kind, draw in (("heavy tails", heavy_tailed), ("Gaussian", gaussian)):
        drawn: Drawn = draw(seed)
        found = of_drawn(drawn, selector, FixedTokens(DRAWN_TOKENS))
        fewer = fewer_tokens(found, DRAWN_TOKENS, 2 * drawn.k.shape[2] * drawn.k.itemsize)
        if fewer >= selector.least:
            outcome |= _of(kind, of_drawn(drawn, selector, FixedTokens(fewer)))
    retrieve = functools.partial(of_retrieval, _params(), TASK, selector, seed=seed)
    fewer = fewer_tokens(retrieve(FixedTokens(most))[1], most, 8 * model.WIDTH // model.HEADS)
    if fewer >= selector.least:
        share, quality = retrieve(FixedTokens(fewer))
        outcome |= {f"accuracy, {most} tokens": share, **_of(f"{most} tokens", quality)}
    return outcome


def _on_text(setting: Setting, seed: int) -> dict:
    if setting.system == "dense":
        whole = perplexity(at_small_budgets("oracle"), None, seed)
        return {_perplexity(tokens): whole for tokens in TEXT_TOKENS}
    selector = replace(at_small_budgets(setting.system), sinks=4)  # a PQCache has 32
    read = functools.partial(perplexity, selector, seed=seed)
    tail = {"corrects_tail": setting.budget == "tail"}
    return {_perplexity(tokens): read(tokens=tokens, **tail) for tokens in TEXT_TOKENS}


def _target(mass: float) -> str:
    return f"tactic, mass {mass:g}"


def _law(law: str) -> str:
    return f"{law}, mass {TARGET:g}"


def _text(system: str) -> str:
    return f"{system}, text"


def _tail(system: str) -> str:
    return f"{system}, tail"


def _equal(system: str) -> str:
    return f"{system}, equal bytes"


def _near(name: str, label: str, wanted: float, distance: float) -> Judge:
    """Whether a number is so near to another one."""

    def judge(results: Results) -> tuple[np.ndarray, str]:
        rows = results.paired(name, [label])
        return distance - np.abs(rows[0] - wanted), f"{name}: {in_words([label], rows)}"

    return judge


def _tail_lowers(system: str, kinds: Sequence[str], tokens: Sequence[int] = ()) -> Judge:
    """Whether a tail lowers every error of these kinds, and the perplexity at a budget."""
    compared = [(f"error, {kind}", system) for kind in kinds]
    compared += [(_perplexity(number), _text(system)) for number in tokens]

    def judge(results: Results) -> tuple[np.ndarray, str]:
        pairs = {name: results.paired(name, [plain, _tail(system)]) for name, plain in compared}
        words = (f"{name}: {in_words(['without', 'with'], rows)}" for name, rows in pairs.items())
        return np.min([without - corrected for without, corrected in pairs.values()], axis=0), (
            "; ".join(words)
        )

    return judge


def _falls(systems: Sequence[str]) -> Judge:
    """Whether the perplexity of every one of these falls with every larger budget."""

    def judge(results: Results) -> tuple[np.ndarray, str]:
        labels = [_text(system) for system in systems]
        rows = np.stack([results.paired(_perplexity(n), labels) for n in TEXT_TOKENS])
        means = in_words(labels, rows.mean(axis=2).T)
        return (rows[:-1] - rows[1:]).min(axis=(0, 1)), f"means at {TEXT_TOKENS} tokens: {means}"

    return judge


def _above_dense(systems: Sequence[str], tokens: int, share: float) -> Judge:
    """Whether the perplexities of these are within a share of that of dense attention."""

    def judge(results: Results) -> tuple[np.ndarray, str]:
        labels = [_text("dense"), *map(_text, systems)]
        dense, *rows = results.paired(_perplexity(tokens), labels)
        words = f"{_perplexity(tokens)}: {in_words(labels, np.array([dense, *rows]))}"
        return (1 + share) * dense - np.max(rows, axis=0), words

    return judge


def _finished(results: Results, label: str, name: str) -> list[float]:
    """A number of the runs of a setting that have it; some settings measure only a part."""
    try:
        return results.samples(label, name)
    except MissingResultError:
        return []


def _draw(results: Results, caption: str):
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
        _finished(results, label, _needle(length, depth))
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


_OTHERS = [name for name in SYSTEMS if name != "oracle"]
EXPERIMENT = Experiment(
    name="sparse",
    title="What does sparse decoding drop, and does a model notice?",
    settings={name: Setting(name) for name in SYSTEMS}
    | {_ADAPTIVE: Setting("oracle", "mass"), _AS_MANY: Setting("oracle", "as many")}
    | {_target(target): Setting("tactic", str(target)) for target in TARGETS}
    | {_law(law): Setting("tactic", law) for law in _OTHER_LAWS}
    | {_tail(name): Setting(name, "tail") for name in _CORRECTED}
    | {_equal(name): Setting(name, "equal bytes") for name in _INDEXED}
    | {_text(name): Setting(name, "text") for name in ("dense", *SYSTEMS)},
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
        *(Column(_perplexity(tokens), digits=2) for tokens in TEXT_TOKENS),
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
            f"{TOKENS[0]} tokens ranked by hashes or by codes find nine needles in ten",
            above(f"accuracy, {TOKENS[0]} tokens", ["hata", "pqcache"], 0.9),
        ),
        Claim(
            "and Quest's fewer than seven",
            below(f"accuracy, {TOKENS[0]} tokens", ["quest"], 0.7),
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
        Claim(
            f"Tactic holds its target of {TARGET:g} to within 0.05 on heavy tails",
            _near("mass, heavy tails", _target(TARGET), TARGET, 0.05),
        ),
        Claim(
            "and a higher target holds more",
            above("mass, heavy tails", [_target(TARGET)], [_target(mass) for mass in TARGETS[:-1]]),
        ),
        Claim(
            "a power law and an exponential promise more than they hold: less mass than a / x + b",
            above("mass, heavy tails", [_target(TARGET)], [_law("power law"), _law("exponential")]),
        ),
        Claim(
            "a constant promises less: more tokens than a / x + b",
            below("tokens, heavy tails", [_target(TARGET)], [_law("constant")], 0),
        ),
        Claim(
            "a tail of clusters lowers Tactic's error on drawn keys, heavy-tailed or not",
            _tail_lowers("tactic", ("heavy tails", "Gaussian")),
        ),
        *(
            Claim(
                f"a tail never hurts {name}: neither errors nor the perplexity of text",
                _tail_lowers(name, _ALL_KINDS, TEXT_TOKENS),
            )
            for name in ("tactic", "hata", "pqcache")
        ),
        Claim(
            f"a quarter of a text's tokens ({TEXT_TOKENS[0]} of 160) suffices the oracle: its "
            "perplexity is within 2 % of dense attention's",
            _above_dense(["oracle"], TEXT_TOKENS[0], 0.02),
            control=fails(_above_dense(["random"], TEXT_TOKENS[0], 0.02)),
        ),
        Claim(
            "the window's perplexity is higher than the oracle's",
            above(_perplexity(TEXT_TOKENS[0]), [_text("window")], [_text("oracle")]),
        ),
        Claim(
            "random tokens' perplexity falls with every larger budget, and so does Quest's",
            _falls(["random", "quest"]),
        ),
    ),
    draw=_draw,
    beyond="longer texts and larger models: `toolkit audit-sparse` runs every system on yours.",
    minutes=10,
)
