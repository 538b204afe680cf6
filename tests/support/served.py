"""A small model behind HTTP on loopback, and a client of the standard library for it."""

import contextlib
import http.client
import json
import socket
import threading
import time
from typing import Any

from flax import nnx

from toolkit.language import SpecialTokens
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.serving import Engine

NAME = "tiny"
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
)


def tiny_model() -> Any:
    """A model of bytes whose texts depend on what it reads."""
    config = LoopedConfig.tiny("full", 1, width=16, heads=2, tied_embedding=False)
    model: Any = LoopedLM(config, rngs=nnx.Rngs(0))
    model.unembedding[...] = 2 * model.unembedding[...]
    return model


@contextlib.contextmanager
def served(model, *, stop=None, queue=64, grace=5, **how):
    """A running service, with its port as an attribute."""
    from toolkit.serving.endpoint.app import Service
    from toolkit.serving.endpoint.server import server_of
    from toolkit.serving.endpoint.text import Words

    words = Words(None, SpecialTokens(None, stop), TEMPLATE, {})
    engine = Engine(model, **{"slots": 3, "capacity": 64, "page": 8} | how)
    engine.warm()
    service: Any = Service(engine, words, name=NAME, longest_queue=queue, most_bytes=100_000)
    service.server = server_of(service, grace_seconds=grace)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        service.port = listener.getsockname()[1]
        run = {"sockets": [listener]}
        thread = threading.Thread(target=service.server.run, kwargs=run, daemon=True)
        thread.start()
        wait_until(lambda: service.server.started)
        yield service
        service.server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()
    assert not service.worker.is_alive()


def wait_until(is_so, seconds=60.0):
    """Wait for something that another thread does."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def ask(port, path, body=None, *, headers=None) -> tuple[int, Any]:
    """POST a body, or GET; status and what came back, read as JSON if it is."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    with contextlib.closing(connection):
        sent = {"Content-Type": "application/json"} | (headers or {})
        connection.request("GET" if body is None else "POST", path, raw, sent)
        answer = connection.getresponse()
        text = answer.read().decode()
    is_json = answer.getheader("Content-Type", "").startswith("application/json")
    return answer.status, json.loads(text) if is_json else text


def complete(port, prompt="One", **fields) -> Any:
    """Choices of a completion that must succeed."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": 8, "seed": 0} | fields
    status, answer = ask(port, "/v1/completions", body)
    assert status == 200, answer
    return answer


def events(text) -> list[Any]:
    """The objects of server-sent events, up to the last."""
    *lines, done = [line for line in text.split("\n") if line]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]
