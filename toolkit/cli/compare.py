"""The command `toolkit compare`: which model is better on a text, at equal cost?"""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from toolkit.cli.language import OwnModules, import_modules
from toolkit.cli.unread import refuse_unread


def compare(
    directory: Annotated[Path, tyro.conf.Positional],
    contenders: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    match: Literal["flops", "training-flops", "parameters", "time", "tokens"] = "flops",
    text: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = (),
    corpus: Literal["prose", "code"] = "prose",
    tokenizer: Path | None = None,
    rates: int = 5,
    factor: float = 2.0,
    seeds: int = 5,
    smallest: float = 0.01,
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
    imports: OwnModules = (),
    recorded: bool = False,
) -> None:
    """Compare language models on your text: matched, each tuned, paired seeds, one page and a PDF.

    Run the same command again to resume, or beside itself to share the work.

    Args:
        directory: the comparison's folder; at the end it holds index.html and comparison.pdf.
        contenders: two or more files of options (TOML or Python), as `toolkit train --config` takes
            them, or folders of runs, each as PATH or LABEL=PATH; the first is the one that others
            are matched and compared to.
        match: what is equal: FLOPs per token and tokens, FLOPs of the whole training, parameters
            and tokens, seconds of the whole training, or tokens alone.
        text: a file or folder to train on (repeatable), or one token array (.npy); by default what
            the first contender names.
        corpus: the text used when none is given.
        tokenizer: a tokenizer.json, by which the text is read; without one, models read bytes.
        rates: learning rates that each contender tries, around the one of its file.
        factor: between neighbouring rates.
        seeds: trainings of each contender that are judged; fewer than 5 give no verdict.
        smallest: the smallest difference of the held-out loss that matters, in bits per byte.
        set: an option of all contenders, as in steps=500 or looped.width=64 (repeatable).
        imports: a module of your own that registers mixers or optimisers (repeatable).
        recorded: only print what is in the folder, and draw it into runs/pages/NAME.
    """
    if recorded:
        refuse_unread(compare, locals(), "recorded", ("directory", "imports"))
    import_modules(imports)
    from toolkit.experiments import load_comparison, run_comparison, show_comparison
    from toolkit.language import load_tokenizer

    if recorded:
        # Elsewhere: a record may be part of a checkout, or of a folder that is only read.
        show_comparison(*load_comparison(directory), Path("runs/pages") / directory.resolve().name)
        return
    words = None if tokenizer is None else load_tokenizer(tokenizer)
    runs = dict(_contender(name, set, words) for name in contenders)
    if len(runs) < len(contenders):
        raise ValueError(f"contenders: got one label twice in {', '.join(contenders)}")
    if runs:
        first = next(iter(runs.values()))
        own: Any = tuple(map(str, text)) or (first.text if first.text != "prose" else corpus)
        runs = {label: dataclasses.replace(run, text=own) for label, run in runs.items()}
    command = shlex.join(["toolkit", *sys.argv[1:]])
    is_complete = run_comparison(
        runs, directory, match=match, tokenizer=words, rates=rates, factor=factor, seeds=seeds,
        smallest=smallest, command=command,
    )  # fmt: skip
    if not is_complete:
        sys.exit(130)


def _contender(name: str, set: tuple[str, ...], tokenizer: Any) -> tuple[str, Any]:
    """The label and the run of a contender, with a vocabulary of the tokenizer's size."""
    from toolkit.cli.options import merged, model_of, parsed_settings, read_options, settings_of
    from toolkit.cli.train import stored_options
    from toolkit.language import TrainingRun

    label, equals, path = name.partition("=")
    file = Path(path if equals else name)
    label = label if equals else file.stem
    if not file.exists():
        raise ValueError(f"contenders: found neither a file nor a folder {str(file)!r}")
    values = stored_options(file) if file.is_dir() else read_options(file)
    if tokenizer is not None:
        values = merged({"looped": {"vocabulary": tokenizer.get_vocab_size()}}, values)
    values = merged(values, parsed_settings(set))
    text = values.get("text", "prose")
    run = TrainingRun(
        model_of(values.get("looped", {}), values.get("preset")),
        text if isinstance(text, str) else tuple(text),
        **settings_of(values),
    )
    return label, run
