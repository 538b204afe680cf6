"""Training of a looped language model on text.

A run is a folder: `run.json` (settings, the corpus with its files and hash, the environment),
`metrics.jsonl`, and `checkpoints/`.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from toolkit._checks import checked
from toolkit.language.load import parts_of
from toolkit.language.losses import loss_and_bias, loss_of_parts, loss_of_recursion
from toolkit.language.record import configuration_of, describe_run, shorter_runs
from toolkit.language.run import TrainedModel, TrainingRun, bits_per_byte
from toolkit.language.start import (
    corpora_of,
    first_model,
    mixed_batches,
    planned_parameters,
    text_corpus,
)
from toolkit.language.tokens import (
    bytes_per_token,
    check_vocabulary,
    find_tokenizer,
    load_tokenizer,
    tokenizer_beside,
)
from toolkit.looped import checkpoint_folder, parameter_count
from toolkit.parallel import Layout, make_mesh
from toolkit.parallel import layout as layout_of
from toolkit.training import (
    Corpus,
    FitOptions,
    ProgramForm,
    TrainState,
    evaluation_batches,
    evaluation_params,
    fit,
    make_evaluation,
    make_train_step,
    sample_batch,
    search_rate,
    token_batches,
)

LOG_EVERY, EVALUATION_BATCHES = 10, 4


@checked
def train_language_model(
    run: TrainingRun, directory: Path, *,
    corpus: Corpus | None = None, tokenizer: Any = None, extend: bool = False,
    stop: Callable[[], bool] | None = None,
    callback: Callable[[dict[str, Any]], None] | None = None, is_progress_shown: bool = True,
    profile: tuple[int, int] | None = None,
    form: ProgramForm | None = None,
) -> TrainedModel:  # fmt: skip
    """Train the run in a folder, or resume it.

    Args:
        run: what to train.
        directory: the run's folder; made if missing, resumed if it holds this run.
        corpus: the text, when it is loaded already; None loads `run.text`.
        tokenizer: made by `load_tokenizer`; text becomes its tokens, in the run's folder, where it
            is stored. None: text is bytes, and a token array is that of the tokenizer that
            `write_tokens` left beside it.
        extend: whether a run that is in the folder with fewer steps is continued, with its last
            state; its schedule is from there on that of the longer run.
        stop: called regularly; True saves and returns.
        callback: called with every metrics row.
        is_progress_shown: whether to draw the progress bar.
        profile: (first, last): trace the updates after step `first` up to step `last`, into the
            folder `profile` of the run's.
        form: a plan's program to train by, such as `toolkit.planning.load_plan("plan.json").form()`
            returns; its layout takes the place of the run's.

    Returns:
        The trained model and its history.

    Raises:
        CorpusError: when the text cannot be used.
        CheckpointError: when the folder holds another run, or the disk is too full.
        DivergedError: when the loss stops being finite.

    Cost: 6 FLOPs per parameter, loop and byte, plus the mixers' own. Under a layout, the
        collectives that `toolkit.parallel` lists for it.

    Example:
        >>> from toolkit.looped import LoopedConfig
        >>> run = TrainingRun(LoopedConfig.tiny("window"), steps=1, batch=1, sequence_length=8)
        >>> trained = train_language_model(run, "run", is_progress_shown=False)
        >>> [row["step"] for row in trained.history]
        [1]
    """
    start = None if run.init_from is None else checkpoint_folder(run.init_from)
    if start is not None:
        tokenizer = tokenizer or find_tokenizer(start)
    if tokenizer is not None:
        check_vocabulary(tokenizer, run.config.vocabulary)
    corpora = [corpus] if corpus else corpora_of(run, Path(directory), tokenizer)
    kinds = {corpus.tokens.dtype == np.uint8 for corpus in corpora}
    if len(kinds) > 1:
        raise ValueError("text: got text beside token arrays; wanted all of one kind")
    is_text = kinds == {True}  # small, and so replicated
    largest = max(int(corpus.tokens.max()) for corpus in corpora) if is_text else 0
    if largest >= run.config.vocabulary:
        raise ValueError(
            f"config.vocabulary must be more than {largest}, a byte of the text; got "
            f"{run.config.vocabulary}"
        )
    tokenizer = None if is_text else tokenizer or _tokenizer_beside(run)
    train, held_out = zip(*(corpus.split() for corpus in corpora), strict=True)
    validation = None
    if run.validation is not None:
        validation = text_corpus((run.validation,))
        if (validation.tokens.dtype == np.uint8) != is_text:
            raise ValueError(
                f"validation: {run.validation!r} and the text must both be text, or both tokens"
            )
        train, held_out = [corpora[0].tokens], [validation.tokens]
    passes = run.passes(_data_devices(run))
    windows = run.batch // passes, run.sequence_length, EVALUATION_BATCHES * passes
    evaluation = [evaluation_batches(part, *windows) for part in held_out]
    shares = np.array(run.weights or [1.0]) / sum(run.weights or [1.0])
    per_token = 1.0 if is_text else None
    if tokenizer is not None:
        lengths = [bytes_per_token(tokenizer, np.asarray(targets)) for _, targets in evaluation]
        per_token = float(shares @ lengths)
    if form is None:
        graph, params, bias, layout = _placed_parameters(run)
    else:
        graph, params, bias, layout = planned_parameters(run, form)
    optimizer = run.make_optimizer(form)
    exchange = run.exchange_plan(layout) if form is None else form.exchange
    state = TrainState.create(params, optimizer, bias, exchange)
    if layout is not None:  # moments may have another sharding
        state = layout.apply(state) if form is None else form.placed(state)
    has_experts = "moe" in run.config.feed_forward_words
    parts: dict[str, Any] = {"chunks": run.loss_chunks, "block_chunks": run.block_chunks}
    is_scanned = layout is None and jax.default_backend() != "cpu"  # why: `looped.scanned`
    parts["scan_layers"] = is_scanned if run.scan_layers is None else run.scan_layers
    evaluated = loss = partial(loss_of_parts, graph, **parts)
    if run.config.recursion is not None:
        loss = partial(loss_of_recursion, graph, **parts)
    if has_experts:
        parts |= {"balance": run.balance, "router_z": run.router_z}
        loss = partial(loss_of_parts, graph, **parts)
    if bias is not None:
        loss = partial(loss_and_bias, graph, bias_rate=run.bias_rate, **parts)
    if form is not None:
        loss = evaluated = form.loss
    evaluated = layout.bind(evaluated) if layout else evaluated
    if layout is not None and exchange is None:  # a replica's own gradient knows no layout
        loss = layout.bind(loss)
    sample = partial(sample_batch, seed=run.seed, batch=run.batch, time=run.sequence_length)
    batch_sharding = layout.batch_sharding if layout else None
    everywhere = NamedSharding(layout.mesh, PartitionSpec()) if layout else None
    configuration = configuration_of(run, corpora, validation)
    shorter = shorter_runs(configuration, Path(directory), extend)
    describe_run(configuration, shorter, corpora, Path(directory), tokenizer, per_token, start)
    # Eight evaluations a run, each at the end of a whole logging interval.
    interval = max(1, run.steps // (8 * LOG_EVERY)) * LOG_EVERY
    options = FitOptions(
        total_steps=run.steps,
        log_every=LOG_EVERY,
        eval_every=run.evaluate_every or interval,
        checkpoint_every=run.checkpoint_every or interval,
        checkpoint_minutes=run.checkpoint_minutes,
        keep=run.keep,
        tokens_per_step=run.batch * run.sequence_length,
        is_progress_shown=is_progress_shown,
        profile=profile,
    )
    data: Any = None
    if run.weights is not None:
        data = mixed_batches(run, train, batch_sharding)
        sample = data.sample
    elif is_text:
        data = jax.device_put(train[0], everywhere)
    else:
        data = token_batches(
            train[0],
            seed=run.seed,
            batch=run.batch,
            time=run.sequence_length,
            sharding=batch_sharding,
            vocabulary=run.config.vocabulary,
        )
        sample = data.sample
    kept: dict[str, Any] = {
        "directory": directory,
        "configuration": configuration,
        "evaluate": _evaluation(
            evaluated, jax.device_put(evaluation, everywhere), per_token, corpora, shares
        ),
        "stop": stop,
        "callback": callback,
    }
    how: dict[str, Any] = {"sample": sample, "batch_sharding": batch_sharding}
    if run.learning_rate == "search" and (not is_text or run.weights is not None):
        raise ValueError(
            "learning_rate: got 'search', which wants text without weights; give a rate"
        )
    if run.learning_rate == "search":
        result = search_rate(loss, optimizer, state, data, options, **how, **kept)
    else:
        how |= {"accumulate": passes, "exchange": exchange}
        step = make_train_step(loss, optimizer, most_steps=LOG_EVERY, **how)
        result = fit(state, step, data, options, former=shorter, form=form, **kept)
    params, bias = evaluation_params(result.state), result.state.model_state
    if form is not None:
        params = jax.jit(form.unpack)(params)
    if run.layout == "single" and run.cores > 1:
        # Uncommitted, so that generation may use one core or all of them.
        params, bias = jax.tree.map(jnp.asarray, jax.device_get((params, bias)))
    return TrainedModel(
        model=nnx.merge(graph, params, *(() if bias is None else (bias,))),
        step=int(result.state.step),
        parameters=parameter_count(run.config),
        history=result.history,
        stopped_by=result.stopped_by,
        bytes_per_token=per_token,
    )


def _tokenizer_beside(run: TrainingRun) -> Any:
    """The tokenizer beside the run's token arrays, if any."""
    texts = [run.text] if isinstance(run.text, str) else run.text
    files = [file for text in texts if (file := tokenizer_beside(text)).is_file()]
    if len({file.read_bytes() for file in files}) > 1:
        raise ValueError(f"text: got arrays of other tokenizers ({', '.join(map(str, files))})")
    if not files:
        return None
    tokenizer = load_tokenizer(files[0])
    check_vocabulary(tokenizer, run.config.vocabulary)
    return tokenizer


def _evaluation(
    loss: Callable, batches: list[Any], per_token: float | None, corpora: list[Corpus],
    shares: np.ndarray,
) -> Callable[..., dict[str, float]]:  # fmt: skip
    """The held-out loss in nats per token, in bits per byte if possible, and of each text."""
    mean_losses = [make_evaluation(loss, part) for part in batches]

    def evaluate(*parts: Any) -> dict[str, float]:
        losses = [mean_loss(*parts) for mean_loss in mean_losses]
        row = {"evaluation_loss": float(shares @ losses)}
        if per_token is not None:
            row["evaluation_bits_per_byte"] = bits_per_byte(row["evaluation_loss"], per_token)
        if len(losses) > 1:
            row |= {
                f"evaluation_loss of {corpus.name}": loss
                for corpus, loss in zip(corpora, losses, strict=True)
            }
        return row

    return evaluate


def _placed_parameters(run: TrainingRun) -> tuple[nnx.GraphDef, Any, Any, Layout | None]:
    """The first parameters, sharded as the run's layout says, and the choice biases if any."""
    graph, params, bias = parts_of(first_model(run))
    if run.layout == "single" and run.cores == 1 and jax.process_count() == 1:
        return graph, params, bias, None
    if run.layout == "single" and jax.process_count() > 1:
        raise ValueError(
            f"layout: got 'single', and this job has {jax.process_count()} processes; "
            "wanted a layout over all devices, such as 'data' or 'zero3'"
        )
    shared = {"model": run.tensor_devices, "context": run.context_devices}
    used = {axis: size for axis, size in shared.items() if size > 1}  # at most one, see TrainingRun
    axes = {"data": _data_devices(run), **used}
    scheme = "data" if run.layout == "single" else run.layout
    layout = layout_of(params, make_mesh(axes, devices=_devices(run)), scheme)
    return graph, layout.apply(params), bias, layout


def _devices(run: TrainingRun) -> list[jax.Device]:
    if run.layout != "single":
        return jax.devices()
    devices = jax.devices()[: run.cores]
    if len(devices) < run.cores:
        raise ValueError(f"cores: got {run.cores}, and jax has {len(devices)}; see use_cores")
    return devices


def _data_devices(run: TrainingRun) -> int:
    """Devices, or groups of them, that each compute their own part of a batch."""
    devices = len(_devices(run))
    for name in ("tensor", "context"):
        if devices % (size := getattr(run, f"{name}_devices")):
            raise ValueError(f"{name}_devices: got {size}, wanted a divisor of {devices} devices")
    return devices // (run.tensor_devices * run.context_devices)
