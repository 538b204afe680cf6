"""The audit as a page: one table, and for each system the text with what it dropped shown."""

from html import escape
from pathlib import Path

import numpy as np

from toolkit.experiments.sparse.audit import Row, audit_table

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:68rem;margin:2rem auto;color:#1f2933}
pre{overflow-x:auto;font-size:11px;background:#f5f7fa;padding:1rem}
.text{white-space:pre-wrap;font:13px/1.6 monospace}
.text b{font-weight:normal;border-radius:2px}"""
_MOST = 10


def write_page(path: Path, title: str, rows: list[Row], pieces: list[str]) -> None:
    """Write the page; a token is the redder the more of the last query's softmax it had."""
    parts = [
        f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{escape(title)}</h1><pre>{escape(audit_table(rows))}</pre>",
        "<p>kB are read per key-value head and step, those of the index included. Below, for each "
        "system: tokens that the last query did not read, the redder the more of the softmax they "
        "held, mean over layers and heads.</p>",
    ]
    for row in rows:
        worst = np.argsort(-row.lost)[:_MOST]
        listed = ", ".join(
            f"{escape(repr(pieces[token]))} at {token}: {row.lost[token]:.2%}"
            for token in worst
            if row.lost[token] > 0
        )
        parts += [
            f"<h2>{escape(row.name)}: {row.lost.sum():.1%} of the softmax dropped</h2>",
            f"<p>Most lost: {listed or 'nothing'}.</p>",
            f"<div class=text>{''.join(_marked(row.lost, pieces))}</div>",
        ]
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _marked(lost: np.ndarray, pieces: list[str]) -> list[str]:
    largest = max(float(lost.max()), 1e-9)
    return [
        f'<b style="background:rgba(214,69,65,{share / largest:.2f})" title="{share:.3%}">'
        f"{escape(piece)}</b>"
        if share > 0.01 * largest
        else escape(piece)
        for share, piece in zip(lost.tolist(), pieces, strict=True)
    ]
