"""Sentences that claim something, and the marks that tie them to what holds them.

A claim is a sentence with a number, a comparative, "never" or "always". Questions and instructions
claim nothing; a list of sources is its own citation. Readers do not see a mark. It follows the
sentences of its paragraph that it ties, in Markdown as an HTML comment:

    <!-- tied: tests/lab/lessons/test_sentences.py::test_name -->   a test
    <!-- tied: exercise merge -->    the lesson's exercise or question, judged in its own tests
    <!-- holds: 2 * 64 * 8 * 4096**2 == approx(17e9, rel=0.02) -->  an assertion, evaluated
    <!-- cited: Dao et al. 2022 -->  a source that the page names

A sentence that names a record, a test or a paper itself needs none. In Python a comment inside the
function ties all its sentences: `# tied: ...`. An assertion or a test must hold every number of its
sentences that stands outside formulas and code; a test may hold 1.5 % as 0.015.
"""

import ast
import functools
import io
import itertools
import json
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = (
    "tutorials/*.ipynb", "notebooks/*.ipynb", "README.md", "CONTRIBUTING.md", "docs/*.md",
    "docs/teaching/*.md",
)  # fmt: skip
# Copies, and from data.
MADE = {f"docs/{name}.md" for name in ("changelog", "contributing", "kernels", "mixers")}
NUMBERS = "two three four five six seven eight nine ten eleven twelve hundred thousand million"
COMPARED = (
    "than more less fewer fewest most least better best worse worst faster fastest slower slowest "
    "smaller smallest larger largest bigger biggest longer longest shorter shortest higher highest "
    "lower lowest cheaper cheapest earlier later greater greatest quicker sooner never always "
    "twice half halves double doubles doubled quarter"
)
CLAIM = re.compile(rf"\d|\b({'|'.join((NUMBERS + ' ' + COMPARED).split())})\b", re.I)
EQUATION = re.compile(r"\$[^$]*(=|approx)\s*\d[^$]*\$")
# A sentence that begins so tells a reader what to do.
INSTRUCTION = re.compile(
    r"(\*\*)?(Add|Ask|Begin|Call|Change|Check|Choose|Click|Compare|Count|Cut|Drag|Draw|Enter|Find|"
    r"Give|Guess|Hide|Hold|Keep|Let|Look|Make|Measure|Move|Name|Open|Play|Predict|Press|Print|Put|"
    r"Read|Reduce|Run|Save|Say|Set|Show|Start|Switch|Take|Target|Then|Try|Turn|Type|Use|Write)\b"
)
SOURCES = re.compile(r"\*?(Sources?|Papers?|Further reading)\b")
MARK = re.compile(r"(?<!`)<!-- (tied|holds|cited): (.*?) -->", re.S)
COMMENT = re.compile(r"# (tied|holds|cited): (.*)")


@dataclass
class Claims:
    """Sentences that stand or fall together, and their marks."""

    page: str
    sentences: list[str] = field(default_factory=list)
    marks: list[tuple[str, str]] = field(default_factory=list)


def bare(sentence: str) -> str:
    """A sentence without code, formulas, addresses and names that hold digits."""
    sentence = re.sub(r"``?[^`]*``?|\$+[^$]*\$+|\]\([^)]*\)|https?://\S+", " ", sentence)
    return re.sub(r"\b([Ll]essons?|section|issue|L) ?\d+|\b[A-Za-z_/-]+\d[\w./-]*", " ", sentence)


def claims(sentence: str) -> bool:
    """Whether a sentence claims something that could be wrong."""
    words = bare(sentence).strip(" *")
    is_claim = CLAIM.search(words) or EQUATION.search(sentence)
    return bool(is_claim and not words.endswith("?") and not INSTRUCTION.match(words))


def cites(sentence: str) -> bool:
    """Whether a sentence names a source itself: a paper, a datasheet, a record or test of ours."""
    paths = re.findall(r"\b(?:tests|data)/[\w./-]+\.(?:py|jsonl?|csv)\b", sentence)
    if paths:
        return all((ROOT / path).exists() for path in paths)
    return bool(re.search(r"(et al\.|datasheet|white paper)[^.]*\b(19|20)\d\d\b", sentence))


def split(paragraph: str) -> list[str]:
    """The sentences of a paragraph."""
    return re.split(r"(?<=[.?!])[*)\"]*\s+(?=[A-Z*`$\[(])", " ".join(paragraph.split()))


def markdown_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def in_markdown(path: Path, page: str) -> Iterator[Claims]:
    """The claims of a page or notebook; code, headings, tables and what a command wrote are not."""
    text = markdown_of(path)
    text = re.sub(r"<!-- python .*?<!-- end -->", "", text, flags=re.S)
    text = re.sub(r"(```|~~~).*?\1|^(    |\||#).*?$|^---\n.*?\n---\n", "", text, flags=re.S | re.M)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )", text):
        paragraph = re.sub(r"^\s*\d+\. ", "", paragraph)
        if SOURCES.match(paragraph.strip("*- \n")):
            continue
        group = Claims(page)
        at = 0
        for mark in MARK.finditer(paragraph):
            if mark.start() > at and paragraph[at : mark.start()].strip() and group.marks:
                yield group
                group = Claims(page)
            group.sentences += filter(claims, split(paragraph[at : mark.start()]))
            group.marks.append((mark[1], " ".join(mark[2].split())))
            at = mark.end()
        if paragraph[at:].strip() and group.marks:
            yield group
            group = Claims(page)
        group.sentences += filter(claims, split(paragraph[at:]))
        yield group


def in_captions(path: Path, page: str) -> Iterator[Claims]:
    """The claims of a panel's captions. What a placeholder fills in comes from the panel's data."""
    source = path.read_text(encoding="utf-8")
    if "def sentence(" not in source:
        return
    comments = [
        (token.start[0], *found.groups())
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and (found := COMMENT.match(token.string))
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == "sentence":
            last = node.end_lineno or node.lineno
            found = [mark for line, *mark in comments if node.lineno <= line <= last]
            group = Claims(page, marks=[(kind, words) for kind, words in found])
            for text in texts(node):
                whole = (one for one in split(text) if len(one.split()) > 4)
                group.sentences += [one for one in whole if claims(one) and not filled(one)]
            yield group


def filled(sentence: str) -> bool:
    """Whether data decide a sentence: it has a placeholder, and no number beside it."""
    return "{}" in sentence and not re.search(r"\d|\b(never|always)\b", bare(sentence))


def texts(function: ast.FunctionDef) -> Iterator[str]:
    """The texts in a function, placeholders as {}; its docstring is none."""
    inside: set[ast.AST] = {function.body[0]} if ast.get_docstring(function) else set()
    for node in ast.walk(function):
        if node in inside:
            inside |= {*ast.iter_child_nodes(node)}
        elif isinstance(node, ast.JoinedStr):
            inside |= {*ast.iter_child_nodes(node)}
            parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@functools.cache
def written_in(name: str) -> str:
    """A test, and what its file says outside of the other tests."""
    path, _, test = name.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in reversed(ast.parse(text).body):
        is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if is_test and node.name != test:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            del lines[first - 1 : node.end_lineno]
    return "\n".join(lines)


def without_numbers(group: Claims) -> set[str]:
    """Numbers of the sentences that no assertion of theirs holds, nor a test that they name.

    Sources, exercises, and tests of a whole folder of pages hold what cannot be looked up here.
    """
    marks = [(kind, words) for kind, several in group.marks for words in several.split("; ")]
    if any(kind == "cited" or (kind == "tied" and "::" not in words) for kind, words in marks):
        return set()
    held = " ".join(written_in(words) if kind == "tied" else words for kind, words in marks)
    folder = str(Path(group.page).parent)
    if folder not in ("", ".", "docs") and f'"{folder}"' in held:
        return set()
    there = {
        round(float(n) * scale, 9)
        for n in re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d)[,_](?=\d{3})", "", held))
        for scale in ((1, 100, 1e3, 0.01, 1e-3) if "tied" in dict(marks) else (1,))
    }
    own = " ".join(bare(one) for one in group.sentences if not cites(one))
    own = re.sub(r"\b\d{1,2} [A-Z][a-z]+ 20\d\d\b", " ", own)  # the date of a source
    found = re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", own)
    return {n for n in found if float(n.rstrip(",").replace(",", "")) not in there}


def found() -> list[Claims]:
    pages = [path for pattern in WRITTEN for path in sorted(ROOT.glob(pattern))]
    named = [(path, str(path.relative_to(ROOT))) for path in pages]
    groups = [one for path, name in named if name not in MADE for one in in_markdown(path, name)]
    for path in sorted(ROOT.glob("toolkit/lab/*/*.py")):
        groups += in_captions(path, str(path.relative_to(ROOT)))
    return groups


def untied(claims: list[Claims]) -> list[str]:
    """The sentences without a mark, each after its page."""
    return [
        f"{group.page}: {sentence}"
        for group in claims
        if not group.marks
        for sentence in itertools.filterfalse(cites, group.sentences)
    ]
