"""Lesson 11, what to skip and what to compress: sparse attention and latents, and their errors."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from toolkit.attention.latent import calibration_latents, principal_basis
from toolkit.attention.sparse.decode.quest import Quest
from toolkit.figures import ACCENT, look
from toolkit.lab.latent.slice import sliced_layer, small_layers
from toolkit.lab.lessons.drawing import draw_bars, draw_lines, draw_matrices, mark_guess
from toolkit.lab.lessons.outline import (
    Answer,
    Exercise,
    Outline,
    Question,
    Show,
    WrongAnswer,
    ask,
    ask_array,
)
from toolkit.lab.lessons.programs import operations, shapes_made
from toolkit.lab.lessons.subjects.parts.trained_layer import (
    EARLY,
    SHARES,
    TOKENS,
    errors_by_share,
    masses,
    projected,
    trained,
)

READ, PAGE = 16, 16
HEAVY, FEW, NEWEST = (
    "the tokens it weighs most, a quarter of them",
    "all tokens, a quarter of each latent",
    "the newest quarter of the tokens",
)


def _kept_mass() -> Answer:
    heaviest, newest = masses()
    truth = 100 * float(heaviest[READ - 1])
    words = (
        f"They hold {truth:.0f} per cent (measured here, mean of four heads and 64 queries); the "
        f"16 newest tokens hold {100 * newest[READ - 1]:.0f}. A softmax is uneven: most of what is "
        "read from a cache changes nothing. Which part does, the query decides."
    )

    def draw(figure: Figure, guess: float) -> None:
        axes = figure.add_axes((0.1, 0.18, 0.86, 0.74))
        tokens = np.arange(1, EARLY + 1)
        for name, share, words in (
            ("full", heaviest, "heaviest"), ("window", newest, "newest"),
        ):  # fmt: skip
            axes.plot(tokens, 100 * share, **look(name).line)
            axes.annotate(
                words, (tokens[-1], 100 * share[-1]), xytext=(-4, -14), ha="right",
                textcoords="offset points", color=look(name).colour,
            )  # fmt: skip
        axes.plot([READ], [truth], "o", color=look("full").colour, markersize=10)
        mark_guess(axes, READ, guess, truth)
        axes.set(xlabel="tokens read", ylabel="share of the softmax, %", ylim=(0, 105))

    return Answer(truth, words, draw)


def _cut_latent() -> Answer:
    plain, best = (sliced_layer(1, basis, 2, "sliced").report for basis in ("none", "principal"))
    jax.clear_caches()  # every operation was a program of its own; small machines have 1 GB
    truth = 100 * plain.output_error
    words = (
        f"It is off by {truth:.0f} per cent (measured here): each half makes a softmax of its own "
        "from half of every score, and a softmax of a part is no part of the softmax. With the "
        f"latents turned to their principal components first it is {best.output_error:.1%}, at the "
        "same size."
    )
    return Answer(truth, words)


def _skip_or_compress() -> Answer:
    ways = {"heaviest": HEAVY, "latents": FEW, "newest": NEWEST}
    errors = {ways[way]: 100 * each for way, each in errors_by_share().items()}
    at = SHARES.index(1 / 4)
    words = (
        f"The heaviest tokens: {errors[HEAVY][at]:.0f} per cent off, against {errors[FEW][at]:.0f} "
        f"for all tokens in a quarter of each latent and {errors[NEWEST][at]:.0f} for the newest "
        "(measured here, principal components of this very text). But to know the heaviest tokens "
        "every key had to be scored, and from one half on the latents are ahead."
    )

    def draw(figure: Figure, guess: str) -> None:
        axes = figure.add_axes((0.1, 0.18, 0.86, 0.74))
        for name, style, label in (
            (HEAVY, "full", "heaviest tokens"),
            (FEW, "gdn", "all tokens, part of each latent"),
            (NEWEST, "window", "newest tokens"),
        ):
            own = look(style)
            axes.plot(
                100 * np.array(SHARES), errors[name], **own.line, marker=own.marker, label=label
            )
            axes.plot([25], [errors[name][at]], own.marker, color=own.colour, markersize=10)
        axes.plot(
            [25], [errors[guess][at]], "D", color=ACCENT, markersize=15, markerfacecolor="none",
            markeredgewidth=2,
        )  # fmt: skip
        axes.annotate(
            "your guess", (25, errors[guess][at]), xytext=(12, 8), textcoords="offset points",
            color=ACCENT,
        )  # fmt: skip
        axes.set(xlabel="share of the cache read, %", ylabel="error of the output, %")
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper right")

    return Answer(HEAVY, words, draw)


def _judge_attend_selected(attend_selected: Callable[..., Any], show: Show) -> str:
    seen = trained()
    head = int(np.sort(seen.weights[:, -1])[:, -READ:].sum(1).argmin())  # whose mass is spread most
    q, k, v = seen.q[-1, head], seen.k[:, head], seen.v[:, head]
    p = seen.weights[head, -1]
    mask = p >= np.sort(p)[-READ]

    def asked(q: np.ndarray) -> tuple[np.ndarray, float]:
        value = ask(attend_selected, q, k, v, mask)
        if not isinstance(value, tuple) or len(value) != 2:
            raise WrongAnswer("attend_selected must return two things: the output and the mass.")
        out = ask_array(lambda: value[0], (v.shape[1],))
        return out, float(ask_array(lambda: value[1], ()))

    out, mass = asked(q)
    share = float(p[mask].sum())
    everything, wanted = p @ v, p[mask] @ v[mask] / share
    drawn = draw_lines(
        np.arange(len(out)), out, wanted, xlabel="value channel", ylabel="output of the head"
    )
    show(drawn)
    if not (np.isfinite(out).all() and np.isfinite(mass)):
        raise WrongAnswer("Something is not finite; is a score of a skipped token -inf?")
    if np.allclose(out, share * wanted, atol=1e-4):
        raise WrongAnswer(
            f"The weights sum to {share:.2f}: divide by their sum over the selection."
        )
    if np.allclose(out, everything, atol=1e-4):
        raise WrongAnswer("That is attention to all tokens; the mask selects 16.")
    if not np.allclose(out, wanted, atol=1e-4):
        raise WrongAnswer("The output is not the softmax over the selected tokens alone.")
    if np.isclose(mass, mask.mean()):
        raise WrongAnswer("That is the share of the tokens; the mass is their weights' sum.")
    if not np.isclose(mass, share, atol=1e-4):
        raise WrongAnswer(f"The mass is {mass:.3g}; these tokens hold {share:.3g}.")
    if not np.isfinite(asked(100 * q)[0]).all():
        raise WrongAnswer("With scores of some hundreds it overflows: subtract the largest.")
    return f"Right: {READ} of {TOKENS} tokens hold {share:.0%} of this softmax."


def _judge_page_bound(page_bound: Callable[..., Any], show: Show) -> str:
    seen, head = trained(), 1
    q, keys = seen.q[-1, head], seen.k[:, head]
    pages = keys.reshape(TOKENS // PAGE, PAGE, -1)
    got = ask_array(page_bound, (len(pages),), q, pages.max(axis=1), pages.min(axis=1))
    quest, stored = Quest(page_size=PAGE), jnp.asarray(keys)
    index = quest.build(stored, stored, TOKENS)
    wanted = np.asarray(quest.scores(index, stored, jnp.asarray(q)[None], TOKENS)[0])
    best = (pages @ q).max(axis=1)
    names = [f"tokens {PAGE * n + 1} to {PAGE * (n + 1)}" for n in range(len(pages))]
    drawn = draw_bars(
        names, got.tolist(), wanted.tolist(), xlabel="upper bound of q · k in the page"
    )
    show(drawn)
    low = np.flatnonzero(got < best - 1e-4)
    if len(low):
        n = low[0]
        raise WrongAnswer(
            f"No bound: a key among {names[n]} scores {best[n]:.2f}, and yours says at most "
            f"{got[n]:.2f}. Which end of a channel's range is best where q is negative?"
        )
    below = np.flatnonzero(got < wanted - 1e-4)
    if len(below):
        raise WrongAnswer(
            "True of these keys by luck: keys with the same largest and smallest numbers could "
            f"score {wanted[below[0]]:.2f} among {names[below[0]]}, above yours."
        )
    if not np.allclose(got, wanted, atol=1e-3):
        n = int(np.argmax(got - wanted))
        raise WrongAnswer(
            f"Never too low, but looser than it needs to be: {got[n]:.2f} for {names[n]}, where "
            f"{wanted[n]:.2f} is enough. Choose the better end channel by channel."
        )
    return "Right: the tightest bound that two vectors per page allow."


def _judge_latent_scores(latent_scores: Callable[..., Any], show: Show) -> str:
    queries, _, latents, _, up, _ = projected()
    q, (size, heads, key) = queries[-1], up.shape
    got = ask_array(latent_scores, (heads, TOKENS), q, up, latents)
    keys = np.einsum("tr,rhk->thk", latents, up)
    wanted = np.einsum("hk,thk->ht", q, keys)
    show(draw_matrices(got, wanted, xlabel="token", ylabel="head", title="with keys expanded"))
    if not np.allclose(got, wanted, atol=1e-3):
        raise WrongAnswer("These are not the scores of the expanded keys.")
    shapes = shapes_made(operations(latent_scores, *map(jnp.asarray, (q, up, latents))))
    largest = max((math.prod(shape) for shape in shapes), default=0)
    if largest >= keys.size:
        raise WrongAnswer(
            f"The scores are right, but an array of {largest:,} numbers is made, as large as all "
            f"keys; the target is {latents.size:,}, that of the latents: project the query, not "
            "the tokens."
        )
    times = keys.size * size / (size * heads * (key + TOKENS))
    return (
        f"Right: no key was made, with {times:.0f} times fewer multiplications than for expanding "
        f"{TOKENS} tokens."
    )


def _judge_best_basis(best_basis: Callable[..., Any], show: Show) -> str:
    config, weights, _, x = small_layers()[1]
    latents = np.asarray(calibration_latents(x[0], weights, config), np.float64)
    size = latents.shape[1]

    def energy(basis: np.ndarray) -> np.ndarray:
        return 100 * np.cumsum(np.square(latents @ basis).sum(axis=0)) / np.square(latents).sum()

    basis = ask_array(best_basis, (size, size), latents)
    wanted = energy(principal_basis(jnp.asarray(latents, jnp.float32)))
    got = energy(np.nan_to_num(basis))
    drawn = draw_lines(
        np.arange(1, size + 1), got, wanted, xlabel="features kept, of 64", ylabel="energy kept, %"
    )
    show(drawn)
    if not np.allclose(basis.T @ basis, np.eye(size), atol=1e-3):
        raise WrongAnswer(
            "Its columns are not orthogonal vectors of length 1: the norm of a latent, which the "
            "layer divides by, would change."
        )
    half, most = got[size // 2 - 1], wanted[size // 2 - 1]
    if np.allclose(100 - got[size // 2 - 1], wanted[size // 2 - 1], atol=0.5):
        raise WrongAnswer("The last half holds nearly all: order by falling energy.")
    if half < most - 0.1:
        raise WrongAnswer(
            f"The first half of the features keeps {half:.1f} % of the energy; {most:.1f} % is "
            "possible."
        )
    return f"Right: half of the features keep {half:.1f} % of the energy."


OUTLINE = Outline(
    "What to skip and what to compress",
    questions=(
        Question(
            "kept_mass",
            "A trained layer reads 128 bytes of prose. Each of the last 64 queries keeps only the "
            "16 tokens to which it gives the largest weights. Which share of its softmax do these "
            "16 hold, on average, in per cent?",
            _kept_mass,
            unit="per cent",
            low=0,
            high=100,
            seconds=12,
        ),
        Question(
            "cut_latent",
            "The 64 features of the same layer's latents are cut in two halves as they lie. Each "
            "half makes a softmax of its own, and the two outputs are added. By how many per cent "
            "is the output off?",
            _cut_latent,
            unit="per cent",
            low=0,
            high=1000,
            seconds=21,
        ),
        Question(
            "skip_or_compress",
            "A quarter of the cache may be read. Whose output is closest to the exact one: that of "
            "a head that reads ...",
            _skip_or_compress,
            options=(FEW, NEWEST, HEAVY),
            seconds=1,
        ),
    ),
    exercises=(
        Exercise(
            "attend_selected",
            "Attention of one query to the tokens of a mask, and the share of the whole softmax "
            "that these hold.",
            _judge_attend_selected,
            (
                "Two sums of exponentials: over the selected tokens, and over all of them.",
                "Subtract the largest score of all before exp; then skipped tokens count 0.",
                "w = exp(s - max(s)); kept = where(mask, w, 0); return kept @ v / kept.sum(), "
                "kept.sum() / w.sum()",
            ),
            minutes=10,
            seconds=25,
        ),
        Exercise(
            "page_bound",
            "The tightest upper bound of q · k for all keys of a page, from the largest and the "
            "smallest number of each channel.",
            _judge_page_bound,
            (
                "q · k is a sum over channels; bound each term by itself.",
                "Where q is positive the largest number gives the most, where it is negative the "
                "smallest.",
                "maximum(q * largest, q * smallest).sum(axis=-1)",
            ),
            minutes=10,
            seconds=4,
        ),
        Exercise(
            "latent_scores",
            "Scores of one query with all tokens from their latents, without ever making a key.",
            _judge_latent_scores,
            (
                "(K c) · q is a product of three things; which two should meet first?",
                "c · (K^T q): move the projection to the query, once per head.",
                'einsum("rhk,hk->hr", key_up, q), and then with latents "hr,tr->ht".',
            ),
            minutes=10,
            seconds=1,
        ),
        Exercise(
            "best_basis",
            "An orthogonal basis of the latents whose first features hold as much energy as "
            "possible.",
            _judge_best_basis,
            (
                "The energy of one direction u is |C u|^2, with the latents C in rows.",
                "That is u^T (C^T C) u: which vectors of a symmetric matrix make it largest?",
                "numpy.linalg.eigh(C.T @ C) gives them in columns, by rising eigenvalue.",
            ),
            minutes=10,
            seconds=2,
        ),
    ),
)
