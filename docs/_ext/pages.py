"""Pages made from the package and its records at every build: rooms, results, notebooks, project.

They lie beside the written ones and are ignored by git. Links of Markdown files and notebooks that
are meant for somebody reading the repository are turned to where the site has the same thing.
"""

import ast
import contextlib
import inspect
import io
import json
import os
import re
import textwrap
from collections import defaultdict
from pathlib import Path

from cheat_sheets import cheat_sheets
from claims import claims_page
from replays import add_replays
from rooms import room_page
from sphinx.errors import ExtensionError
from sphinx.util import logging

import toolkit
from toolkit.lab.notebooks.index import FOLDERS, read_entries, table
from toolkit.measure import in_words, interquartile_range, read_records

DOCS = Path(__file__).parent.parent
ROOT = DOCS.parent
REPOSITORY = "https://github.com/mlsys-toolkit/toolkit/blob/main"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
logger = logging.getLogger(__name__)


def write(path, text):
    """Writes a page unless it is there already, so that an unchanged one is not read again."""
    path = DOCS / path
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def on_site(text, file, page):
    """The links of a file of the repository, as they have to be on a page of the site."""

    def moved(match):
        target = os.path.normpath(file.parent / match[1])
        if not (ROOT / target).exists():
            logger.warning("%s: the link to %s leads nowhere", file, match[1])
        room = re.fullmatch(r"toolkit/(\w+)(/__init__.py)?", target)
        if room and room[1] in toolkit._ROOMS:
            target = f"api/{room[1]}.rst"
        elif re.fullmatch(r"(notebooks|tutorials)/\w+.ipynb", target):
            pass
        elif target == "data/experiments":
            target = "results.md"
        elif target in PROJECT:
            target = PROJECT[target]
        elif target.startswith("docs/"):
            target = target.removeprefix("docs/")
        else:
            return f"{REPOSITORY}/{target}"
        return os.path.relpath(target, page.parent) + (match[2] or "")

    return LINK.sub(moved, text)


PROJECT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def write_project():
    for name, page in PROJECT.items():
        if page != "index.md":
            text = (ROOT / name).read_text(encoding="utf-8")
            write(page, on_site(text, Path(name), Path(page)))


def write_rooms():
    for room in toolkit._ROOMS:
        module = getattr(toolkit, room)
        write(f"api/{room}.rst", room_page(module))
        for name in module.__all__:
            if inspect.ismodule(inner := getattr(module, name)):
                write(f"api/{room}.{name}.rst", room_page(inner))


def answered(notebook):
    """The exercises of a lesson that somebody has written into: a stub is `...` alone."""
    names = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        checked = set(re.findall(r'lesson\.check\("\w+", (\w+)\)', source))
        if cell["cell_type"] != "code" or not checked:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name in checked:
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if [ast.unparse(line) for line in body] != ["..."]:
                    names.append(node.name)
    return names


def write_notebooks():
    """Copies of notebooks and lessons, with their links turned; no learner's answer is shown."""
    for path in sorted((*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("tutorials/*.ipynb"))):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        page = path.relative_to(ROOT)
        if names := answered(notebook):
            raise ExtensionError(f"{page} holds answers, which the site would show: {names}")
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = on_site("".join(cell["source"]), page, page)
        add_replays(page, notebook)
        write(page, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def write_experiments():
    """What `toolkit experiment NAME --recorded FILE` prints and draws."""
    from toolkit.experiments import EXPERIMENTS, load_experiment, show_recorded
    from toolkit.experiments.kit.records import read_runs

    for name, summary in EXPERIMENTS.items():
        path = ROOT / f"data/experiments/{name}.jsonl"
        if not path.exists():
            continue
        experiment = load_experiment(name)
        runs = [line["environment"] for line in read_runs(path, experiment)]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            show_recorded(experiment, path, DOCS / "results" / name)
        lines = printed.getvalue().partition("\nfigure:")[0].strip().splitlines()
        text = "\n".join(map(folded, lines))
        title = summary[0].upper() + summary[1:]
        write(
            f"results/{name}.md",
            f"# {title}\n\n{origins(path, runs)}\n\n![{title}]({name}/figure.png)\n\n"
            f"```text\n{text}\n```\n\nShow it again, without running anything:\n\n"
            f"```sh\ntoolkit experiment {name} --recorded data/experiments/{name}.jsonl\n```\n",
        )


def write_comparisons():
    """What `toolkit compare FOLDER --recorded` prints and draws."""
    from toolkit.experiments import load_comparison, show_comparison

    for folder in sorted((ROOT / "data/comparisons").glob("*/")):
        found = load_comparison(folder)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            show_comparison(*found, DOCS / "results" / folder.name)
        text = "\n".join(
            map(folded, printed.getvalue().partition("\npage:")[0].strip().splitlines())
        )
        title = text.partition("  (")[0]
        title = title[0].upper() + title[1:]
        origin = origins(folder / "runs.jsonl", [line["environment"] for line in found[2]])
        files = " ".join(f"{name}.toml" for name in found[0].contenders)
        write(
            f"results/{folder.name}.md",
            f"# {title}\n\n{origin}\n\n"
            f"![{title}]({folder.name}/figure.png)\n\n```text\n{text}\n```\n\n"
            f"The contenders are [{files}]({REPOSITORY}/{folder.relative_to(ROOT)}). "
            f"Show it again, without running anything:\n\n"
            f"```sh\ntoolkit compare {folder.relative_to(ROOT)} --recorded\n```\n",
        )


def folded(line):
    """A long line of words goes on below its second column; a row of a table stays whole."""
    if "+-" in line or not re.search(r"[a-z] [a-z]+ [a-z]", line):
        return line
    indent = " " * 13 if re.match(r"(seen|contradicted|not shown) +| {12}", line) else ""
    return textwrap.fill(line, 100, subsequent_indent=indent, replace_whitespace=False)


def origins(path, records):
    """Where the numbers of a file come from; `records` are the provenances of its entries."""
    rows = dict.fromkeys(
        f"| `{r['command']}` | {r['device']} | {r['versions']['jax']} | {r['commit']} | {day(r)} |"
        for r in records
    )
    head = "| command | device | jax | commit | date |\n| --- | --- | --- | --- | --- |\n"
    source = f"[{path.name}]({REPOSITORY}/{path.relative_to(ROOT)})"
    return f"{len(records)} entries of {source}:\n\n{head}" + "\n".join(rows)


def day(record):
    """The date of a record, which no line breaks."""
    return record["date"][:10].replace("-", "\N{NON-BREAKING HYPHEN}")


def write_claims():
    write("claims/index.md", claims_page())


def write_cheat_sheets():
    from toolkit.parallel import simulate_devices

    simulate_devices(8)  # the compiler's bytes of messages
    write("cheat_sheets.md", cheat_sheets())


def write_measurements():
    """One page a suite and machine: every contender's median and spread, as recorded."""
    for path in sorted((ROOT / "data/measurements").glob("*/*.json")):
        machine, suite = path.parent.name, path.stem
        records, cases = read_records(path), defaultdict(list)
        for r in records:
            *case, contender = r.name.split(" | ")
            cases[", ".join(case)].append((contender, r))
        origin = origins(path, [vars(r) for r in records])
        parts = [f"# `toolkit bench {suite}` on {machine}", "", origin, ""]
        for case, rows in cases.items():
            parts += [f"## {case}", "", "| contender | median | spread | samples |",
                      "| --- | ---: | ---: | ---: |"]  # fmt: skip
            for contender, r in rows:
                several = len(r.samples) > 1
                spread = quantity(interquartile_range(r.samples), r.unit) if several else ""
                value, count = quantity(r.value, r.unit), len(r.samples) or ""
                parts.append(f"| {contender} | {value} | {spread} | {count} |")
            parts.append("")
        write(f"results/{machine}/{suite}.md", "\n".join(parts))


def quantity(value, unit):
    return in_words(value, {"s": "seconds", "1": ""}.get(unit, unit))


TABLE = "<!-- the table of {} -->"


def write_table(app, docname, source):
    """The table that the index of `toolkit lab` has, too, in place of its mark."""
    for folder in FOLDERS:
        if (mark := TABLE.format(folder)) in source[0]:
            entries = read_entries(ROOT, folder)
            (DOCS / "pictures").mkdir(exist_ok=True)
            for entry in entries:
                (DOCS / f"pictures/{entry.name}.png").write_bytes(entry.picture)
            source[0] = source[0].replace(mark, table(entries, None, "pictures/{}.png"))


def write_readme(app, docname, source):
    if docname == "index":
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        source[0] = on_site(readme, Path("README.md"), Path("index.md")) + source[0]


def generate(app):
    write_cheat_sheets()  # first: it says how many devices there are
    write_project()
    write_rooms()
    write_notebooks()
    write_experiments()
    write_comparisons()
    write_claims()
    write_measurements()


def setup(app):
    app.connect("source-read", write_readme)
    app.connect("source-read", write_table)
    app.connect("builder-inited", generate)
    return {"parallel_read_safe": True}
