"""The subcommands of `toolkit` for many devices: launch, plan, explain."""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from toolkit.cli.unread import refuse_changed, refuse_unread


def launch(
    command: Annotated[tuple[str, ...], tyro.conf.Positional],
    processes: int = 2,
    devices: int | None = None,
    restarts: int = 0,
    fewest: int | None = None,
    cluster: Literal["here", "slurm", "kubernetes", "ray", "tpu"] = "here",
    hosts: int = 2,
    dry_run: bool = False,
) -> None:
    """Run a command as one job of several processes: toolkit launch -- toolkit train RUN ...

    Local processes are watched: if one dies, the others are ended within a second. For a cluster,
    print the script to submit (--dry-run).

    Args:
        command: the program and its arguments, after "--".
        processes: processes to start here.
        devices: simulated CPU devices of each process here; GPUs of each host of a cluster.
        restarts: how often to restart the job after a failure.
        fewest: restart local processes with half as many each time, at least so many.
        cluster: where to run.
        hosts: machines of the cluster.
        dry_run: only print the commands, or the script to submit.
    """
    from toolkit import parallel
    from toolkit.parallel.hosts.launch import launch_commands

    if cluster != "here" and not dry_run:
        raise ValueError(
            f"cluster: {cluster!r} starts jobs by its own means; add --dry-run, which prints what "
            "to submit to it"
        )
    if cluster != "here":
        refuse_unread(
            launch, locals(), "cluster", ("command", "hosts", "devices", "restarts", "dry_run")
        )
        how = {"hosts": hosts, "devices": devices or 8, "restarts": restarts}
        print(parallel.launch_recipe(command, cluster, **how), end="")
        return
    refuse_changed(launch, {"hosts": hosts}, "without --cluster, which alone reads it")
    if dry_run:
        print(launch_commands(command, processes, devices))
    else:
        how = {"processes": processes, "restarts": restarts, "fewest": fewest}
        sys.exit(parallel.launch(command, devices=devices, **how))


def plan(
    model: str = "llama-3-8b",
    chips: str = "h100:8",
    memory: float | None = None,
    batch: int = 64,
    sequence_length: int = 2048,
    compile: str | None = None,
    verify: str | None = None,
    calibrate: Path | None = None,
    links: Path | None = None,
    lengths: tuple[int, ...] | None = None,
    host_link: float | None = None,
    host_memory: float = 200.0,
    grade: Path | None = None,
    grade_looped: Path | None = None,
    grade_experts: Path | None = None,
    grade_plans: Path | None = None,
    grade_drawn: Path | None = None,
    grade_published: Path | None = None,
    grade_served: Path | None = None,
    recipe: str | None = None,
    minutes: float = 0.0,
    topology: str | None = None,
    collectives: Literal["ring", "tree", "optimum"] = "optimum",
    imbalance: float = 1.0,
    capacity: float = 1.25,
    decode: int | None = None,
    weights: Literal["bfloat16", "float8"] = "bfloat16",
    cache: Literal["bfloat16", "float8"] = "bfloat16",
    order_seconds: float = 0.0,
    exchange: tuple[str, ...] | None = None,
    save: Path | None = None,
) -> None:
    """Find the layout that trains a model fastest on a cluster, and show the cost of the others.

    Args:
        model: the name of a model, such as llama-3-8b, lt2-hybrid-1.3b or deepseek-v3; the folder
            of a run; or a config.json of Hugging Face transformers, or its folder.
        chips: kind and number, such as h100:64, a10g:8 or v5e:4x4; several kinds, as
            h100:4+a100:8, get pipelines of unequal stages (HexiScale); "here" measures the local
            devices.
        memory: GiB per chip (none: all it has).
        batch: global batch size in sequences.
        sequence_length: tokens per sequence.
        compile: a TPU topology such as v5e:4x4: plan and compile for it, by libtpu, without a TPU.
        verify: the same with the best three plans: report predicted against compiled memory, rank
            those that fit, and repair the fastest if none does.
        calibrate: plan with constants fitted to this file of measurements (JSON lines; their form
            is in the docs, under planning.calibrate).
        links: bytes per second between nodes as measured, a JSON table [nodes][nodes]: place the
            stages of the fastest plan with pipelines on them.
        lengths: tokens of sequences of different lengths: also divide the chips into groups for
            them (FlexSP), and into replicas that work through them (Hydraulis); also say which
            chips each needs (ByteScale). Chunks for the stages of a pipeline (InfiniPipe) are
            `toolkit.planning.chunk_sequences`, in Python.
        host_link: GB/s between a chip and its host, one way: also search what no train step here
            builds yet (sequences and gradients cut over chips, activations on the host), and choose
            what the fastest plan's layers keep, swap and compute anew (MEMO).
        host_memory: GiB of the host's memory per chip, for what is swapped.
        grade: print the errors of all predictions in this record of compiled configurations.
        grade_looped: the same for a record of looped, hybrid and latent models.
        grade_experts: the same for a record of mixtures of experts.
        grade_plans: report for every plan in this record whether it fits as compiled by libtpu.
        grade_drawn: report which plans in this record, drawn by chance, libtpu refuses.
        grade_published: predict the step times in this file of published ones, and print the errors
            by source and chip, also with constants fitted without them.
        grade_served: the same for the tokens per second of published deployments.
        recipe: predict a published recipe, llama-3-405b, llama-3-405b-long or deepseek-v3, and say
            what would be chosen instead, and why; nothing else.
        minutes: first extend that record for so long.
        topology: the network of the chips, as `toolkit plan-collective` takes it: rates follow from
            its links.
        collectives: what runs on that network; trees for all-reduces, rings for the rest.
        imbalance: load of the chip whose experts are chosen most, over the mean.
        capacity: most tokens per expert of a mixture, relative to an even load.
        decode: instead plan the decoding of `batch` rows with so many tokens in their cache, of a
            mixture of experts or of latent attention.
        weights, cache: kind of numbers while decoding.
        order_seconds: also search an order of tasks for the fastest pipelines, with so
            many seconds for each integer program (needs OR-tools).
        exchange: also choose which gradients of the fastest plan to compress, on its modelled
            timeline: compressors, or exchanges as `toolkit train --exchange` takes them, from which
            each tensor takes one or none (Espresso), and which layers to send together (MergeComp);
            without any, bfloat16, int8, int4 and top_k=0.01.
        save: write the fastest plan to this file, for `toolkit train --plan` and `toolkit explain
            --plan`; with `exchange` the fastest whose replicas exchange gradients, and how.
    """
    _refuse_unread(dict(locals()))
    from toolkit import planning
    from toolkit.planning.grade import by_compiler as grading
    from toolkit.planning.grade.cases import looped_cases, mixture_cases
    from toolkit.planning.memory.gpus import memory_setting
    from toolkit.planning.time.seconds import constants_of
    from toolkit.planning.uneven.placement import placed_in_words
    from toolkit.planning.uneven.replicas import MOST_CHIPS, rings_in_words

    if grade is not None:
        print(grading.grade_record(grade, minutes))
        return
    if grade_looped is not None:
        print(grading.grade_record(grade_looped, minutes, cases_of=looped_cases))
        return
    if grade_experts is not None:
        print(grading.grade_record(grade_experts, minutes, cases_of=mixture_cases))
        return
    if grade_plans is not None:
        from toolkit.planning.grade.plans import grade_plans as fitting_plans

        print(fitting_plans(grade_plans, minutes))
        return
    if grade_drawn is not None:
        from toolkit.planning.grade.drawn import grade_drawn as refused_plans

        print(refused_plans(grade_drawn, minutes))
        return
    if grade_published is not None:
        from toolkit.planning.grade.published import grade_published as scoreboard

        print(scoreboard(grade_published))
        return

    if grade_served is not None:
        from toolkit.planning.grade.served import grade_served as deployments

        print(deployments(grade_served))
        return

    if recipe is not None:
        print(planning.explain_recipe(recipe))
        return

    if decode is not None:
        how: dict[str, Any] = {"imbalance": imbalance, "weights": weights, "cache": cache}
        found = planning.plan_decode(model, batch, decode, chips, **how)
        print(f"{found}\nmodelled")
        return

    if "+" in chips:
        sizes: dict[str, Any] = {"batch": batch, "sequence_length": sequence_length}
        print(planning.plan_mixed_cluster(model, chips, **sizes))
        return

    constants = None
    if calibrate is not None:
        fitted = planning.calibrate(calibrate)
        print(f"{fitted}\n")
        constants = fitted.constants
    chips = verify or compile or chips
    where = planning.cluster(chips)
    if topology is not None:
        from toolkit.schedules.collectives import named_topology

        where = planning.cluster(where, named_topology(topology), collectives)
    if imbalance != 1:
        constants = dataclasses.replace(constants_of(where, constants), imbalance=imbalance)
    if host_link is not None:
        usual = constants_of(where, constants)
        constants = dataclasses.replace(usual, host_link=host_link * 1e9)
    config: Any = model
    if (Path(model) / "run.json").is_file():
        from toolkit.language.cores import read_run
        from toolkit.looped import LoopedConfig

        config = LoopedConfig(**read_run(Path(model))["configuration"]["model"])
    found = planning.plan(
        config, where, batch=batch, sequence_length=sequence_length,
        memory=None if memory is None else memory * 2**30, constants=constants, capacity=capacity,
        order_seconds=order_seconds, host=host_memory * 2**30 if host_link is not None else None,
    )  # fmt: skip
    print(f"{found}\n\n{found.best}")
    ahead = memory_setting(found.best.cluster, found.best.memory.total)
    chosen, exchanges = found.best, None
    if exchange == ():
        exchange = ("bfloat16", "int8", "int4", "top_k=0.01")
    if exchange and save is None:
        print(planning.choose_exchanges(chosen, exchange))
    elif exchange:
        from toolkit.planning.gradients.program import fastest_exchanged

        exchanges = fastest_exchanged(found, exchange)
        chosen = exchanges.step
        print(f"The fastest plan that is trained with an exchange: {chosen.strategy}\n{exchanges}")
    if save is not None:
        planning.save_plan(chosen, save, exchanges=exchanges)
        print(f"The plan is written. Run it with:  {ahead}toolkit train RUN --plan {save}")
    elif sys.argv[1:2] == ["plan"]:
        again = shlex.join(["toolkit", *sys.argv[1:], "--save", "plan.json"])
        print(f"Train it with:  {again} && {ahead}toolkit train RUN --plan plan.json")
    if links is not None:
        print(placed_in_words(found, links))
    if lengths is not None:
        limit = {"memory": found.best.limit, "constants": constants}
        groups = planning.plan_sequences(config, chips, lengths, **limit)
        print(groups)
        if where.chips <= MOST_CHIPS:
            costs = groups.costs
            print(rings_in_words(lengths, costs.capacity))
            replicas = planning.plan_replicas(
                lengths,
                chips=where.chips,
                capacity=costs.capacity,
                seconds=lambda length, degree: costs.milliseconds(length, degree) / 1e3,
            )
            print(f"replicas through the whole step, in {replicas}")
    if host_link is not None and found.best.strategy.pipeline == 1:
        host = {"host": host_memory * 2**30, "link": host_link * 1e9}
        print(planning.plan_swaps(found.best, **host))
    if verify is not None:
        print(grading.verify_plan(found))
    if compile is not None:
        print(grading.compile_plan(found))


def _refuse_unread(given: dict[str, Any]) -> None:
    """Refuse options of `plan` that it would not read beside the others."""
    graded = ("grade", "grade_looped", "grade_experts", "grade_plans", "grade_drawn")
    modes: dict[str, tuple[str, ...]] = dict.fromkeys(graded, ("minutes",))
    modes |= {"grade_published": (), "grade_served": (), "recipe": ()}
    modes["decode"] = ("model", "chips", "batch", "imbalance", "weights", "cache")
    for mode, read in modes.items():
        if given[mode] is not None:
            return refuse_unread(plan, given, mode, read)
    if "+" in given["chips"]:
        return refuse_unread(plan, given, "chips", ("model", "batch", "sequence_length"))
    if given["lengths"] is not None and not given["lengths"]:
        raise ValueError(
            "lengths: got none; wanted tokens of sequences, such as --lengths 512 4096"
        )
    if (topology := given["verify"] or given["compile"]) and given["chips"] != topology:
        refuse_changed(plan, {"chips": given["chips"]}, f"with {topology} to compile for")
    needs = {"minutes": "grade", "weights": "decode", "cache": "decode"}
    needs |= {"host_memory": "host_link", "collectives": "topology"}
    for name, other in needs.items():
        if given[other] is None:
            only = f"without --{other.replace('_', '-')}, which alone reads it"
            refuse_changed(plan, {name: given[name]}, only)


def explain(
    scheme: str = "zero3",
    mesh: str = "data=8",
    pattern: str = "gdn full",
    loops: int = 2,
    width: int = 128,
    heads: int = 4,
    batch: int = 16,
    sequence_length: int = 64,
    blame: bool = False,
    picture: Path | None = None,
    plan: Path | None = None,
) -> None:
    """Compile one training step under a layout and explain its communication.

    Args:
        scheme: the layout's scheme, such as data, zero3, tensor or zero3+tensor.
        mesh: axes and sizes, such as data=4,model=2; on a CPU the devices are simulated.
        pattern: the physical layers in order, e.g. "gdn gdn gdn full".
        loops: how many times the stack of layers is applied.
        width: the width of the residual stream.
        heads: attention heads.
        batch: global batch size in sequences.
        sequence_length: bytes per sequence.
        blame: name changes of the layout that remove a collective, each tried by compiling again.
        picture: also draw it to this PNG file.
        plan: instead explain the program of this plan, written by `toolkit plan --save`, on as many
            simulated devices as it takes.
    """
    if plan is not None:
        refuse_unread(explain, locals(), "plan", ())
        from toolkit.parallel import simulate_devices
        from toolkit.planning import load_plan

        saved = load_plan(plan)
        simulate_devices(saved.strategy.chips)
        print(saved.explained())
        return
    from toolkit.lab.sharding.stored_steps import explain_step
    from toolkit.looped import LoopedConfig
    from toolkit.parallel import Blame

    config = LoopedConfig.tiny(pattern=pattern, loops=loops, width=width, heads=heads)
    how = {"batch": batch, "sequence_length": sequence_length, "is_blamed": blame}
    found = explain_step(config, mesh, scheme, **how)
    print(found)
    if picture is not None:
        (found.explanation if isinstance(found, Blame) else found).draw().savefig(picture)
