"""The commands `toolkit train`, `generate` and `export`."""

import inspect
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro


def train(
    directory: Annotated[Path, tyro.conf.Positional],
    pattern: str = "gdn gdn gdn full",
    feed_forwards: str = "swiglu",
    loops: int = 2,
    width: int = 128,
    heads: int = 4,
    sliding_window: int = 64,
    attention_output_gate: bool = False,
    balance: float = 0.01,
    router_z: float = 0.0,
    bias_rate: float = 0.0,
    init_from: str | None = None,
    steps: int = 1000,
    batch: int = 16,
    sequence_length: int = 256,
    learning_rate: float | Literal["search"] = 3e-3,
    dtype: Literal["float32", "bfloat16"] = "float32",
    text: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = (),
    corpus: Literal["prose", "code"] = "prose",
    seed: int = 0,
    layout: str = "single",
    tensor_devices: int = 1,
    context_devices: int = 1,
    loss_chunks: int = 1,
    block_chunks: int = 1,
    simulated_devices: int = 1,
    cores: int | None = None,
    checkpoint_every: int | None = None,
    checkpoint_minutes: float | None = None,
    processes: int | None = None,
    profile: str | None = None,
    vocabulary: int = 256,
    tokenizer: Path | None = None,
) -> None:
    """Train a looped language model on text; run again to resume.

    Args:
        directory: the run's folder: checkpoints, metrics.jsonl and config.json.
        pattern: the physical layers in order, e.g. "gdn gdn gdn full".
        feed_forwards: "swiglu", "moe" (a mixture of 8 experts, of which a token passes 2), or one
            of them per layer.
        loops: how many times the stack of layers is applied.
        width: the width of the residual stream.
        heads: attention heads.
        sliding_window: bytes a "window" layer sees.
        attention_output_gate: gate the outputs of the heads of "full" and "window" layers.
        balance: weight of the loss that evens the loads of experts.
        router_z: weight of the loss that keeps the routers' logits small.
        bias_rate: even the loads of experts without a loss, by biases that each step moves by so
            much; 1e-3 in DeepSeek-V3, with --balance 0.
        init_from: continue a published checkpoint, its folder or "owner/name", with its tokenizer;
            the options of the model's architecture are then its own.
        steps: total training steps, including those of a search's candidates.
        batch: sequences per step.
        sequence_length: bytes per sequence.
        learning_rate: peak rate of the warm-up and cosine schedule; or "search", to find a
            schedule while training.
        dtype: the precision of activations; parameters stay float32.
        text: a file or folder to train on (repeatable), or one token array (.npy).
        corpus: the text used when none is given: the language manual's prose or the
            standard library's source.
        seed: seed of the initialisation and of the order of the data.
        layout: "single" device; or all of them: "data" parallel, "zero1", "zero2", "zero3" (fully
            sharded), "tensor", "ring", "zigzag" or "ulysses" (these shard time), or two joined by
            "+".
        tensor_devices: devices that share the heads and hidden sizes under "tensor".
        context_devices: devices that share each sequence under "ring", "zigzag" or "ulysses".
        loss_chunks: parts of each sequence whose logits are computed one after the other: less
            memory.
        block_chunks: pieces of each sequence in the backward pass of every layer: less memory, a
            third more work.
        simulated_devices: number of simulated CPU devices, to try a layout out.
        cores: cores of a CPU that share every batch; by default those of a resumed run, or the
            largest available number that divides the batch.
        checkpoint_every: steps between checkpoints; by default an eighth of the run.
        checkpoint_minutes: also save when so many minutes have passed since the last checkpoint.
        processes: number of processes that the cluster's launcher starts; not needed under `toolkit
            launch`.
        profile: trace the updates between two steps, as in 10:13, into the run's folder; open the
            trace with `xprof` or at ui.perfetto.dev.
        vocabulary: number of tokens, if they are not bytes.
        tokenizer: the tokenizer.json of a token array; by default the one that
            `toolkit.language.write_tokens` wrote beside the array.
    """
    from toolkit.language.cores import run_cores
    from toolkit.parallel import join_processes, simulate_devices, use_cores

    shared = 1
    if simulated_devices != 1:
        simulate_devices(simulated_devices)
    count = join_processes(processes)
    if count > 1:
        enable_compilation_cache(directory / "programs")  # which all hosts see
    elif simulated_devices == 1 and layout == "single":
        shared = use_cores(run_cores(directory, batch) if cores is None else cores)
    import jax

    from toolkit.language import TrainingRun, load_tokenizer, train_language_model
    from toolkit.looped import LoopedConfig, load_checkpoint
    from toolkit.training.profile import parsed_steps

    options: dict[str, Any] = {
        "full": {"output_gate": attention_output_gate},
        "window": {"output_gate": attention_output_gate, "sliding_window": sliding_window},
    }
    if bias_rate and "moe" in feed_forwards.split():
        options["moe"] = {"choice_bias": True}
    config = LoopedConfig.tiny(
        pattern=pattern,
        feed_forwards=feed_forwards,
        loops=loops,
        width=width,
        heads=heads,
        options=options,
        dtype=dtype,
        vocabulary=vocabulary,
    )
    if init_from is not None:
        own = {"pattern": pattern, "feed_forwards": feed_forwards, "loops": loops, "width": width}
        own |= {"heads": heads, "sliding_window": sliding_window, "vocabulary": vocabulary}
        own["attention_output_gate"] = attention_output_gate
        for name, given in own.items():
            if given != inspect.signature(train).parameters[name].default:
                raise ValueError(f"{name}: got {given!r} with init_from, whose model has its own")
        config = load_checkpoint(init_from, dtype=dtype).config
    run = TrainingRun(
        config=config,
        text=tuple(str(path) for path in text) or corpus,
        steps=steps,
        batch=batch,
        sequence_length=sequence_length,
        learning_rate=learning_rate,
        balance=balance,
        router_z=router_z,
        bias_rate=bias_rate,
        init_from=init_from,
        seed=seed,
        layout=layout,
        tensor_devices=tensor_devices,
        context_devices=context_devices,
        loss_chunks=loss_chunks,
        block_chunks=block_chunks,
        cores=shared,
    )
    result = train_language_model(
        run,
        directory,
        tokenizer=None if tokenizer is None else load_tokenizer(tokenizer),
        checkpoint_every=checkpoint_every,
        checkpoint_minutes=checkpoint_minutes,
        profile=parsed_steps(profile),
    )
    if result.stopped_by is not None:
        sys.exit(130)  # what was saved, and how to go on, has been said
    if jax.process_index():
        return
    print(f"\nheld-out loss {result.loss_in_words} after {result.step} steps")
    if result.bytes_per_token is not None:
        print(f'Go on with:  toolkit generate {directory} --prompt "The "')
    else:
        print(f"Go on with:  toolkit generate {directory} --tokenizer FILE")


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
    """
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


def export(
    directory: Annotated[Path, tyro.conf.Positional],
    file: Annotated[Path, tyro.conf.Positional],
    dtype: Literal["float32", "float16", "bfloat16"] = "float16",
) -> None:
    """Write a trained model to one file, with the record of its training beside it.

    Args:
        directory: the run's folder.
        file: the file to write, ending in .safetensors.
        dtype: type of the stored numbers.
    """
    from toolkit.language import export_language_model

    path, record = export_language_model(directory, file, dtype=dtype)
    print(f"{path}: {path.stat().st_size:,} bytes; its record: {record}")
    print(f'Go on with:  toolkit generate {path} --prompt "The "')


def enable_compilation_cache(folder: Path | None = None) -> None:
    """Keep compiled programs in a folder, by default the user's."""
    # A second run of the same command starts in a quarter of the time.
    import jax

    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    jax.config.update("jax_compilation_cache_dir", str(folder or home / "mlsys-toolkit" / "xla"))
