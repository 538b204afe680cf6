"""Cheat sheets of the lessons: each formula beside what the package's own function says.

A formula is Python, evaluated with the sizes of its example; the build, and a test, hold it against
the function that the lesson's exercises are checked with.
"""

import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from toolkit import serving
from toolkit.attention import mixer
from toolkit.attention.latent import LatentCache
from toolkit.attention.sparse import SELECTORS
from toolkit.figures import in_words
from toolkit.lab.lessons.catalogue import load_outline
from toolkit.lab.lessons.subjects.cluster_plan import predicted
from toolkit.lab.lessons.subjects.programs.fewer_bits import (
    as_e4m3,
    as_int8,
    error_of_ordinary,
    ordinary,
)
from toolkit.lab.lessons.subjects.programs.real_trace import exposed_time
from toolkit.lr import NoisyQuadratic
from toolkit.parallel.experts import dispatch_traffic
from toolkit.parallel.experts.dispatch import expert_slots
from toolkit.parallel.gradients import COMPRESSORS, PATTERNS, cyclic_code
from toolkit.parallel.gradients.peers import Along
from toolkit.parallel.pipeline import program_of
from toolkit.planning import Strategy
from toolkit.schedules import (
    gpipe,
    interleaved,
    one_forward_one_backward,
    simulate,
    zero_bubble_h1,
)
from toolkit.schedules.collectives import named_topology, optimum, star, torus


class Row(NamedTuple):
    """A quantity, its formula, the sizes of the example, and the function of the package."""

    quantity: str
    formula: str
    sizes: dict[str, Any]
    function: Any
    unit: str = ""


def turns_to_read(P, B, r):
    """Turns of a simulated prompt beside rows that write all the time."""
    trace = [serving.TracedRequest(0.0, 1, 40)] * r + [serving.TracedRequest(0.5, P, 1)]
    engine = serving.Instance(serving.Scheduler(B), lambda work: 0.1)
    run = serving.simulate(trace, [engine])
    return sum(r in dict(turn.iteration.pieces) for turn in run.turns)


LAYER = {"T": 4096, "h": 8, "d": 64}
PIPE = {"p": 4, "m": 8}
SHEETS = {
    "attention_cost": [
        Row("read T tokens, one layer, softmax", "2 * d * h * T * (T + 1)", LAYER,
            lambda T, h, d: mixer("full").forward_flops(1, T, h, d, d), "FLOP"),
        Row("cache of T tokens, one layer, 2 bytes", "2 * 2 * d * h * T", LAYER,
            lambda T, h, d: mixer("full").state_bytes(1, T, h, d, d, element_bytes=2), "bytes"),
        Row("state of a gated delta net, float32", "4 * d * d * h", LAYER,
            lambda T, h, d: mixer("gdn").state_bytes(1, T, h, d, d, element_bytes=2), "bytes"),
    ],
    "honest_benchmark": [
        Row("error of a median of n samples, in their standard deviations",
            "(math.pi / (2 * n)) ** 0.5", {"n": 15}, lambda n: median_error(n), "times"),
        Row("operations of (A A) b over those of A (A b), A n x n, b n x k", "(n + k) / (2 * k)",
            {"n": 768, "k": 4}, lambda n, k: order_of_products(n, k), "times"),
    ],
    "memory_ledger": [
        Row("parameters, gradients, Adam, float32", "(4 + 4 + 2 * 4) * P", {"P": 10**9},
            lambda P: P * load_outline("memory_ledger").question("adam_ledger").answer().truth,
            "bytes"),
        Row("best distance of checkpoints", "round(L**0.5)", {"L": 64},
            lambda L: min(range(1, L + 1), key=lambda n: math.ceil(L / n) + n), "layers"),
    ],
    "meshes": [
        Row("float32 matrix r x c on each device, cut by both axes of a mesh d x m",
            "4 * r * c / (d * m)", {"r": 8192, "c": 4096, "d": 2, "m": 4},
            lambda r, c, d, m: shard_bytes(r, c, d, m), "bytes"),
        Row("copies of it on n devices, cut by an axis of m", "n / m", {"n": 8, "m": 4},
            lambda n, m: load_outline("meshes").question("copies").answer().truth, "times"),
        Row("two products over m devices by columns, then rows, r / d rows of width w: sent",
            "2 * (m - 1) / m * 4 * r / d * w", {"m": 4, "d": 2, "r": 64, "w": 32},
            lambda m, d, r, w: megatron_bytes(), "bytes"),
    ],
    "ring": [
        Row("all-reduce, sent per device", "2 * (n - 1) / n * N", {"n": 8, "N": 256},
            lambda n, N: ring_bytes(), "bytes"),
    ],
    "shard_transformer": [
        Row("block cut over n devices, forward, sent per device", "4 * (n - 1) / n * T * w * b",
            {"n": 4, "T": 8192, "w": 8192, "b": 2},
            lambda n, T, w, b: 1e6 * float(large_block_mb()), "bytes"),
    ],
    "pipeline": [
        Row("bubble of GPipe", "(p - 1) / (m + p - 1)", PIPE,
            lambda p, m: simulate(gpipe(p, m)).bubble, "share"),
        Row("bubble of 1F1B", "(p - 1) / (m + p - 1)", PIPE,
            lambda p, m: simulate(one_forward_one_backward(p, m)).bubble, "share"),
        Row("microbatches held by device 0, 1F1B", "min(p, m)", PIPE,
            lambda p, m: simulate(one_forward_one_backward(p, m)).peak_memory()[0]),
        Row("bubble, interleaved, v chunks", "(p - 1) / (v * m + p - 1)", PIPE | {"v": 2},
            lambda p, m, v: simulate(interleaved(p, m, v)).bubble, "share"),
        Row("bubble of ZB-H1, F = I = W", "(p - 1) / (3 * m + p - 1)", PIPE,
            lambda p, m: simulate(zero_bubble_h1(p, m)).bubble, "share"),
    ],
    "cluster_plan": [
        Row("parameters and Adam, float32, ZeRO-3; v of them in vectors, not cut",
            "12 * (P - v) / n + 12 * v", {"P": 8_030_261_248, "v": 266_240, "n": 8},
            lambda P, v, n: zero3_bytes(), "bytes"),
    ],
    "kill_worker": [
        Row("time between saves", "(2 * s * f) ** 0.5", {"s": 1, "f": 600},
            lambda s, f: load_outline("kill_worker").question("best_minutes").answer().truth,
            "minutes"),
    ],
    "attention_memory": [
        Row("error after n pairs in K channels", "((n - 1) / K) ** 0.5", {"n": 32, "K": 16},
            lambda n, K: load_outline("attention_memory").question("capacity").answer().truth,
            "times"),
        Row("log-decay of a half-life of n tokens", "-math.log(2) / n", {"n": 8},
            lambda n: float(np.log(0.5)) / n),
    ],
    "causality_trap": [
        Row("outputs that a carried state lets see the last of T tokens", "100 * (T - 1) / (T - 1)",
            {"T": 32}, lambda T: load_outline("causality_trap").questions[0].answer().truth,
            "per cent"),
    ],
    "known_rates": [
        Row("loss per direction of curvature h at the end, rate r, noise v",
            "r * v / (2 * (2 - r * h))", {"r": 0.1, "h": 0.5, "v": 0.05},
            lambda r, h, v: final_loss(r, h, v)),
    ],
    "own_kernel": [
        Row("softmax of N bytes by four programs, over the bus", "6 * N", {"N": 64},
            lambda N: load_outline("own_kernel").question("bus").answer().truth, "MB"),
    ],
    "real_trace": [
        Row("messages exposed in a step of T ms with C ms of products, if one of both always runs",
            "T - C", {"T": 24, "C": 20}, lambda T, C: exposed_time([(16, T)], [(0, C)]), "ms"),
    ],
    "fewer_bits": [
        Row("error of int8 with one scale, largest of the numbers m standard deviations",
            "m / 127 / 12 ** 0.5", {"m": 3.56}, lambda m: int8_error(m)),
        Row("spacing of float8 e4m3 at x", "2 ** (math.floor(math.log2(x)) - 3)", {"x": 20},
            lambda x: as_e4m3(x + 1.1) - as_e4m3(x)),
    ],
    "skip_and_compress": [
        Row("cache per token and layer, latent c and rotary key r, 2 bytes", "2 * (c + r)",
            {"c": 512, "r": 64}, lambda c, r: latent_bytes(c, r), "bytes"),
        Row("index of Quest per head, T tokens in pages of p, d channels, 4 bytes",
            "4 * 2 * d * T / p", {"T": 4096, "p": 16, "d": 64},
            lambda T, p, d: quest_bytes(T, p, d), "bytes"),
    ],
    "who_goes_where": [
        Row("slots of an expert, T tokens, k of E experts each, capacity c",
            "math.ceil(c * T * k / E)", {"c": 1.25, "T": 110, "k": 2, "E": 8},
            lambda c, T, k, E: expert_slots(T * k, E, c), "pairs"),
        Row("two all-to-all of C slots, width D, 2 bytes, n devices, sent per device",
            "2 * E * C * D * 2 * (n - 1) / n", {"E": 128, "C": 160, "D": 2048, "n": 8},
            lambda E, C, D, n: dispatched_bytes(E, C, D, n), "bytes"),
    ],
    "pipeline_on_devices": [
        Row("ticks of 1F1B, p devices, m microbatches, whole backwards", "2 * (m + p - 1)",
            {"p": 8, "m": 16}, lambda p, m: program_of(one_forward_one_backward(p, m)).length,
            "ticks"),
        Row("activations that device d of p holds in 1F1B, if m >= p", "p - d",
            {"p": 8, "d": 2}, lambda p, d: one_forward_one_backward(p, 2 * p).peak_activations[d]),
    ],
    "trees_and_cuts": [
        Row("all-gather that a set of S of N ranks allows, with B GB/s out of it",
            "N * B / S", {"N": 16, "B": 500, "S": 15},
            lambda N, B, S: float(optimum(named_topology("h100:2x8")).rate), "GB/s"),
        Row("all-reduce of M GB in a box of N around a switch, r GB/s each",
            "2 * (N - 1) / N * M / r", {"N": 8, "M": 1, "r": 450},
            lambda N, M, r: optimum(star(N, r), "all-reduce").seconds(M * 1e9), "seconds"),
        Row("all-gather of a torus of d axes, N ranks, r GB/s per link and way",
            "2 * d * r * N / (N - 1)", {"d": 2, "r": 45, "N": 16},
            lambda d, r, N: float(optimum(torus(4, 4, rate=r)).rate), "GB/s"),
    ],
    "four_bits": [
        Row("sum of n gradients over D devices in k bits, a float32 scale per b",
            "2 * (D - 1) / D * n * (k / 8 + 4 / b)", {"D": 8, "n": 4096, "k": 4, "b": 64},
            lambda D, n, k, b: compressed_bytes(D, n, b), "bytes"),
        Row("parts that each of n workers computes so that any s may be late", "s + 1",
            {"n": 8, "s": 3}, lambda n, s: int((cyclic_code(n, s) != 0).sum(1).max())),
    ],
    "first_token": [
        Row("mean time of work of D seconds that comes R times per second at random",
            "D + R * D**2 / (2 * (1 - R * D))", {"D": 0.1, "R": 9},
            lambda D, R: serving.reading_seconds(D, R), "seconds"),
        Row("turns in which a prompt of P tokens is read, B tokens a turn, beside r rows",
            "math.ceil(P / (B - r))", {"P": 1000, "B": 128, "r": 8}, turns_to_read),
    ],
}  # fmt: skip


def compressed_bytes(devices, numbers, block):
    """What an exchange in four bits sends."""
    along = Along.over({"data": devices}, devices)
    row = COMPRESSORS["int4"](block)
    sends = PATTERNS["scatter_gather"].sends(row, along, numbers // devices)
    return sum(sent for _, sent in sends)


def median_error(samples):
    """Standard deviation of medians of normal samples, from 20,000 draws."""
    draws = np.random.default_rng(0).normal(size=(20_000, samples))
    return float(np.median(draws, axis=1).std())


def order_of_products(size, columns):
    """The compiler's count of operations from the left, over that from the right."""
    import jax

    square, thin = (jax.ShapeDtypeStruct((size, n), "float32") for n in (size, columns))
    left, right = (
        jax.jit(program).lower(square, thin).compile().cost_analysis()["flops"]  # pyright: ignore
        for program in (lambda a, b: (a @ a) @ b, lambda a, b: a @ (a @ b))
    )
    return left / right


def shard_bytes(rows, columns, data, model):
    """What a device holds of a matrix that both axes of the lesson's mesh cut."""
    from jax.sharding import NamedSharding, PartitionSpec

    from toolkit.lab.lessons.subjects.parts.eight_devices import mesh_of

    cut = NamedSharding(mesh_of(data=data, model=model), PartitionSpec("data", "model"))
    return 4 * math.prod(cut.shard_shape((rows, columns)))


def megatron_bytes():
    """What a device sends for the lesson's two products."""
    from toolkit.lab.lessons.subjects.meshes import MEGATRON, compile_mlp
    from toolkit.measure import collectives

    return sum(each.total_bytes_sent for each in collectives(compile_mlp(MEGATRON)))


def ring_bytes():
    """What the compiler says of a sum over eight devices of 256 bytes each."""
    import jax

    from toolkit.lab.lessons.subjects.ring import sent_by

    return sent_by(lambda x, axis, devices: jax.lax.psum(x, axis))[0]


def final_loss(rate, curvature, noise):
    """Where a constant rate ends on a quadratic of one direction."""
    problem = NoisyQuadratic(np.array([curvature]), np.array([noise]), np.ones(1))
    return problem.loss(problem.constant_rate_moment(rate, 10**6))


def int8_error(largest):
    """The measured error of the lesson's numbers, whose largest is this."""
    numbers = ordinary()
    assert math.isclose(max(map(abs, numbers)), largest, rel_tol=0.01)
    return error_of_ordinary(numbers, as_int8(numbers))


def latent_bytes(latent, rope):
    """What one token leaves in a cache of latents in bfloat16."""
    import jax.numpy as jnp

    cache = LatentCache.empty(1, latent, rope, 1, dtype=jnp.bfloat16)
    return cache.latents.nbytes + cache.rope_keys.nbytes


def quest_bytes(tokens, page, channels):
    """What a step of Quest reads of its index, before any key."""
    import jax.numpy as jnp

    quest, keys = SELECTORS["quest"](page_size=page), jnp.zeros((tokens, channels))  # pyright: ignore
    return int(quest.index_bytes(quest.build(keys, keys, tokens), keys[:1], tokens))


def dispatched_bytes(experts, slots, width, devices):
    """What a device sends of tokens whose even load is this many slots; 8 experts per token."""
    tokens = slots * experts // 8
    found = dispatch_traffic(tokens, width, experts, 8, devices, capacity=1.0)
    return sum(one.count * one.bytes_sent for one in found)


def zero3_bytes():
    """What a chip holds of the lesson's model and its optimiser between steps."""
    memory = predicted(Strategy(fsdp=8)).memory
    return memory.parameters + memory.optimizer


def large_block_mb():
    """What a device sends for the larger block of the lesson, in MB."""
    return load_outline("shard_transformer").question("large_block").answer().truth


def both_values(row):
    """(by the formula, by the package's function)."""
    found = row.function(**row.sizes)
    return float(eval(row.formula, {"math": math}, dict(row.sizes))), float(Fraction(found))


def cheat_sheets():
    """The page, in MyST; a row whose formula is wrong ends the build."""
    parts = ["# Cheat sheets", "", "One per lesson; each value is what the package computes."]
    for lesson, rows in SHEETS.items():
        parts += ["", f"## {load_outline(lesson).title}", ""]
        parts += ["| quantity | formula | example | value |", "| --- | --- | --- | ---: |"]
        for row in rows:
            formula, value = both_values(row)
            if not math.isclose(formula, value, rel_tol=0.05):
                raise ValueError(f"{row.quantity}: the formula says {formula}, the package {value}")
            sizes = ", ".join(f"{name} = {size:,}" for name, size in row.sizes.items())
            shown = in_words(value, row.unit)
            parts.append(f"| {row.quantity} | `{row.formula}` | {sizes} | {shown} |")
    return "\n".join(parts) + "\n"
