"""Systems of sparse decoding compared: needles found, mass, errors, bytes with the index.

The models are those of `model.py` and `text_model.py`; texts and drawn data are new with every
seed. Layer 0 of the retrieval model, which does the retrieval, decodes the questions sparsely; all
else is dense. Beside it: whether Tactic keeps its target and whether correcting the tail ever hurts
(`calibration.py`); all systems at equal bytes with grouped heads and on long text (`groups.py`).
"""

from dataclasses import dataclass, replace

from toolkit.attention.sparse import FixedTokens, MassTarget
from toolkit.attention.sparse.decode.tactic import Tactic
from toolkit.experiments.kit.experiment import Column, Experiment, Workspace
from toolkit.experiments.sparse import groups, model
from toolkit.experiments.sparse.calibration import LAWS, reached
from toolkit.experiments.sparse.claims import (
    ADAPTED,
    ADAPTIVE,
    AS_MANY,
    BLIND,
    CHANCE,
    CLAIMS,
    INDEXED,
    ON_TEXT,
    SYSTEMS,
    TARGETS,
    TOKENS,
    adaptive_and_fixed,
    grouped,
    law_label,
    tail_label,
    target_label,
    text_label,
)
from toolkit.experiments.sparse.data import gaussian, heavy_tailed
from toolkit.experiments.sparse.groups import GROUPS, TARGET, TASK, heads, numbers
from toolkit.experiments.sparse.picture import DEPTHS, LENGTHS, draw, needle
from toolkit.experiments.sparse.quality import at_small_budgets, of_drawn, of_retrieval
from toolkit.experiments.sparse.texts import DENSE
from toolkit.experiments.tasks import Retrieval

DRAWN_TOKENS, TEXTS = 256, 16
_OTHER_LAWS = tuple(law for law in LAWS if law != "a / x + b")
_CORRECTED = ("tactic", "hata", "pqcache", "quest", "window")
_ELSEWHERE = {
    "groups": groups.by_group,
    "adaptive": groups.fixed_or_adaptive,
    "text": groups.on_text,
    "text, tail": groups.with_a_tail,
    "text, adaptive": groups.fixed_or_adaptive_on_text,
}


@dataclass(frozen=True)
class Setting:
    """A system and its test.

    Attributes:
        system: its name; "dense" reads everything, on texts.
        budget: "tokens" for the whole protocol; "tail", its errors with the tail corrected; a
            number, a mass to reach on heavy tails, and a law's name, that mass by another law than
            Tactic's; "mass" and "as many", for the oracle; and three for all of `GROUPS`: "groups"
            at equal bytes, "adaptive" beside fixed budgets, and "text", the perplexity of code,
            also with "text, tail" and "text, adaptive".
    """

    system: str
    budget: str = "tokens"


def _execute(setting: Setting, seed: int, workspace: Workspace) -> dict:
    if setting.budget in _ELSEWHERE:
        return _ELSEWHERE[setting.budget](setting.system, seed)
    selector, heavy = at_small_budgets(setting.system), heavy_tailed(seed)
    if setting.budget in LAWS:
        assert isinstance(selector, Tactic)
        return numbers("heavy tails", reached(heavy, selector, setting.budget, TARGET))
    if setting.budget not in ("tokens", "tail"):
        if isinstance(selector, Tactic):  # the paper's form, which the other laws stand beside
            selector = replace(selector, stops_by="fit")
        asked = float(setting.budget) if setting.budget in map(str, TARGETS) else TARGET
        adaptive = of_drawn(heavy, selector, MassTarget(asked))
        if setting.budget != "as many":
            return numbers("heavy tails", adaptive)
        return numbers(
            "heavy tails", of_drawn(heavy, selector, FixedTokens(round(adaptive.tokens)))
        )
    params = model.load()
    tail = {"corrects_tail": setting.budget == "tail"}
    outcome = numbers("heavy tails", of_drawn(heavy, selector, FixedTokens(DRAWN_TOKENS), **tail))
    outcome |= numbers(
        "Gaussian", of_drawn(gaussian(seed), selector, FixedTokens(DRAWN_TOKENS), **tail)
    )
    for place, tokens in enumerate(TOKENS):
        found, quality = of_retrieval(params, TASK, selector, FixedTokens(tokens), seed, **tail)
        outcome |= {f"accuracy, {tokens} tokens": found, **numbers(f"{tokens} tokens", quality)}
        workspace.progress((place + 1) / (len(TOKENS) + len(LENGTHS)))
    for length in LENGTHS if setting.budget == "tokens" else ():
        for depth in DEPTHS:
            task = Retrieval(pairs=32, length=length, queries=1, depth=depth)
            budget = FixedTokens(TOKENS[0])
            found, _ = of_retrieval(params, task, selector, budget, seed, batch=TEXTS)
            outcome[needle(length, depth)] = found
    return outcome


EXPERIMENT = Experiment(
    name="sparse",
    title="What does sparse decoding drop, and does a model notice?",
    settings={name: Setting(name) for name in SYSTEMS}
    | {ADAPTIVE: Setting("oracle", "mass"), AS_MANY: Setting("oracle", "as many")}
    | {target_label(target): Setting("tactic", str(target)) for target in TARGETS}
    | {law_label(law): Setting("tactic", law) for law in _OTHER_LAWS}
    | {tail_label(name): Setting(name, "tail") for name in _CORRECTED}
    | {grouped(name): Setting(name, "groups") for name in (*INDEXED, CHANCE)}
    | {adaptive_and_fixed("oracle"): Setting("oracle", "adaptive")}
    | {
        text_label(name): Setting(name, "text")
        for name in (DENSE, "oracle", *ON_TEXT, *BLIND, CHANCE)
    }
    | {tail_label(text_label(name)): Setting(name, "text, tail") for name in INDEXED}
    | {adaptive_and_fixed(text_label(name)): Setting(name, "text, adaptive") for name in ADAPTED},
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
        *(Column(f"mass, drawn, {heads(group)}") for group in GROUPS),
        *(Column(f"worst_mass, drawn, {heads(group)}") for group in GROUPS),
        *(Column(f"accuracy, {heads(group)}") for group in model.FILES),
        *(
            Column(groups.text(group, depth), digits=2)
            for group in GROUPS
            for depth in (None, *groups.TEXT_DEPTHS)
        ),
    ),
    claims=CLAIMS,
    draw=draw,
    beyond="longer texts and larger models: `toolkit audit-sparse` runs every system on yours.",
    minutes=40,
)
