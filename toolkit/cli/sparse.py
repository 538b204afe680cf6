"""The command `toolkit audit-sparse`: sparse decoding on a model and a text of the user's."""

from pathlib import Path
from typing import Annotated, Literal

import tyro


def audit_sparse(
    checkpoint: Annotated[Path, tyro.conf.Positional],
    text: Path,
    budget: tuple[int, ...] = (128, 64, 256),
    tokens: int = 1024,
    steps: int = 32,
    lossless: int = 0,
    questions: tuple[str, ...] = (),
    prompts: int = 8,
    dtype: Literal["float32", "bfloat16"] | None = None,
    page: Path = Path("audit-sparse.html"),
) -> None:
    """Run every system of sparse decoding on a model and a text, and report what each one drops.

    Args:
        checkpoint: a run's folder, an exported file, or a folder with a published checkpoint.
        text: a file to read.
        budget: tokens that a head may attend to, sinks and recent ones counted; several give
            curves, and the first one's results come first.
        tokens: number of tokens to read, from the start of the text.
        steps: number of last tokens that are decoded sparsely.
        lossless: tokens to write after the text with sparse drafts that dense attention verifies;
            reports whether the text is the same, and whether it pays (0: none).
        questions: questions with known answers that every system reads sparsely, as kvpress and
            sparse-frontier ask them: needle (in the text), keys, variables, words, story, before.
        prompts: number of prompts of `tokens` tokens for each question.
        dtype: compute type of a published checkpoint (None: float32).
        page: the page to write, with the dropped tokens shown.
    """
    from toolkit.experiments.sparse.audit import audit, audit_table, load_any, text_reader, verdict
    from toolkit.experiments.sparse.lossless import decode_losslessly, lossless_table
    from toolkit.experiments.sparse.page import write_page
    from toolkit.experiments.sparse.questions import answers_table, ask

    if not budget:
        raise ValueError("budget: got none; wanted tokens, such as --budget 128 64")
    if lossless < 0:
        raise ValueError(f"lossless must be at least 0 tokens; got {lossless}")
    if not page.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {page.parent} for the page")
    model = load_any(checkpoint, dtype)
    read, words = text_reader(model, checkpoint), text.read_text(encoding="utf-8", errors="replace")
    ids, pieces = read(words)
    title = f"{checkpoint.name}: {budget[0]} of {min(tokens, len(ids))} tokens"
    rows = []
    for rows in audit(model, ids[:tokens], budget, steps):
        write_page(page, title, rows, pieces[:tokens])  # to be looked at meanwhile
    print(f"{verdict(rows)}\n\n{audit_table(rows)}")
    print(f"\nCurves, and what was dropped, token by token: {page}")
    if questions:
        sizes = {"budgets": budget, "length": tokens, "number": prompts}
        answers = ask(model, read, words, questions, **sizes)
        print(f"\nRight answers of {prompts} prompts:\n{answers_table(answers)}")
    if lossless:
        drafted = decode_losslessly(model, ids[:tokens], budget[0], lossless)
        print(f"\nWithout loss, {lossless} tokens:\n{lossless_table(drafted, budget[0])}")
        if any(row.same < 1 for row in drafted):
            raise RuntimeError("sparse drafts changed the text")
