"""A report is one HTML file: text, tables and vector pictures, nothing fetched from anywhere."""

import html
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from toolkit._files import write_whole
from toolkit.figures import style

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --paper: #ffffff;
        --line: #d8dee4; --panel: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4af; --paper: #0f1318;
        --line: #30363d; --panel: #161b22; } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 62rem; padding: 2.5rem 1.25rem 5rem; background: var(--paper);
       color: var(--ink); font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", sans-serif }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .5rem }
h2 { font-size: 1.3rem; margin: 3rem 0 .5rem; padding-top: 1.5rem;
     border-top: 1px solid var(--line) }
p { max-width: 46rem }
figure { margin: 1.25rem 0 }
figure svg { display: block; width: 100%; height: auto; background: #fff; border-radius: .5rem;
             border: 1px solid var(--line) }
figcaption, caption { color: var(--soft); font-size: .9rem; text-align: left; padding: .4rem 0;
             caption-side: top }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .93rem }
th, td { padding: .35rem .9rem .35rem 0; text-align: right; border-bottom: 1px solid var(--line);
         white-space: nowrap }
th:first-child, td:first-child { text-align: left }
th { color: var(--soft); font-weight: 600 }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem;
      padding: .9rem 1rem; overflow-x: auto; white-space: pre-wrap; font-size: .87rem;
      line-height: 1.5 }
mark { background: #ffd8a8; color: #1b1f24; border-radius: .2rem; padding: 0 .1rem }
.kind { font-size: .75rem; color: var(--soft); border: 1px solid var(--line); border-radius: 1rem;
        padding: .05rem .55rem; white-space: nowrap }
"""


def paragraph(text: str, kind: str | None = None) -> str:
    """One paragraph of prose, labelled with the kind of its numbers, such as "measured here"."""
    return f"<p>{html.escape(text)}{_label(kind)}</p>"


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], caption: str, kind: str | None = None
) -> str:
    """A table with its caption above it; the first cell names the row."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table><caption>{html.escape(caption)}{_label(kind)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def sample(prompt: str, continuation: str) -> str:
    """Generated text, its prompt marked."""
    return f"<pre><mark>{html.escape(prompt)}</mark>{html.escape(continuation)}</pre>"


def picture(figure: Figure, caption: str, alt: str) -> str:
    """A matplotlib figure as inline SVG, 20 to 100 kB."""
    buffer = io.StringIO()
    with style():
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    svg = re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), flags=re.S)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(alt)}" ', 1)
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def write_page(path: Path, title: str, lead: str, sections: Sequence[tuple[str, str]]) -> Path:
    """Write a report of (heading, HTML) sections."""
    body = "".join(
        f"<section><h2>{html.escape(heading)}</h2>{content}</section>"
        for heading, content in sections
    )
    document = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{html.escape(title)}</h1>{paragraph(lead)}{body}</body></html>\n"
    )
    write_whole(path, document.encode())
    return path


def _label(kind: str | None) -> str:
    return f' <span class="kind">{html.escape(kind)}</span>' if kind else ""
