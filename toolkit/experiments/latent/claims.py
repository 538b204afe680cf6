"""What the experiment on cut latents claims, with the smallest effect that matters and controls."""

import itertools
from collections.abc import Sequence

import numpy as np

from toolkit.attention.latent.tpla import Norm
from toolkit.experiments.kit.results import Results
from toolkit.experiments.kit.verdicts import Claim, Judge, above, fails, in_words
from toolkit.experiments.latent.sliced import BASES

SLICES = (2, 4)
ALIGN_STEPS, FEW_STEPS = 40, 2
ALL, APART = "perplexity", "perplexity, prompt exact"
SAME, SAME_APART = "same token", "same token, prompt exact"
KL, KL_APART = "KL", "KL, prompt exact"
KL_FIRST = "KL, first token exact"
ERROR = "output error"


def label_of(slices: int, basis: str, norm: str, align_steps: int = 0) -> str:
    """The name of a setting in slices."""
    name = {"none": "no basis"}.get(basis, basis)
    aligned = {0: "", ALIGN_STEPS: ", aligned"}.get(align_steps, f", aligned {align_steps} steps")
    return f"g={slices}, {name}, {norm} norm{aligned}"


Kind = tuple[int, str, Norm, int]
"""Slices, basis, norm, steps of alignment."""

_NORMS: tuple[Norm, ...] = ("sliced", "exact")
KINDS: list[Kind] = list(itertools.product(SLICES, BASES[:3], _NORMS, (0,)))
RANDOM: list[Kind] = [(g, "random", "exact", 0) for g in SLICES]
TAUGHT: list[Kind] = [(4, basis, "sliced", ALIGN_STEPS) for basis in ("none", "PCA")]
FEW: Kind = (4, "none", "sliced", FEW_STEPS)
DCP = {f"DCP, {g} devices": g for g in SLICES}
_PLAIN = [label_of(*kind) for kind in KINDS]
_EXACT = {(g, basis): label_of(g, basis, "exact") for g in SLICES for basis in BASES}
_NONE, _PCA = (label_of(*kind[:3]) for kind in TAUGHT)
_NONE_ALIGNED, _PCA_ALIGNED = (label_of(*kind) for kind in TAUGHT)
_FEW = label_of(*FEW)


def _dearer(labels: list[str]) -> Judge:
    """By which share all these settings have a higher perplexity than the model."""

    def judge(results: Results):
        *ours, model = results.paired(ALL, [*labels, "MLA"])
        ratios = np.array(ours) / model
        return ratios.min(0) - 1, f"{ALL} over MLA's: {in_words(labels, ratios, 3)}"

    return judge


def _nearer(name: str, ours: str, theirs: list[str], most: float = 1.0) -> Judge:
    """By how much one setting's number is below a multiple of the least of others', as a share."""

    def judge(results: Results):
        own, *others = results.paired(name, [ours, *theirs])
        shares = own / np.min(others, 0)
        others = " or ".join(theirs)
        return most - shares, f"{name}, over that of {others}: {in_words([ours], shares[None], 3)}"

    return judge


def _lost_by_four(pairs: Sequence[Sequence[str]]) -> Judge:
    """How many more tokens, as a share, the second setting of every pair loses than the first."""

    def judge(results: Results):
        labels = [label for pair in pairs for label in pair]
        rows = results.paired(SAME, labels)
        return (rows[::2] - rows[1::2]).min(0), f"{SAME}: {in_words(labels, rows, 3)}"

    return judge


def _softmaxes_are_more(sliced: str, exact: str) -> Judge:
    """By how much what is left with exact norms is more than half of the divergence, as a share."""

    def judge(results: Results):
        whole, left = results.paired(KL, [sliced, exact])
        words = in_words([exact], (left / whole)[None], 3)
        return 2 * left / whole - 1, f"{KL}, over that of {sliced}: {words}"

    return judge


def _apart_helps(name: str) -> Judge:
    labels = [label_of(g, "none", "sliced") for g in SLICES]

    def judge(results: Results):
        shares = results.paired(name, labels) / results.paired(KL, labels)
        return 1 - shares.max(0), f"{name}, over {KL}: {in_words(labels, shares, 3)}"

    return judge


def _misses(judge: Judge, floor: float) -> Judge:
    """For a control: by how much a judge's margins stay below the effect of the claim."""

    def missing(results: Results):
        margins, numbers = judge(results)
        return floor - np.asarray(margins), numbers

    return missing


def _no_worse(ours: str, theirs: str) -> Judge:
    """By how much a setting loses fewer tokens than another, plus one per cent of all tokens."""

    def judge(results: Results):
        own, other = results.paired(SAME, [ours, theirs])
        return own - other + 0.01, f"{SAME}: {in_words([ours, theirs], np.array([own, other]), 3)}"

    return judge


_DEARER = 0.01
_HALF = 0.5
_TENTH = 0.1

CLAIMS = (
    Claim(
        "tokens cut over two or four devices (DCP) keep the model's next token",
        above(SAME, list(DCP), 0.999, 4),
        control=fails(above(SAME, [_EXACT[2, "PCA"]], 0.999, 4)),
    ),
    Claim(
        "slices cost 1 % of perplexity and more, whatever the basis",
        _dearer(_PLAIN),
        _DEARER,
        control=_misses(_dearer(list(DCP)), _DEARER),
    ),
    Claim(
        "four slices lose more next tokens than two, whatever the basis",
        _lost_by_four([(_EXACT[2, basis], _EXACT[4, basis]) for basis in BASES[:3]]),
        0.02,
        control=_misses(_lost_by_four([tuple(DCP)]), 0.02),
    ),
    *(
        Claim(
            f"with g={g}, principal components are nearer than Hadamard's basis or none",
            _nearer(KL, _EXACT[g, "PCA"], [_EXACT[g, one] for one in ("none", "Hadamard")]),
            _TENTH,
            control=_misses(
                _nearer(KL, _EXACT[g, "random"], [_EXACT[g, one] for one in ("none", "Hadamard")]),
                _TENTH,
            ),
        )
        for g in SLICES
    ),
    Claim(
        "an exact norm takes away less than half: the softmaxes are the larger part",
        _softmaxes_are_more(label_of(2, "none", "sliced"), _EXACT[2, "none"]),
        _TENTH,
        control=fails(_softmaxes_are_more(label_of(2, "none", "sliced"), "DCP, 2 devices")),
    ),
    Claim(
        "an exact prompt takes away a tenth of the divergence and more",
        _apart_helps(KL_APART),
        _TENTH,
        control=_misses(_apart_helps(KL_FIRST), _TENTH),
    ),
    *(
        Claim(
            f"{ALIGN_STEPS} steps of alignment take away half and more: {plain}",
            _nearer(KL, aligned, [plain]),
            _HALF,
            control=_misses(_nearer(KL, _FEW, [_NONE]), _HALF),
        )
        for plain, aligned in ((_NONE, _NONE_ALIGNED), (_PCA, _PCA_ALIGNED))
    ),
    Claim(
        "aligned, no basis does as well as principal components, within 1 % of next tokens",
        _no_worse(_NONE_ALIGNED, _PCA_ALIGNED),
        control=fails(_no_worse(_FEW, _PCA_ALIGNED)),
    ),
)
