"""The commands `toolkit generate`, `toolkit serve` and `toolkit export`."""

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

OwnModules = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(name="import")]


def import_modules(names: tuple[str, ...]) -> None:
    """Import modules of the working folder, which register mixers or optimisers."""
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        importlib.import_module(name)


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
    from toolkit.language import (
        find_special_tokens,
        find_tokenizer,
        load_language_model,
        load_tokenizer,
        stream_text,
    )
    from toolkit.language.load import is_published
    from toolkit.looped import checkpoint_folder

    if is_published(directory):
        directory = checkpoint_folder(directory)
    model = load_language_model(directory)
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
        tokenizer=find_tokenizer(directory) if tokenizer is None else load_tokenizer(tokenizer),
        special=find_special_tokens(directory),
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
    from toolkit.language import (
        find_special_tokens,
        find_tokenizer,
        load_language_model,
        load_tokenizer,
    )
    from toolkit.language.load import is_published
    from toolkit.language.tokens import check_vocabulary
    from toolkit.looped import checkpoint_folder
    from toolkit.serving import Engine
    from toolkit.serving.endpoint.text import Words, find_template

    name = name or directory.stem
    if is_published(directory):
        directory = checkpoint_folder(directory)
    model = load_language_model(directory)
    words_of = find_tokenizer(directory) if tokenizer is None else load_tokenizer(tokenizer)
    check_vocabulary(words_of, model.config.vocabulary)
    engine = Engine(
        model, slots=slots, capacity=capacity, page=page, pages=pages, sparse=sparse, exit=exit
    )
    words = Words(words_of, find_special_tokens(directory), *find_template(directory))
    run(
        engine, words, name=name, host=host, port=port, longest_queue=queue,
        most_bytes=body_bytes, grace_seconds=grace,
    )  # fmt: skip


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
