"""A comparison as a table, curves, one HTML page and a PDF."""

from pathlib import Path
from typing import Any

import numpy as np

from toolkit._checks import checked
from toolkit.experiments.compare.comparison import LOSS, Comparison, sizes_of
from toolkit.experiments.compare.matching import MATCHES
from toolkit.experiments.kit.records import is_changed, results_of
from toolkit.experiments.kit.results import MissingResultError, Results
from toolkit.experiments.kit.verdicts import LEAST_SEEDS, Verdict, interval
from toolkit.measure.tables import text_table

Rows = list[list[str]]


@checked
def show_comparison(
    comparison: Comparison,
    tried: Results,
    lines: list[dict[str, Any]],
    directory: Path,
    how: str = "recorded",
) -> Path:
    """Print the table and the verdicts of a comparison, and write its page, PDF and figure.

    Args:
        comparison: as `load_comparison` returns it, like the next two.
        tried: what the learning rates gave.
        lines: the finished runs.
        directory: where `index.html`, `comparison.pdf` and `figure.png` go.
        how: "measured here" or "recorded".

    Returns:
        The page.

    Raises:
        ValueError: no run is finished.

    Example:
        >>> from pathlib import Path
        >>> folder = Path("data/comparisons/looped-hybrid")
        >>> show_comparison(*load_comparison(folder), Path("page"))  # doctest: +SKIP
    """
    # matplotlib, only when it is wanted
    from toolkit.experiments.compare.figure import draw, write_below
    from toolkit.figures import report, save_figure, style

    if not lines:
        raise ValueError("lines: got no finished run, wanted some of each contender")
    rates = comparison.best_rates(tried)
    final = comparison.final(rates)
    results = results_of(lines, final)
    verdicts = final.verdicts(results)
    facts = lines[-1]["environment"]
    origin = f"{how}: {facts['device']}, jax {facts['versions']['jax']}, {facts['date'][:10]}"
    outcome = outcome_rows(comparison, results)
    tables = {
        f"Held-out loss in {comparison.unit}: mean and standard deviation over seeds, and the "
        "95 % interval of the paired difference": outcome,
        f"What was made equal: {MATCHES[comparison.match]} (FLOPs are modelled)": cost_rows(
            comparison, results, rates
        ),
    }
    warnings = [*edge_warnings(comparison, rates)]
    if any(is_changed(line["environment"]["commit"]) for line in lines):
        warnings.append("Some runs are from a tree with uncommitted changes.")
    words = [verdict_words(comparison, verdict) for verdict in verdicts]
    print(f"\n{final.title}  ({origin})")
    for title, rows in tables.items():
        print(f"\n{title}\n\n{text_table(rows, '<' + '>' * (len(rows[0]) - 1))}")
    print("", *words, *warnings, sep="\n")
    directory.mkdir(parents=True, exist_ok=True)
    with style():
        figure = draw(comparison, tried, results, rates, origin)
        shown = report.picture(figure, origin, f"Held-out loss of {final.title}")
        below = text_table(outcome, "<" + ">" * (len(outcome[0]) - 1))
        write_below(figure, f"{below}\n\n" + "\n".join(words))
        figure.savefig(directory / "figure.png")
        save_figure(figure, directory / "comparison.pdf", columns=2)
    sections = [
        ("What came out", "".join(map(report.paragraph, [*words, *warnings]))),
        ("The curves", shown),
        *((title.partition(":")[0], report.table(rows[0], rows[1:], title, how))
          for title, rows in tables.items()),
        ("How it was done", report.paragraph(method_words(comparison))
         + f"<pre>{report.html.escape(facts['command'])}</pre>"
         + report.paragraph(f"{origin}; commit {facts['commit']}.")),
    ]  # fmt: skip
    page = report.write_page(directory / "index.html", final.title, words[0], sections)
    print(f"\npage: {page}\npaper: {directory / 'comparison.pdf'}")
    return page


def outcome_rows(comparison: Comparison, results: Results) -> Rows:
    """One row a contender: its loss, and its difference to the first."""
    first, *others = comparison.contenders
    rows = [["contender", "seeds", "loss", f"difference to {first}", "95 % interval"]]
    for label in comparison.contenders:
        try:
            losses = np.array(results.samples(label, LOSS))
        except MissingResultError:
            rows.append([label, "0", "", "", ""])
            continue
        spread = losses.std(ddof=1) if len(losses) > 1 else 0.0
        row = [label, str(len(losses)), f"{losses.mean():.4f} ± {spread:.4f}", "", ""]
        if label != first:
            theirs, ours = results.paired(LOSS, [first, label])
            differences = ours - theirs
            row[3] = f"{differences.mean():+.4f}"
            if len(differences) > 1 and np.isfinite(differences).all():
                low, high = interval(differences, len(others))
                row[4] = f"{low:+.4f} to {high:+.4f}"
        rows.append(row)
    return rows


def cost_rows(comparison: Comparison, results: Results, rates: dict[str, float]) -> Rows:
    """One row a contender: what it costs, and the rate that was found for it."""
    names = list(sizes_of(next(iter(comparison.contenders.values()))))
    rows = [["contender", "layers", *names, "seconds", "learning rate"]]
    for label, run in comparison.contenders.items():
        config, sizes = run.config, sizes_of(run)
        layers = config.pattern + (f", {config.loops} times" if config.loops > 1 else "")
        cells = [f"{size:.3g}" if "FLOPs" in name else f"{size:,}" for name, size in sizes.items()]
        try:
            seconds = f"{results.mean(label, 'seconds'):.0f}"
        except MissingResultError:
            seconds = ""
        rows.append([label, layers, *cells, seconds, f"{rates[label]:g}"])
    return rows


def edge_warnings(comparison: Comparison, rates: dict[str, float]) -> list[str]:
    """A sentence for each contender whose best rate has no tried rate beyond it."""
    found = []
    for label, rate in rates.items():
        grid = comparison.grid(label)
        if len(grid) > 1 and rate in (grid[0], grid[-1]):
            end = "smallest" if rate == grid[0] else "largest"
            found.append(
                f"The best rate of {label}, {rate:g}, is the {end} that was tried: try more with "
                f"--rates {comparison.rates + 2}."
            )
    return found


def verdict_words(comparison: Comparison, verdict: Verdict) -> str:
    """A verdict as a sentence."""
    words = f"{verdict.word.capitalize()}: {verdict.claim}"
    if verdict.interval is not None:
        low, high = verdict.interval
        words += f", by {low:.4f} to {high:.4f} {comparison.unit}"
    if verdict.seeds < LEAST_SEEDS:
        words += f" ({verdict.seeds} seeds; a verdict takes {LEAST_SEEDS})"
    if verdict.word == "void":
        first = next(iter(comparison.contenders))
        words += f" (void, because {first} is not seen to learn; give it more steps)"
    return f"{words}. The smallest difference that matters was set to {comparison.smallest:g}."


def method_words(comparison: Comparison) -> str:
    """How a comparison is made, in a paragraph."""
    return (
        f"Each contender was trained with {comparison.rates} learning rates, {comparison.factor:g} "
        "times apart, for its whole number of steps, and took the best by text that no verdict "
        f"reads; then with {comparison.seeds} other seeds at that rate. With the same seed all see "
        "the same batches. A contender is better (seen) where the 95 % interval of its mean paired "
        "difference, for all claims together, lies beyond the smallest difference that matters, "
        "worse (contradicted) where it lies beyond zero on the other side. The control: the first "
        "contender must be worse at its first evaluation than at its end. The interval is of "
        "seeds; it does not say what another text, another size or a longer training would give. "
        f"The text: {comparison.text['name']}, {comparison.text['size']:,} tokens."
    )
