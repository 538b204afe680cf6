"""A service on a port, with uvicorn."""

import asyncio
import contextlib
import socket
import sys

import uvicorn

from toolkit.serving.endpoint.app import OWN_NAMES, Service
from toolkit.serving.endpoint.text import Words
from toolkit.serving.engine import Engine

KEEP_ALIVE_SECONDS = 5
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def server_of(service: Service, *, grace_seconds: int = 30) -> uvicorn.Server:
    """A server that on SIGTERM or Ctrl-C takes no more requests and lets those under way end."""
    config = uvicorn.Config(
        service.app,
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=grace_seconds,
        limit_concurrency=service.worker.most + 64,
    )
    server = uvicorn.Server(config)
    service.is_stopping = lambda: server.should_exit
    return server


def run(
    engine: Engine, words: Words, *, name: str, host: str, port: int, longest_queue: int,
    most_bytes: int, grace_seconds: int,
) -> None:  # fmt: skip
    """Serve until a signal."""
    # Bound first: a port that is taken is reported before minutes of compilation.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    service = Service(
        engine, words, name=name, longest_queue=longest_queue, most_bytes=most_bytes,
        hosts=OWN_NAMES if host in LOOPBACK else ("*",),
    )  # fmt: skip
    server = server_of(service, grace_seconds=grace_seconds)
    print(f"compiling the programs of {name} ...", file=sys.stderr, flush=True)
    engine.warm()
    address = f"[{host}]" if ":" in host else host
    url = f"http://{address}:{listener.getsockname()[1]}/v1"
    print(f"serving {name} at {url}; stop with Ctrl-C", flush=True)
    with contextlib.suppress(KeyboardInterrupt), listener:
        asyncio.run(server.serve(sockets=[listener]))
