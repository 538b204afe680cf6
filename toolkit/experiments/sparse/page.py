"""The audit as a page: a verdict and curves of quality against bytes first, then a table, and for
each system, folded, the text with what it dropped."""

import io
from html import escape
from pathlib import Path

import numpy as np

from toolkit.experiments.kit.chart import LOOKS
from toolkit.experiments.sparse.audit import CONTROL, EQUAL, Row, audit_table, verdict
from toolkit.figures import new_figure

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:68rem;margin:2rem auto;color:#1f2933}
pre{overflow-x:auto;font-size:11px;background:#f5f7fa;padding:1rem}
summary{cursor:pointer;padding:.2rem 0}svg{width:100%;height:auto}
.text{white-space:pre-wrap;font:13px/1.6 monospace}
.text b{font-weight:normal;border-radius:2px}"""
_MOST = 10
MARKERS = "osD^v<>PXphd*"  # one per system; colours come again after seven


def write_page(path: Path, title: str, rows: list[Row], pieces: list[str]) -> None:
    """Write the page; a token is the redder the more of the last query's softmax it had."""
    parts = [
        f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{escape(title)}</h1><p>{escape(verdict(rows))}</p>",
        curves(rows),
        "<p>kB are read per key-value head and step, those of the index included. Full marks read "
        f"no more than their budget's keys and values; {CONTROL} tokens are the control.</p>",
        f"<pre>{escape(audit_table(rows))}</pre>",
        "<p>Below, for each system: tokens that the last query did not read, the redder the more "
        "of the softmax they held, mean over layers and heads.</p>",
    ]
    for row in (row for row in rows if row.budget == rows[0].budget):
        worst = np.argsort(-row.lost)[:_MOST]
        listed = ", ".join(
            f"{escape(repr(pieces[token]))} at {token}: {row.lost[token]:.2%}"
            for token in worst
            if row.lost[token] > 0
        )
        parts += [
            f"<details><summary>{escape(row.name)}: {row.lost.sum():.1%} of the softmax dropped"
            f"</summary><p>Most lost: {listed or 'nothing'}.</p>",
            f"<div class=text>{''.join(_marked(row.lost, pieces))}</div></details>",
        ]
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def curves(rows: list[Row]) -> str:
    """Mass, its 5th percentile and the output error of every system against its bytes, as SVG."""
    figure = new_figure(11.0, 4.2)
    shown = {
        "mass kept": lambda quality: quality.mass,
        "5th percentile of mass": lambda quality: quality.worst_mass,
        "output error": lambda quality: quality.error,
    }
    systems = dict.fromkeys(row.name.removesuffix(EQUAL) for row in rows)
    for axes, (title, number) in zip(figure.subplots(1, 3), shown.items(), strict=True):
        for place, system in enumerate(systems):
            look = LOOKS[place % len(LOOKS)]
            own = [row for row in rows if row.name.removesuffix(EQUAL) == system]
            own.sort(key=lambda row: row.quality.kilobytes)
            equal = [row for row in own if row.is_equal]
            # A system without a row at equal bytes has an empty mark and no line.
            style = {"color": look.colour, "marker": MARKERS[place % len(MARKERS)]}
            for some, how in ((own, {"linestyle": "", "markerfacecolor": "white"}),
                              (equal, {"linestyle": look.dashes, "label": system})):  # fmt: skip
                x = [row.quality.kilobytes for row in some]
                y = [number(row.quality) for row in some]
                axes.plot(x, y, linewidth=2.5 if system == CONTROL else 1.2, **style, **how)
        axes.set(title=title, xlabel="kB per key-value head and step")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=7, fontsize=8)
    figure.subplots_adjust(left=0.05, right=0.99, bottom=0.28, top=0.9, wspace=0.18)
    file = io.StringIO()
    figure.savefig(file, format="svg")
    return file.getvalue().partition("<svg")[1] + file.getvalue().partition("<svg")[2]


def _marked(lost: np.ndarray, pieces: list[str]) -> list[str]:
    largest = max(float(lost.max()), 1e-9)
    return [
        f'<b style="background:rgba(214,69,65,{share / largest:.2f})" title="{share:.3%}">'
        f"{escape(piece)}</b>"
        if share > 0.01 * largest
        else escape(piece)
        for share, piece in zip(lost.tolist(), pieces, strict=True)
    ]
