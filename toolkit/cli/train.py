"""The command `toolkit train`: its options are the fields of the dataclasses of training."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from toolkit.cli.language import (
    OwnModules,
    enable_compilation_cache,
    import_modules,
    keep_no_programs,
)


@dataclasses.dataclass(frozen=True)
class Start:
    """How the command starts, beside the options of the run.

    Attributes:
        config: a TOML file of options, or a Python file that defines `options`, a dictionary.
        preset: a model by name, such as lt2-hybrid-1.3b.
        set: one more option, as in looped.window.sliding_window=128 or b2=0.99 (repeatable).
        extend: train the finished run in the folder on to this total of steps, with its options.
        imports: a module of your own that registers mixers or optimisers (repeatable).
        print_config: only print all options, as such a file.
        text: a file or folder to train on (repeatable), or a token array (.npy); with --weights,
            several of either.
        corpus: the text used when none is given: the language manual's prose or the standard
            library's source.
        tokenizer: a tokenizer.json, of whose tokens the text is made; without it text is bytes, and
            a token array has the one that `toolkit.language.write_tokens` wrote beside it.
        plan: run this plan, written by `toolkit plan --save`, as it is: its model, batch, layout
            and pipeline.
        sliding_window: bytes a "window" layer sees.
        attention_output_gate: gate the outputs of the heads of "full" and "window" layers.
        simulated_devices: number of simulated CPU devices, to try a layout out.
        cores: cores of a CPU that share every batch; by default those of a resumed run, or the
            largest available number that divides the batch.
        processes: number of processes that the cluster's launcher starts; not needed under `toolkit
            launch`.
        profile: trace the updates between two steps, as in 10:13, into the run's folder; open the
            trace with `xprof` or at ui.perfetto.dev.
    """

    config: Path | None = None
    preset: str | None = None
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    extend: int | None = None
    imports: OwnModules = ()
    print_config: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    text: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    corpus: Literal["prose", "code"] = "prose"
    tokenizer: Path | None = None
    plan: Path | None = None
    sliding_window: int | None = None
    attention_output_gate: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    simulated_devices: int = 1
    cores: int | None = None
    processes: int | None = None
    profile: str | None = None


def train(directory: Annotated[Path, tyro.conf.Positional], **given: Any) -> None:
    """Train a looped language model on text; run again to resume.

    Args:
        directory: the run's folder: checkpoints, metrics.jsonl and run.json.
        given: options of the run, of its model and of `Start`; toolkit train --help describes them.
    """
    names = [field.name for field in dataclasses.fields(Start)]
    start = Start(**{name: given.pop(name) for name in names if name in given})
    import_modules(start.imports)
    from toolkit.cli.options import as_toml, model_of, settings_of

    values = _values(directory, start, given)
    planned = None if start.plan is None else _planned(start.plan, values, given)
    settings = settings_of(values)
    cores = values.get("cores") if start.cores is None else start.cores
    shared = _devices(directory, start, settings, cores)
    import jax

    from toolkit.language import TrainingRun, load_tokenizer, train_language_model
    from toolkit.language.load import model_to_start_from
    from toolkit.training.profile import parsed_steps

    table, published = values.get("looped", {}), settings.get("init_from")
    if planned is not None:
        config = planned.config
    elif published is None:
        config = model_of(table, values.get("preset"))
    else:
        if own := [name for name in table if name not in ("dtype", "remat")]:
            raise ValueError(
                f"{own[0]}: got {table[own[0]]!r} with init_from, whose model has its own"
            )
        config = model_to_start_from(published, **table).config
    _refuse_unread(start, values, config)
    text = values.get("text", start.corpus)
    text = text if isinstance(text, str) else tuple(text)
    run = TrainingRun(config, text=text, cores=shared, **settings)
    if start.print_config:
        facts = dataclasses.asdict(run)
        model = facts.pop("config")
        print(as_toml({**facts, "looped": model | model.pop("options")}), end="")
        return
    result = train_language_model(
        run,
        directory,
        tokenizer=None if start.tokenizer is None else load_tokenizer(start.tokenizer),
        extend=start.extend is not None,
        profile=parsed_steps(start.profile),
        form=None if planned is None else planned.form(),
    )
    if result.stopped_by is not None:
        sys.exit(130)  # what was saved, and how to go on, has been said
    if jax.process_index():
        return
    print(f"\nheld-out loss {result.loss_in_words} after {result.step} steps")
    if result.bytes_per_token == 1 and config.vocabulary > 256:
        print(
            f"The model has {config.vocabulary:,} tokens and has read bytes, so that it writes no "
            "text; to write some, train one with --tokenizer FILE, or with --vocabulary 256"
        )
    elif result.bytes_per_token is not None:
        print(f'Go on with:  toolkit generate {directory} --prompt "The "')
    else:
        print(f"Go on with:  toolkit generate {directory} --tokenizer FILE")


def train_command() -> Callable[..., None]:
    """`train` with one flag per option, for tyro."""
    from toolkit.cli.options import MODEL_FLAGS, flags_of
    from toolkit.language.settings import TrainingSettings
    from toolkit.looped import LoopedConfig

    options = tuple(field.name for field in dataclasses.fields(TrainingSettings))
    fields = [
        *flags_of(LoopedConfig, MODEL_FLAGS, LoopedConfig.tiny("gdn gdn gdn full", loops=2)),
        *flags_of(TrainingSettings, options, TrainingSettings()),
    ]
    run = dataclasses.make_dataclass("Run", fields)

    def command(
        directory: Annotated[Path, tyro.conf.Positional],
        start: Annotated[Start, tyro.conf.arg(name="")],
        run: Annotated[run, tyro.conf.arg(name="")],  # pyright: ignore[reportInvalidTypeForm]
    ) -> None:
        values = vars(run).items()
        given = {name: value for name, value in values if value is not None and value is not False}
        train(directory, **vars(start), **given)

    command.__doc__ = train.__doc__ and train.__doc__.partition("        given:")[0]
    return command


def _values(directory: Path, start: Start, given: dict[str, Any]) -> dict[str, Any]:
    """All options as nested tables: the flags over --set, over the file, over the defaults."""
    from toolkit.cli.options import MODEL_FLAGS, merged, parsed_settings, read_options

    values: dict[str, Any] = {"looped": {"pattern": "gdn gdn gdn full", "loops": 2}}
    file = merged(read_options(start.config), parsed_settings(start.set))
    preset = start.preset or file.get("preset")
    if preset is not None or "init_from" in {*file, *given}:
        values = {"looped": {}}
    if start.extend is not None:
        values = stored_options(directory)
    values = merged(values, file)
    flags: dict[str, Any] = {"looped": {}}
    for name, value in given.items():
        (flags["looped"] if name in MODEL_FLAGS else flags)[name] = value
    layers = {"output_gate": True} if start.attention_output_gate else {}
    seen = {} if start.sliding_window is None else {"sliding_window": start.sliding_window}
    for word, options in (("full", layers), ("window", layers | seen)):
        if options:
            flags["looped"][word] = options
    if start.text:
        flags["text"] = [str(path) for path in start.text]
    flags |= {} if preset is None else {"preset": preset}
    flags |= {} if start.extend is None else {"steps": start.extend}
    values = merged(values, flags)
    if values.get("bias_rate") and "moe" in values["looped"].get("feed_forwards", "").split():
        values = merged({"looped": {"moe": {"choice_bias": True}}}, values)
    return values


def _refuse_unread(start: Start, values: dict[str, Any], config: Any) -> None:
    """Refuse options that this run would not read."""
    from toolkit.cli.options import parsed_settings
    from toolkit.looped.mixing import LAYERS

    words = {*config.prelude_layers, *config.layers, *config.coda_layers}
    asked = {*parsed_settings(start.set).get("looped", {})} & {*LAYERS}
    asked |= set() if start.sliding_window is None else {"window"}
    if start.attention_output_gate and not words & {"full", "window"}:
        asked |= {"full"}
    for word in sorted(asked - words):
        raise ValueError(
            f"{word}: got options of it, and the pattern {config.pattern!r} has no such layer"
        )
    if start.corpus != "prose" and "text" in values:
        raise ValueError(f"corpus: got {start.corpus!r} beside text; wanted one of the two")
    is_single = values.get("layout", "single") == "single" and start.plan is None
    if is_single and start.simulated_devices != 1:
        raise ValueError(
            f"simulated_devices: got {start.simulated_devices} with layout 'single', which has "
            "one; wanted a layout, such as --layout data"
        )
    if not is_single and start.cores is not None:
        raise ValueError(f"cores: got {start.cores} with a layout or a plan, which has devices")


def _planned(path: Path, values: dict[str, Any], given: dict[str, Any]) -> Any:
    """The plan in a file, whose batch and lengths become those of the run."""
    from toolkit.cli.options import MODEL_FLAGS
    from toolkit.planning import load_plan

    saved = load_plan(path)
    named = given | {name: values[name] for name in ("preset", "init_from") if name in values}
    for name in (*MODEL_FLAGS, "preset", "init_from"):
        if name in named:
            raise ValueError(f"{name}: got {named[name]!r} with --plan, which has its own model")
    for name in ("batch", "sequence_length"):
        wanted = getattr(saved, name)
        if values.get(name, wanted) != wanted:
            raise ValueError(f"{name}: got {values[name]}, and the plan is for {wanted}")
        values[name] = wanted
    if saved.exchange is not None:
        values["exchange"] = saved.exchange
    return saved


def stored_options(directory: Path) -> dict[str, Any]:
    """The options of the run in a folder."""
    from toolkit.language.cores import read_run

    if not (directory / "run.json").is_file():
        raise ValueError(f"extend: {str(directory)!r} holds no run.json; wanted a finished run")
    stored = read_run(directory)["configuration"]
    if stored["training"]["init_from"] is not None:
        model = {name: stored["model"][name] for name in ("dtype", "remat")}
    else:
        model = stored["model"]
    return stored["training"] | {"looped": model}


def _devices(directory: Path, start: Start, settings: dict[str, Any], cores: Any) -> int:
    """Join the processes, or share out the cores of this machine; returns their number."""
    from toolkit.language.cores import run_cores
    from toolkit.parallel import join_processes, simulate_devices, use_cores

    if start.print_config:
        return 1 if cores is None else cores
    if start.simulated_devices != 1:
        simulate_devices(start.simulated_devices)
    if start.plan:
        # XLA for CPUs does not order the collectives of a program that it loads, and aborts where
        # two of them meet.
        keep_no_programs()
    if join_processes(start.processes) > 1:
        enable_compilation_cache(directory / "programs")  # which all hosts see
        return 1
    if start.plan or start.simulated_devices != 1 or settings.get("layout", "single") != "single":
        return 1
    batch = settings.get("batch", 16)
    return use_cores(run_cores(directory, batch) if cores is None else cores)
