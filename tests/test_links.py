"""Every link to something in this repository leads to something; no network is asked."""

import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WRITTEN = (
    "*.md",
    "docs/*.md",
    "docs/teaching/*.md",
    "data/**/*.md",
    "notebooks/*.ipynb",
    "tutorials/*.ipynb",
)
MADE = {Path("docs/changelog.md"), Path("docs/contributing.md")}  # by docs/_ext/pages.py
MADE_ON_BINDER = {"index.ipynb"}  # by binder/postBuild
PAGES = [
    name
    for pattern in WRITTEN
    for path in sorted(ROOT.glob(pattern))
    if (name := path.relative_to(ROOT)) not in MADE
]
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?\s*\)")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"].removeprefix("https://github.com/")
# A page of ours on GitHub, Colab or Binder names a file of the repository.
HOSTED = re.compile(
    rf"https://(?:github\.com|colab\.research\.google\.com/github)/{REPOSITORY}/"
    r"(?:blob|tree)/main/([^)\s\"'#?]+)"
    rf"|https://mybinder\.org/v2/gh/{REPOSITORY}/main\?urlpath=lab/tree/([^)\s\"'#?]+)"
)


def text_of(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    if page.suffix == ".md":
        return re.sub(r"```.*?```", "", text, flags=re.S)
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def anchors(page):
    """The anchors that GitHub gives the headings of a Markdown file."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def faults_of(page):
    text = text_of(page)
    for link in LINK.findall(text):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if target.relative_to(ROOT) in MADE:
            continue
        if not target.exists():
            yield f"{link}: no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.relative_to(ROOT)):
            yield f"{link}: no such heading"
    for one, other in HOSTED.findall(text):
        if other not in MADE_ON_BINDER and not (ROOT / (one or other)).exists():
            yield f"{one or other}: no such file behind the address"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    faults = list(faults_of(page))
    assert not faults, f"{page}: " + "; ".join(faults)
