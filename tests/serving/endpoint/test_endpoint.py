"""The endpoint speaks OpenAI's protocol on loopback and refuses the rest with one clear status."""

import itertools
import json
import socket
import threading

import jax
import jax.numpy as jnp
import pytest
from served import NAME, ask, complete, events, served, tiny_model, wait_until

from toolkit.looped import generate
from toolkit.serving.endpoint.text import TextStream

pytest.importorskip("uvicorn")
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def service():
    with served(tiny_model(), pages=24) as service:
        yield service


def alone(prompt, length, seed=0, temperature=1.0) -> str:
    tokens = jnp.asarray([list(prompt.encode())])
    how = {"temperature": temperature, "key": jax.random.key(seed)}
    return bytes(generate(tiny_model(), tokens, length, **how)[0].tolist()).decode(errors="replace")


def test_a_completion_is_what_generate_writes(service):
    for temperature in (0.0, 1.0):
        answer = complete(service.port, "One", max_tokens=12, temperature=temperature)
        [choice] = answer["choices"]
        assert choice["text"] == alone("One", 12, temperature=temperature)
        assert choice["finish_reason"] == "length"
        counts = {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
        assert answer["usage"] == counts
        assert (answer["object"], answer["model"]) == ("text_completion", NAME)


def test_prompts_and_choices_have_seeds_of_their_own(service):
    answer = complete(service.port, ["One", "Two"], n=2, seed=5)
    texts = [choice["text"] for choice in answer["choices"]]
    wanted = [alone(p, 8, 5 + i) for i, p in enumerate(("One", "One", "Two", "Two"))]
    assert texts == wanted
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 6
    same = complete(service.port, list(b"One"), seed=5)
    assert same["choices"][0]["text"] == wanted[0]


def test_a_stream_brings_the_same_text_and_ends_as_the_protocol_says(service):
    body = {"model": NAME, "prompt": "One", "max_tokens": 20, "seed": 3, "stream": True}
    body["stream_options"] = {"include_usage": True}
    status, text = ask(service.port, COMPLETE, body)
    *pieces, usage = events(text)
    assert status == 200
    assert len(pieces) > 5
    assert "".join(p["choices"][0]["text"] for p in pieces) == alone("One", 20, 3)
    assert [p["choices"][0]["finish_reason"] for p in pieces][-2:] == [None, "length"]
    assert usage["usage"]["completion_tokens"] == 20
    assert usage["choices"] == []


def test_a_chat_goes_through_the_template(service):
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": parts}]
    body = {"model": NAME, "messages": messages, "max_completion_tokens": 6, "seed": 1}
    status, answer = ask(service.port, CHAT, body)
    message = answer["choices"][0]["message"]
    wanted = alone("<system>Be.\n<user>Hello\n<assistant>", 6, 1)
    assert (status, message) == (200, {"role": "assistant", "content": wanted})
    _, text = ask(service.port, CHAT, body | {"stream": True})
    deltas = [piece["choices"][0]["delta"] for piece in events(text)]
    assert "".join(delta["content"] for delta in deltas) == wanted
    assert [delta.get("role") for delta in deltas[:2]] == ["assistant", None]
    del body["max_completion_tokens"]  # up to the capacity
    _, answer = ask(service.port, CHAT, body)
    assert answer["usage"]["total_tokens"] == 64


def test_stop_strings_and_stop_tokens_end_a_text(service):
    whole = alone("One", 20, 3)
    stop = whole[4:7]
    answer = complete(service.port, "One", max_tokens=20, seed=3, stop=["no such", stop])
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    wait_until(lambda: not service.engine.running)
    token = generate(tiny_model(), jnp.asarray([list(b"One")]), 20, temperature=1.0,
                     key=jax.random.key(3))[0].tolist()[5]  # fmt: skip
    with served(tiny_model(), stop=(token,)) as other:
        [choice] = complete(other.port, "One", max_tokens=20, seed=3)["choices"]
    assert choice["finish_reason"] == "stop"
    assert whole.startswith(choice["text"])
    assert len(choice["text"]) <= 5


@pytest.mark.parametrize("stops", [("aab",), ("ab", "ba"), ("b",), ("xyz",)])
def test_a_stop_string_is_found_however_it_is_cut(stops):
    for text in map("".join, itertools.product("ab", repeat=6)):
        stream = TextStream(None, stops)
        pieces = []
        for byte in text.encode():
            pieces.append(stream.push(byte))
            if stream.is_stopped:
                break
        pieces.append(stream.finish())
        places = [text.find(stop) for stop in stops if stop in text]
        assert "".join(pieces) == text[: min(places, default=len(text))]


BAD = [
    (b"", 400, "not JSON"),
    (b"\xff\xfe", 400, "not JSON"),
    (b"[1]", 400, "wanted an object"),
    (b'{"a":' * 15_000, 400, "nested too deep"),
    (b"[" * 99_000, 400, "nested too deep"),
    (b'{"seed": ' + b"9" * 5000 + b"}", 400, "not JSON"),
    (b'{"temperature": NaN}', 400, "NaN"),
    (b'{"temperature": -Infinity}', 400, "-Infinity"),
    (b" " * 100_001, 413, "100,000 bytes"),
    ({"model": None}, 400, "model: wanted"),
    ({"model": "other"}, 404, "'other' is not served"),
    ({"prompt": None}, 400, "prompt: wanted"),
    ({"prompt": ""}, 400, "prompt: got no token"),
    ({"prompt": []}, 400, "got 0 prompts"),
    ({"prompt": [1, True]}, 400, "prompt: wanted"),
    ({"prompt": [1, 256]}, 400, "token 256"),
    ({"prompt": [2**70]}, 400, "prompt: got token"),
    ({"prompt": ["a"] * 17}, 400, "wanted 1 to 16"),
    ({"prompt": "a" * 60, "max_tokens": 8}, 400, "at most 64"),
    ({"prompt": "\ud800"}, 400, "surrogate"),
    ({"\ud800": 1}, 400, "not supported"),
    ({"prompt": {"__class__": "os.system"}}, 400, "prompt: wanted"),
    ({"max_tokens": 0}, 400, "max_tokens: got 0"),
    ({"max_tokens": 1.5}, 400, "max_tokens: got 1.5"),
    ({"max_tokens": 10**30}, 400, "at most 64"),
    ({"temperature": "hot"}, 400, "temperature: got hot"),
    ({"temperature": True}, 400, "temperature: got True"),
    ({"temperature": -0.5}, 400, "temperature: got -0.5"),
    ({"temperature": 1e308}, 400, "temperature: got 1e+308"),
    ({"top_p": 0}, 400, "top_p: got 0"),
    ({"n": 99}, 400, "n: got 99"),
    ({"seed": 2**64}, 400, "seed: got"),
    ({"stop": ["a"] * 5}, 400, "stop: wanted"),
    ({"stop": [""]}, 400, "stop: wanted"),
    ({"stream": "yes"}, 400, "stream: got str"),
    ({"logprobs": 5}, 400, "logprobs: not supported"),
    ({"echo": 1}, 400, "echo: not supported"),
    ({"guided_regex": "a+"}, 400, "'guided_regex' is not supported"),
    ({"prompt": "{{ 7 * 7 }}", "template": "{{ 1 }}"}, 400, "'template' is not supported"),
]


@pytest.mark.parametrize(("body", "status", "words"), BAD, ids=range(len(BAD)))
def test_hostile_bodies_get_one_clear_status(service, body, status, words):
    if isinstance(body, dict):
        body = {"model": NAME, "prompt": "One", "max_tokens": 2} | body
    found, answer = ask(service.port, COMPLETE, body)
    assert found == status, answer
    assert words in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


def test_hostile_conversations_are_refused_and_nothing_in_them_runs(service):
    for messages, words in [
        ([], "at least one"),
        (["hi"], "role and content"),
        ([{"role": "user"}], "role and content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "role and content"),
        ([{"role": "user", "content": "a", "tool_calls": []}], "'tool_calls' is not supported"),
        ([{"role": "root", "content": "a"}], "unknown role root"),
    ]:
        status, answer = ask(service.port, CHAT, {"model": NAME, "messages": messages})
        assert (status, words in answer["error"]["message"]) == (400, True), answer
    injected = "{{ ''.__class__.__mro__ }}"
    body = {"model": NAME, "messages": [{"role": "user", "content": injected}], "max_tokens": 4}
    _, answer = ask(service.port, CHAT, body | {"seed": 0})
    written = answer["choices"][0]["message"]["content"]
    assert written == alone(f"<user>{injected}\n<assistant>", 4)


def test_methods_types_and_names_of_hosts(service):
    for path, status in (("/v1/nothing", 404), (COMPLETE, 405)):
        assert ask(service.port, path)[0] == status
    body = {"model": NAME, "prompt": "One"}
    for headers, status in (
        ({"Content-Type": "text/plain"}, 415),  # what a page of another site may send
        ({"Host": "evil.example"}, 400),  # a page that names this address its own
    ):
        assert ask(service.port, COMPLETE, body, headers=headers)[0] == status
    assert ask(service.port, "/v1/models")[1]["data"][0]["id"] == NAME
    assert ask(service.port, "/health") == (200, {"ok": True})


def test_prometheus_reads_what_was_served(service):
    def count(name):
        _, text = ask(service.port, "/metrics")
        return sum(float(line.split()[1]) for line in text.split("\n") if line.startswith(name))

    written = 'toolkit_tokens_total{kind="written"}'
    ended = 'toolkit_requests_total{reason="length"}'
    before = count(written), count(ended), count("toolkit_first_token_seconds_count")
    complete(service.port, "One", max_tokens=5)
    after = count(written), count(ended), count("toolkit_first_token_seconds_count")
    assert [b - a for a, b in zip(before, after, strict=True)] == [5, 1, 1]
    assert count("toolkit_running") == 0


def raw_request(port, fields):
    body = json.dumps({"model": NAME, "prompt": "One", "max_tokens": 40} | fields).encode()
    head = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_vanishes_frees_its_row(is_stream, service):
    turn, slow = service.engine.turn, threading.Event()

    def slowed():
        slow.wait(0.05)
        return turn()

    service.engine.turn = slowed
    try:
        connection = raw_request(service.port, {"stream": is_stream})
        wait_until(lambda: service.engine.running)
        connection.close()
        wait_until(lambda: not service.engine.running)
    finally:
        service.engine.turn = turn
    _, text = ask(service.port, "/metrics")
    assert 'toolkit_requests_total{reason="cancelled"}' in text
    assert service.engine.pages.available == 24
    raw_request(service.port, {"max_tokens": 10**9}).close()  # vanishes before its refusal
    assert ask(service.port, "/health")[0] == 200


def test_a_full_queue_pushes_back_and_a_stop_lets_requests_end():
    with served(tiny_model(), slots=1, queue=1) as service:
        turn, gate = service.engine.turn, threading.Event()

        def gated():
            gate.wait(60)
            return turn()

        service.engine.turn = gated
        running = [raw_request(service.port, {"seed": seed}) for seed in range(2)]
        wait_until(lambda: len(service.worker._open) == 2)
        status, answer = ask(service.port, COMPLETE, {"model": NAME, "prompt": "One"})
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        assert ask(service.port, "/health")[0] == 200
        idle = socket.create_connection(("127.0.0.1", service.port))  # open before the stop
        service.is_stopping = lambda: True
        assert ask(service.port, COMPLETE, {"model": NAME, "prompt": "One"})[0] == 503
        assert ask(service.port, "/health")[0] == 503
        service.server.should_exit = True
        gate.set()
        for connection in running:
            with connection:
                answer = b"".join(iter(lambda c=connection: c.recv(4096), b""))
            assert answer.startswith(b"HTTP/1.1 200")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 40
        idle.close()


def test_an_engine_that_fails_says_so_to_all():
    with served(tiny_model()) as service:

        def broken():
            raise RuntimeError("a broken device")

        service.engine.turn = broken
        body = {"model": NAME, "prompt": "One"}
        assert ask(service.port, COMPLETE, body)[0] == 500
        assert ask(service.port, COMPLETE, body)[0] == 503
        assert ask(service.port, "/health")[0] == 503


def test_the_openai_client_works_unchanged(service):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{service.port}/v1", api_key="none")
    with client:
        assert [model.id for model in client.models.list()] == [NAME]
        how = {"model": NAME, "prompt": "One", "max_tokens": 8, "seed": 4}
        text = client.completions.create(**how).choices[0].text
        pieces = [p.choices[0].text for p in client.completions.create(**how, stream=True)]
        assert (text, "".join(pieces)) == (alone("One", 8, 4),) * 2
        talk = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "seed": 4}
        answer = client.chat.completions.create(**talk, max_tokens=8).choices[0].message
        assert (answer.role, answer.content) == ("assistant", alone("<user>Hi\n<assistant>", 8, 4))
        with pytest.raises(openai.BadRequestError, match="temperature: got 5"):
            client.completions.create(**how, temperature=5)
