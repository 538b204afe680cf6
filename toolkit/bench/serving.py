"""Serving a trace: the engine against transformers' continuous batching, on the same weights.

All requests of a trace are there at the start; a call serves all of them, each to its own number of
tokens, greedily. The outputs are compared first, token for token. The model is a Qwen3 with random
weights, whose head is scaled so that no two tokens come close to a tie.

transformers runs prompts and rows in one pass over paged keys and values; its manager starts and
ends within the call. The engine comes with all rows, with pages, and with a single row, which is
what batching is worth here.
"""

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.bench.harness import Case, PlannedCase
from toolkit.bench.peers import has_torch
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.looped.checkpoints import load_checkpoint
from toolkit.serving import Engine, Request, TracedRequest, requests_of

OURS, PAGED, ALONE = "toolkit", "toolkit, paged", "toolkit, one row"
PEER = "transformers continuous batching"
SLOTS, CAPACITY, PAGE, PAGES = 8, 256, 32, 64
VOCABULARY, WIDTH, LAYERS = 512, 128, 4


def trace(count: int, seed: int = 0) -> list[TracedRequest]:
    """Prompts of 8 to 100 tokens, outputs of 4 to 80, all there at the start."""
    draw = np.random.default_rng(seed)
    sizes = zip(draw.integers(8, 101, count), draw.integers(4, 81, count), strict=True)
    return [TracedRequest(0.0, int(prompt), int(output)) for prompt, output in sizes]


def cases(cores: int) -> Iterator[PlannedCase]:
    """Prompts of their own, and prompts with the same beginning."""
    for beginning in (0, 64):
        shared = f", the first {beginning} tokens the same" if beginning else ""
        name = f"serving 32 requests, {LAYERS} layers of {WIDTH}{shared}, float32"
        yield PlannedCase(name, partial(serving_case, trace(32), beginning, cores))


def serving_case(
    entries: Sequence[TracedRequest], beginning: int, cores: int, name: str, width: int = WIDTH
) -> Case:
    """The case of a trace whose prompts all begin with the same `beginning` tokens."""
    shared = np.random.default_rng(1).integers(0, VOCABULARY, beginning).tolist()
    requests = [
        Request((*shared, *request.prompt), request.length)
        for request in requests_of(entries, VOCABULARY)
    ]
    contenders: dict[str, Callable[[], Any]] = {}
    if has_torch():
        contenders[PEER], model = _transformers(requests, cores, width)
    else:
        from flax import nnx

        config = LoopedConfig.tiny(" ".join(["full"] * LAYERS), width=width, vocabulary=VOCABULARY)
        model = LoopedLM(config, rngs=nnx.Rngs(0))
    for label, how in {OURS: {}, PAGED: {"pages": PAGES}, ALONE: {"slots": 1}}.items():
        engine = Engine(model, **{"slots": SLOTS, "capacity": CAPACITY, "page": PAGE} | how)
        contenders[label] = partial(_serve, engine, requests)
    written = sum(request.length for request in requests)
    read = sum(len(request.prompt) for request in requests)
    return Case(
        name=name,
        contenders=contenders,
        check=_same_texts,
        ours=OURS,
        targets={PEER: 1.0},
        note=f"{len(requests)} requests, {read} tokens to read, {written} to write, {SLOTS} rows",
    )


def _serve(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    return [progress.tokens for progress in engine.serve(requests)]


def _transformers(
    requests: Sequence[Request], cores: int, width: int
) -> tuple[Callable[[], list[list[int]]], LoopedLM]:
    """transformers' engine as a contender, and ours with its weights."""
    import torch
    from transformers.generation.configuration_utils import (
        ContinuousBatchingConfig,
        GenerationConfig,
    )
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    torch.set_num_threads(cores)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        head_dim=width // 4, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    peer = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        peer.lm_head.weight *= 20
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        ours = load_checkpoint(Path(folder))
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    how = {
        "generation_config": GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        "continuous_batching_config": ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=2 * PAGES, max_batch_tokens=256, use_cuda_graph=False
        ),
    }

    def serve() -> list[list[int]]:
        texts: dict[str, list[int]] = {}
        with peer.continuous_batching_context_manager(**how, warmup=False) as manager:
            names: list[Any] = [
                manager.add_request(list(request.prompt), max_new_tokens=request.length)
                for request in requests
            ]
            while len(texts) < len(names):
                result = manager.get_result(timeout=60)
                if result is None or result.error is not None:
                    raise RuntimeError(f"{PEER} failed: {result}")
                if result.is_finished():
                    texts[result.request_id] = list(result.generated_tokens)
        return [texts[name] for name in names]

    return serve, ours


def _same_texts(results: Mapping[str, list[list[int]]]) -> None:
    """Every contender wrote the same tokens for every request."""
    for name, texts in results.items():
        for number, (text, wanted) in enumerate(zip(texts, results[OURS], strict=True)):
            if text != wanted:
                place = next(i for i, pair in enumerate(zip(text, wanted, strict=False))
                             if pair[0] != pair[1])  # fmt: skip
                raise ValueError(f"{name!r} differs from {OURS!r} at token {place} of {number}")
