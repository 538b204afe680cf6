"""The engine: every request gets what `generate` writes for it alone, from few programs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import LoopedConfig, LoopedLM, cache_bytes_per_sequence, generate
from toolkit.serving import Engine, PageTable, Request, Scheduler, programs

VOCABULARY = 50
STOP = 7


def build(pattern, **overrides) -> Any:
    sizes = {"vocabulary": VOCABULARY, "width": 16, "heads": 2, "tied_embedding": False} | overrides
    config = LoopedConfig.tiny(pattern, sizes.pop("loops", 1), **sizes)
    model: Any = LoopedLM(config.with_options(window={"sliding_window": 8}), rngs=nnx.Rngs(0))
    model.unembedding[...] = 2 * model.unembedding[...]  # texts that depend on what was read
    return model


def mixed_requests(count, seed=0) -> list[Request]:
    draw = np.random.default_rng(seed)
    beginning = draw.integers(0, VOCABULARY, 11).tolist()
    how = (
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
        {"temperature": 1.5, "min_p": 0.05, "repetition_penalty": 1.4, "stop_tokens": (STOP, 9)},
    )
    requests = []
    for number in range(count):
        own = draw.integers(0, VOCABULARY, draw.integers(1, 6)).tolist()
        prompt = (beginning if number % 3 else []) + own
        length = int(draw.integers(1, 48))
        requests.append(Request(tuple(prompt), length, seed=number, **how[number % 4]))
    return requests


def alone(model, request, **how) -> list[int]:
    """What `generate` writes for this request, up to the first stop token."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    how |= {name: getattr(request, name) for name in names}
    stops = request.stop_tokens
    prompt = jnp.asarray([request.prompt])
    key = jax.random.key(request.seed)
    [tokens] = generate(model, prompt, request.length, key=key, stop_token=stops or None, **how)
    tokens = tokens.tolist()
    ends = [place for place, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens


def serve(engine, requests) -> list[list[int]]:
    """All requests, submitted a few at a time while others run."""
    waiting, numbers = list(requests), []
    while waiting or engine.is_busy:
        for _ in range(min(2, len(waiting))):
            numbers.append(engine.submit(waiting.pop(0)))
        engine.turn()
    return [engine.collect(number).tokens for number in numbers]


def engine_of(model, **how) -> Engine:
    return Engine(model, **{"slots": 3, "capacity": 64, "page": 8} | how)


@pytest.mark.parametrize(
    ("pattern", "pages"),
    [
        ("full", None),
        ("full", 24),
        pytest.param("gdn window", None, marks=pytest.mark.nightly),
        pytest.param("gdn full", 20, marks=pytest.mark.slow),
        pytest.param("mamba2 full", 24, marks=pytest.mark.nightly),
        pytest.param("mla", 24, marks=pytest.mark.nightly),
        pytest.param("nsa moba", 24, marks=pytest.mark.nightly),
    ],
)
def test_every_request_gets_what_generate_writes_alone(pattern, pages):
    model = build(pattern)
    engine, requests = engine_of(model, pages=pages), mixed_requests(10)
    written = serve(engine, requests)
    wanted = [alone(model, request) for request in requests]
    assert written == wanted
    assert len({tuple(tokens[:1]) for tokens in wanted}) > 3  # texts that can be mixed up
    assert any(tokens[-1] in (STOP, 9) for tokens in wanted)
    if engine.pages is not None:
        assert engine.pages.available == pages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "sizes", "how"),
    [
        ("full", {"loops": 2, "exit_gate": True}, {"exit": "gate:0.9"}),
        ("full", {}, {"sparse": "window:16"}),
        ("full gdn", {"loops": 2, "feed_forwards": "moe swiglu"}, {}),
        ("full", {"loops": 2, "recursion": "token", "residual_gate": False}, {}),
    ],
    ids=["exit", "sparse", "experts", "recursion"],
)
def test_options_of_models_and_of_decoding_are_served(pattern, sizes, how):
    model, requests = build(pattern, **sizes), mixed_requests(8)
    assert serve(engine_of(model, **how), requests) == [alone(model, r, **how) for r in requests]


@pytest.mark.slow
def test_in_bfloat16_too_neighbours_change_nothing():
    engine, requests = engine_of(build("gdn full", dtype="bfloat16")), mixed_requests(8)
    by_themselves = [serve(engine, [request])[0] for request in requests]
    assert serve(engine, requests) == by_themselves


def test_neighbours_change_nothing_and_a_wrong_key_would():
    model, request = build("full"), mixed_requests(8)[5]
    engine = engine_of(model)
    [by_itself] = serve(engine, [request])
    crowd = mixed_requests(8, seed=1)
    assert serve(engine, [*crowd[:4], request, *crowd[4:]])[4] == by_itself
    assert serve(engine, [dataclasses.replace(request, seed=99)]) != [by_itself]


def program_count():
    functions = (programs.read, programs.insert, programs.step, programs.load, programs.keep)
    return sum(function._cache_size() for function in functions)


def test_an_engine_has_few_programs():
    before = program_count()
    engine_of(build("full", width=20), pages=24).warm()
    assert program_count() - before == len([8, 2, 1]) + 4  # to read; insert, step, load, keep


@pytest.mark.parametrize("pages", [None, 24])
def test_requests_of_all_kinds_compile_nothing(pages):
    engine, compiled = engine_of(build("full"), pages=pages), []
    engine.warm()
    before = program_count()
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if "backend_compile" in name else None
    )
    try:
        serve(engine, mixed_requests(12))
        assert program_count() == before
        assert not compiled
        jax.jit(lambda x: x * 3.25 + 1)(np.ones(3))  # the control
        assert compiled
    finally:
        jax.monitoring.clear_event_listeners()


@pytest.mark.parametrize(
    "pattern", ["full", pytest.param("gdn window full", marks=pytest.mark.slow)]
)
def test_prompts_with_the_same_beginning_are_read_once_and_share_pages(pattern):
    model = build(pattern)
    engine = engine_of(model, pages=12)
    prompt = tuple(range(12))
    requests = [Request((*prompt, last), 5, temperature=1.0, seed=last) for last in range(3)]
    first = engine.submit(requests[0])
    while engine.is_busy:
        engine.turn()
    others = [engine.submit(request) for request in requests[1:]]
    engine.turn()
    assert [engine.progress[n].shared for n in (first, *others)] == [0, 8, 8]
    assert engine.pages is not None
    assert engine.pages.available == 12 - 1 - 2 * 2  # one page of both, two of each
    while engine.is_busy:
        engine.turn()
    for number, request in zip((first, *others), requests, strict=True):
        assert engine.progress[number].tokens == alone(model, request)
    assert engine.pages.available == 12


def test_a_prefix_that_differs_in_one_token_is_not_shared():
    engine = engine_of(build("full"), pages=12)
    for prompt in ((1, *range(15)), (2, *range(15))):
        serve(engine, [Request(prompt, 2)])
        assert engine.pages is not None
    assert len(engine.pages.known) == 4  # two pages of each


def test_a_page_table_gives_each_page_once_and_forgets_the_oldest():
    table = PageTable(pages=4, page=2)
    first, second = (table.reserve(prompt, 1) for prompt in ((1, 2, 3), (4, 5, 6)))
    assert first
    assert second
    assert not {*first.pages} & {*second.pages}
    assert table.reserve((7, 8, 9), 1) is None
    for lease, prompt in ((first, (1, 2, 3)), (second, (4, 5, 6))):
        lease.states[0] = ()
        table.publish(lease, prompt)
        table.release(lease)
    again = table.reserve((4, 5, 6), 1)
    assert again
    assert again.shared == 1
    assert again.pages[0] == second.pages[0]
    assert table.reserve((7, 8, 9), 1) is not None  # in place of the first
    assert table.forgotten == 1
    assert not table.available


def test_cancelled_requests_free_their_rows_at_once():
    model = build("full")
    engine, requests = engine_of(model, slots=1, pages=8), mixed_requests(3)
    numbers = [engine.submit(dataclasses.replace(r, length=20, stop_tokens=())) for r in requests]
    for _ in range(4):
        engine.turn()
    engine.cancel(numbers[0])
    engine.cancel(numbers[1])  # it has not begun
    while engine.is_busy:
        engine.turn()
    reasons = [engine.progress[number].reason for number in numbers]
    assert reasons == ["cancelled", "cancelled", "length"]
    last = dataclasses.replace(requests[2], length=20, stop_tokens=())
    assert engine.progress[numbers[2]].tokens == alone(model, last)
    assert engine.pages is not None
    assert engine.pages.available == 8


@pytest.mark.slow
def test_a_row_leaks_nothing_to_its_next_tenant():
    """NaN everywhere in the old tenant's cache, and pages full of it."""
    model, requests = build("gdn full"), mixed_requests(6)
    engine = engine_of(model, slots=2, pages=16)
    wanted = serve(engine, requests[:3])
    engine._batch = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x, engine._batch
    )
    engine.pages = PageTable(16, 8)
    assert serve(engine, requests[:3]) == wanted


def test_prompts_read_on_one_device_are_written_on_another():
    model, requests = build("full"), mixed_requests(6)
    engine = engine_of(model, prefill_device=jax.devices()[1])
    assert serve(engine, requests) == [alone(model, request) for request in requests]
    assert engine.sent_bytes == len(requests) * cache_bytes_per_sequence(model.config, 64)
    assert jax.tree.leaves(engine._batch)[0].devices() == {jax.devices()[0]}


@pytest.mark.parametrize("budget", [1, 6, None])
def test_every_budget_reads_the_same_texts(budget):
    model, requests = build("full"), mixed_requests(4)
    engine = engine_of(model, scheduler=Scheduler(budget))
    assert serve(engine, requests) == [alone(model, request) for request in requests]


def test_what_does_not_fit_is_refused_in_one_line():
    model = build("full")
    engine = engine_of(model)
    refused = [
        (lambda: Request((), 1), "prompt: got no token"),
        (lambda: Request((1,), 0), "length: got 0"),
        (lambda: Request((1,), 1, temperature=float("nan")), "temperature must be a finite"),
        (lambda: Request((1,), 1, temperature=-1.0), "temperature must be finite"),
        (lambda: engine.submit(Request((50,), 1)), "prompt: got token 50"),
        (lambda: engine.submit(Request((1,), 1, stop_tokens=(-1,))), "stop_tokens: got token -1"),
        (lambda: engine.submit(Request((1,) * 60, 5)), "65 in all; wanted at most 64"),
        (lambda: engine_of(model, page=12), "page: got 12"),
        (lambda: engine_of(model, capacity=65), "capacity: got 65"),
        (lambda: engine_of(model, pages=7), "pages: got 7"),
        (lambda: engine_of(build("gdn"), pages=8), "pages: no cache"),
        (lambda: engine_of(model, pages=8, sparse="window:16"), "sparse:"),
        (lambda: Scheduler(0), "budget: got 0"),
    ]
    for call, words in refused:
        with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
            call()
        assert words in str(caught.value)
