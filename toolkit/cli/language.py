"""The commands `toolkit generate`, `serve`, `evaluate` and `export`."""

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from toolkit.cli.unread import refuse_changed

OwnModules = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(name="import")]


def import_modules(names: tuple[str, ...]) -> None:
    """Import modules of the working folder, which register mixers or optimisers."""
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        importlib.import_module(name)


def _opened(directory: Path, tokenizer: Path | None) -> tuple[Any, Any, Any, Path]:
    """The model of a folder, file or name, its tokenizer (the given one, or the one stored with
    it), its special tokens, and where it lies."""
    from toolkit.language import (
        find_special_tokens,
        find_tokenizer,
        load_language_model,
        load_tokenizer,
    )
    from toolkit.language.load import is_published
    from toolkit.looped import checkpoint_folder

    if is_published(directory):
        directory = checkpoint_folder(directory)
    model = load_language_model(directory)
    words = find_tokenizer(directory) if tokenizer is None else load_tokenizer(tokenizer)
    return model, words, find_special_tokens(directory), directory


def generate(
    directory: Annotated[Path, tyro.conf.Positional],
    prompt: str = "The ",
    length: int = 256,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    tokenizer: Path | None = None,
    imports: OwnModules = (),
) -> None:
    """Continue a prompt with a model trained by `toolkit train` or by the tour, or a published one.

    Args:
        directory: the run's folder, a file written by `toolkit export`, the folder of a Hugging
            Face checkpoint, or its "owner/name" on the Hub.
        prompt: the text to continue; "" if the tokenizer has a token that starts a text.
        length: number of bytes, or tokens, to write.
        temperature: 0 for the likeliest byte every time.
        top_k: sample among the k likeliest bytes only.
        top_p: sample among the likeliest bytes with this share of the probability.
        min_p: sample among bytes of at least this share of the largest probability.
        repetition_penalty: make bytes of the text so far less likely by this factor.
        seed: seed of the sampling.
        tokenizer: the model's tokenizer.json; by default the one stored with it.
        imports: a module of your own that registers the model's mixers (repeatable).
    """
    import_modules(imports)
    from toolkit.language import stream_text

    model, words, special, _ = _opened(directory, tokenizer)
    pieces = stream_text(
        model,
        prompt,
        length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        tokenizer=words,
        special=special,
    )
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def serve(
    directory: Annotated[Path, tyro.conf.Positional],
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    slots: int = 8,
    capacity: int = 1024,
    page: int = 64,
    pages: int | None = None,
    queue: int = 64,
    body_bytes: int = 1 << 20,
    sparse: str | None = None,
    exit: str | None = None,
    grace: int = 30,
    tokenizer: Path | None = None,
    imports: OwnModules = (),
) -> None:
    """Serve a model over HTTP in the protocol of OpenAI's completions and chat (extra `serve`).

    Args:
        directory: what `toolkit generate` reads.
        host: the address to listen on; other machines reach only one that is not of this machine
            alone, such as 0.0.0.0, and there is no password.
        port: the port; 0 takes a free one.
        name: what clients call the model (none: the folder's or file's name).
        slots: requests that write together.
        capacity: most tokens of a request, prompt and answer.
        page: tokens of a page, and of the largest piece in which prompts are read.
        pages: pages of cache shared by all requests, and by prompts with the same beginning (none:
            every slot has its full capacity).
        queue: requests that may wait; the next is answered with status 429.
        body_bytes: longest body that is accepted.
        sparse: how steps read the cache, such as "tactic:mass=0.9".
        exit: when a token stops looping, such as "gate:0.9".
        grace: seconds that requests have to end after SIGTERM or Ctrl-C.
        tokenizer: the model's tokenizer.json; by default the one stored with it.
        imports: a module of your own that registers the model's mixers (repeatable).
    """
    import_modules(imports)
    try:
        from toolkit.serving.endpoint.server import run
    except ImportError as error:
        raise ImportError(f"{error.name} is missing: pip install 'mlsys-toolkit[serve]'") from None
    from toolkit.language.tokens import check_vocabulary
    from toolkit.serving import Engine
    from toolkit.serving.endpoint.text import Words, find_template

    name = name or directory.stem
    model, words_of, special, directory = _opened(directory, tokenizer)
    check_vocabulary(words_of, model.config.vocabulary)
    engine = Engine(
        model, slots=slots, capacity=capacity, page=page, pages=pages, sparse=sparse, exit=exit
    )
    words = Words(words_of, special, *find_template(directory))
    run(
        engine, words, name=name, host=host, port=port, longest_queue=queue,
        most_bytes=body_bytes, grace_seconds=grace,
    )  # fmt: skip


def evaluate(
    directory: Annotated[Path, tyro.conf.Positional],
    tasks: Annotated[tuple[str, ...], tyro.conf.Positional] = ("needle", "recall", "associative"),
    rows: int = 100,
    size: int = 16,
    seed: int = 0,
    batch: int = 8,
    window: int = 2048,
    results: Path | None = None,
    tokenizer: Path | None = None,
    imports: OwnModules = (),
) -> None:
    """Score a model on tasks, without a network, by the metrics of lm-evaluation-harness.

    Args:
        directory: what `toolkit generate` reads.
        tasks: files of rows (JSONL, see `toolkit.language.evaluation.read_task`), or tasks that are
            drawn here: needle, recall, associative.
        rows: rows of each task that is drawn.
        size: sentences, pairs or words of a row that is drawn.
        seed: of what is drawn.
        batch: texts computed together.
        window: most tokens that are predicted together; contexts lose their beginning.
        results: a folder to keep what was computed, so that the same command goes on after a stop.
        tokenizer: the model's tokenizer.json; by default the one stored with it.
        imports: a module of your own that registers the model's mixers (repeatable).
    """
    import_modules(imports)
    from toolkit.language import evaluation
    from toolkit.language.evaluation.rows import DRAWN

    if not {*tasks} & {*DRAWN}:
        own = {"rows": rows, "size": size, "seed": seed}
        refuse_changed(evaluate, own, "with files of rows alone, which are read as they are")
    asked = {
        task: [*evaluation.drawn_rows(task, size, rows, seed)]
        if task in DRAWN
        else evaluation.read_task(Path(task))
        for task in tasks
    }
    model, words, special, _ = _opened(directory, tokenizer)
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
    print(f"{'task':<24} {'rows':>6}  {'metric':<16} {'measured here':>13}  standard error")
    for task, rows_of_task in asked.items():
        name = Path(task).stem if task not in DRAWN else f"{task}-{size}-{rows}-{seed}"
        found = evaluation.evaluate(
            model, rows_of_task, tokenizer=words, special=special, batch=batch, window=window,
            results=None if results is None else results / f"{name}.jsonl", show_progress=True,
        )  # fmt: skip
        for metric, value in found.metrics.items():
            error = f"{found.errors[metric]:.4f}" if metric in found.errors else ""
            print(f"{name:<24} {found.rows:>6}  {metric:<16} {value:>13.4f}  {error}".rstrip())


def export(
    directory: Annotated[Path, tyro.conf.Positional],
    file: Annotated[Path, tyro.conf.Positional],
    dtype: Literal["float32", "float16", "bfloat16"] = "float16",
    style: str | None = None,
    imports: OwnModules = (),
) -> None:
    """Write a trained model to one file, with the record of its training beside it.

    Args:
        directory: the run's folder.
        file: the file to write, ending in .safetensors; with --style a new folder.
        dtype: type of the stored numbers.
        style: write a folder that Hugging Face transformers reads, with its tokenizer: "qwen3" or
            another model_type that can express the model (docs/models.md lists them).
        imports: a module of your own that registers the model's mixers (repeatable).
    """
    import json

    import_modules(imports)
    from toolkit.language import export_language_model

    path, record = export_language_model(directory, file, dtype=dtype, style=style)
    size = json.loads(record.read_text())["result"]["size_bytes"]
    print(f"{path}: {size:,} bytes; its record: {record}")
    print(f'Go on with:  toolkit generate {path} --prompt "The "')


def enable_compilation_cache(folder: Path | None = None) -> None:
    """Keep compiled programs in a folder, by default the user's."""
    # A second run of the same command starts in a quarter of the time.
    import jax

    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    jax.config.update("jax_compilation_cache_dir", str(folder or home / "mlsys-toolkit" / "xla"))


def keep_no_programs() -> None:
    """Write no compiled program from now on; what was written is read as before."""
    import jax

    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
