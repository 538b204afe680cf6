"""What a token costs as the context grows: softmax against Gated DeltaNet, measured here."""

from typing import Any

from tqdm import tqdm

from toolkit.attention import mixer
from toolkit.lab.attention.measurement import (
    check_against_reference,
    decode_call,
    prefill_call,
)
from toolkit.measure import time_contenders

PREFILL_CONTEXTS = (512, 1024, 2048, 4096, 8192)
DECODE_CONTEXTS = (1024, 4096, 16384, 65536)
HEADS, SIZE = 8, 64
NAMES = ("full", "gdn")
ROUNDS = 3
# Heads, head size, window (neither mixer has one) and the form of softmax.
SIZES = (HEADS, SIZE, 1, "blockwise")


def measure_costs() -> dict[str, list[dict[str, Any]]]:
    """Seconds of a prefill and of a decode step at each context, and the decode state's bytes.

    Every mixer is first compared with its reference; nothing is timed otherwise. It takes about 20
    seconds on two cores, most of it compilation.
    """
    for name in NAMES:
        check_against_reference(name, SIZES)
    rows: dict[str, list[dict[str, Any]]] = {}
    for phase, contexts, prepare in (
        ("prefill", PREFILL_CONTEXTS, prefill_call),
        ("decode", DECODE_CONTEXTS, decode_call),
    ):
        rows[phase] = []
        for context in tqdm(contexts, desc=phase, unit="context"):
            calls = {name: prepare(name, context, SIZES) for name in NAMES}
            for name, timing in time_contenders(calls, rounds=ROUNDS).items():
                rows[phase].append(
                    {
                        "mixer": name,
                        "context": context,
                        "seconds": timing.median,
                        "spread": timing.spread,
                        "bytes": state_bytes(name, context),
                    }
                )
    return rows


def state_bytes(name: str, context: int) -> int:
    """Bytes a mixer keeps for one float32 sequence to write the next token (modelled)."""
    return mixer(name).state_bytes(1, context, HEADS, SIZE, SIZE)
