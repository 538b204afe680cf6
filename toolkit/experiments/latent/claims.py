"""What the experiment on cut latents claims, with the smallest effect that matters and controls."""

import itertools
from collections.abc import Sequence

import numpy as np

from toolkit.attention.latent.tpla import Norm
from toolkit.experiments.kit.results import Results
from toolkit.experiments.kit.verdicts import Claim, Judge, Margins, above, fails, in_words, judging
from toolkit.experiments.latent.sliced import BASES

SLICES = (2, 4)
ALIGN_STEPS, FEW_STEPS = 40, 1
ALL, APART = "perplexity", "perplexity, prompt exact"
SAME, SAME_APART = "same token", "same token, prompt exact"
KL, KL_APART = "KL", "KL, prompt exact"
KL_FIRST = "KL, first token exact"
ERROR = "output error"


def label_of(slices: int, basis: str, norm: str, align_steps: int = 0) -> str:
    """The name of a setting in slices."""
    name = {"none": "no basis"}.get(basis, basis)
    aligned = {0: "", ALIGN_STEPS: ", aligned"}.get(align_steps, f", aligned {align_steps} step")
    return f"g={slices}, {name}, {norm} norm{aligned}"


Kind = tuple[int, str, Norm, int]
"""Slices, basis, norm, steps of alignment."""

_NORMS: tuple[Norm, ...] = ("sliced", "exact")
KINDS: list[Kind] = list(itertools.product(SLICES, BASES[:3], _NORMS, (0,)))
RANDOM: list[Kind] = [(g, "random", "exact", 0) for g in SLICES]
TAUGHT: list[Kind] = [(4, basis, "sliced", ALIGN_STEPS) for basis in ("none", "PCA")]
FEW: Kind = (4, "none", "sliced", FEW_STEPS)
DCP = {f"DCP, {g} devices": g for g in SLICES}
_EXACT = {(g, basis): label_of(g, basis, "exact") for g in SLICES for basis in BASES}
_NONE, _PCA = (label_of(*kind[:3]) for kind in TAUGHT)
_NONE_ALIGNED, _PCA_ALIGNED = (label_of(*kind) for kind in TAUGHT)
_FEW = label_of(*FEW)


@judging
def _dearer(results: Results, labels: list[str]) -> Margins:
    """By which share all these settings have a higher perplexity than the model."""
    *ours, model = results.paired(ALL, [*labels, "MLA"])
    ratios = np.array(ours) / model
    return ratios.min(0) - 1, f"{ALL} over MLA's: {in_words(labels, ratios, 3)}"


@judging
def _cheap(results: Results, labels: list[str], most: float) -> Margins:
    """By how much all these settings' perplexity stays below a share more than the model's."""
    *ours, model = results.paired(ALL, [*labels, "MLA"])
    ratios = np.array(ours) / model
    return 1 + most - ratios.max(0), f"{ALL} over MLA's: {in_words(labels, ratios, 3)}"


@judging
def _nearer(results: Results, ours: str, theirs: list[str]) -> Margins:
    """By how much one setting's divergence is below the least of others', as a share."""
    own, *others = results.paired(KL, [ours, *theirs])
    shares = own / np.min(others, 0)
    others = " or ".join(theirs)
    return 1 - shares, f"{KL}, over that of {others}: {in_words([ours], shares[None], 3)}"


@judging
def _lost_by_four(results: Results, pairs: Sequence[Sequence[str]]) -> Margins:
    """How many more tokens, as a share, the second setting of every pair loses than the first."""
    labels = [label for pair in pairs for label in pair]
    rows = results.paired(SAME, labels)
    return (rows[::2] - rows[1::2]).min(0), f"{SAME}: {in_words(labels, rows, 3)}"


@judging
def _softmaxes_are_more(results: Results, sliced: str, exact: str) -> Margins:
    """By how much what is left with exact norms is more than half of the divergence, as a share."""
    whole, left = results.paired(KL, [sliced, exact])
    words = in_words([exact], (left / whole)[None], 3)
    return 2 * left / whole - 1, f"{KL}, over that of {sliced}: {words}"


@judging
def _apart_helps(results: Results, name: str) -> Margins:
    labels = [label_of(g, "none", "sliced") for g in SLICES]
    shares = results.paired(name, labels) / results.paired(KL, labels)
    return 1 - shares.max(0), f"{name}, over {KL}: {in_words(labels, shares, 3)}"


@judging
def _misses(results: Results, judge: Judge, floor: float) -> Margins:
    """For a control: by how much a judge's margins stay below the effect of the claim."""
    margins, numbers = judge(results)
    return floor - np.asarray(margins), numbers


@judging
def _no_worse(results: Results, ours: str, theirs: str) -> Margins:
    """By how much a setting loses fewer tokens than another, plus one per cent of all tokens."""
    own, other = results.paired(SAME, [ours, theirs])
    return own - other + 0.01, f"{SAME}: {in_words([ours, theirs], np.array([own, other]), 3)}"


_PERCENT, _TENTH, _THIRD, _HALF = 0.01, 0.1, 1 / 3, 0.5
_BOTH = ("none", "Hadamard")

CLAIMS = (
    Claim(
        "tokens cut over two or four devices (DCP) keep the model's next token",
        above(SAME, list(DCP), 0.999, 4),
        control=fails(above(SAME, [_EXACT[2, "PCA"]], 0.999, 4)),
    ),
    Claim(
        "without principal components, slices cost 1 % of perplexity and more",
        _dearer([label_of(*kind) for kind in KINDS if kind[1] in _BOTH]),
        _PERCENT,
        control=_misses(_dearer(list(DCP)), _PERCENT),
    ),
    Claim(
        "two slices of principal components cost less than 3 % of perplexity",
        _cheap([label_of(*kind) for kind in KINDS if kind[:2] == (2, "PCA")], 0.03),
        control=fails(_cheap([_EXACT[4, "none"]], 0.03)),
    ),
    Claim(
        "four slices keep fewer next tokens than two, by 2 % and more, whatever the basis",
        _lost_by_four([(_EXACT[2, basis], _EXACT[4, basis]) for basis in BASES[:3]]),
        2 * _PERCENT,
        control=_misses(_lost_by_four([tuple(DCP)]), 2 * _PERCENT),
    ),
    *(
        Claim(
            f"with g={g}, principal components take away a third and more of the divergence that "
            "Hadamard's basis or none leaves",
            _nearer(_EXACT[g, "PCA"], [_EXACT[g, basis] for basis in _BOTH]),
            _THIRD,
            control=_misses(
                _nearer(_EXACT[g, "random"], [_EXACT[g, basis] for basis in _BOTH]), _THIRD
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
            f"{ALIGN_STEPS} steps of alignment take away {share} and more: {plain}",
            _nearer(aligned, [plain]),
            smallest,
            control=_misses(_nearer(_FEW, [_NONE]), smallest),
        )
        for plain, aligned, share, smallest in (
            (_NONE, _NONE_ALIGNED, "half", _HALF),
            (_PCA, _PCA_ALIGNED, "a third", _THIRD),
        )
    ),
    Claim(
        "aligned, no basis does as well as principal components, within 1 % of next tokens",
        _no_worse(_NONE_ALIGNED, _PCA_ALIGNED),
        control=fails(_no_worse(_FEW, _PCA_ALIGNED)),
    ),
)
