"""The routes, and the limits of what is accepted."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from toolkit.serving.endpoint.metrics import Metrics
from toolkit.serving.endpoint.protocol import Call, RefusedError, parsed
from toolkit.serving.endpoint.text import TextStream, Words
from toolkit.serving.endpoint.worker import QueueFullError, StoppedError, Ticket, Worker
from toolkit.serving.engine import Engine
from toolkit.serving.requests import Written

BODY_SECONDS = 30.0
OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")
DONE = b"data: [DONE]\n\n"


class Service:
    """A model behind the protocol.

    Args:
        engine: runs in a thread of its own from the application's start to its end.
        words: text to tokens.
        name: of the model, as clients ask for it.
        longest_queue: requests that may wait for a row; the next is answered with 429.
        most_bytes: of a body; a longer one is answered with 413.
        hosts: what a browser may call this server; other names are refused, so that no page can
            reach a local server under its own name.
    """

    def __init__(
        self, engine: Engine, words: Words, *, name: str, longest_queue: int = 64,
        most_bytes: int = 1 << 20, hosts: tuple[str, ...] = OWN_NAMES,
    ) -> None:  # fmt: skip
        self.engine, self.words, self.name, self.most_bytes = engine, words, name, most_bytes
        self.metrics = Metrics(engine)
        self.worker = Worker(engine, self.metrics, longest_queue=longest_queue)
        self.is_stopping: Callable[[], bool] = lambda: False
        routes = [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
        ]
        only = Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))
        self.app = Starlette(routes=routes, middleware=[only], lifespan=self.lifespan)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """The engine's thread lives as long as the application."""
        self.worker.start()
        yield
        self.worker.stop()
        await asyncio.to_thread(self.worker.join)

    async def models(self, request: HTTPRequest) -> Response:
        """The one model that is served."""
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "toolkit"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, request: HTTPRequest) -> Response:
        """200 while requests are taken."""
        is_well = self.worker.is_alive() and not self.is_stopping()
        return JSONResponse({"ok": is_well}, 200 if is_well else 503)

    async def show_metrics(self, request: HTTPRequest) -> Response:
        """Prometheus's text format."""
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4")

    async def complete(self, request: HTTPRequest) -> Response:
        """Continue a text."""
        return await self._answer(request, is_chat=False)

    async def chat(self, request: HTTPRequest) -> Response:
        """Answer in a conversation."""
        return await self._answer(request, is_chat=True)

    async def _answer(self, request: HTTPRequest, *, is_chat: bool) -> Response:
        retry = {"Retry-After": "1"}
        try:
            if self.is_stopping():
                raise StoppedError("the server is shutting down")
            body = await self._body(request)
            call = parsed(
                body, is_chat=is_chat, model=self.name, words=self.words,
                capacity=self.engine.capacity,
            )  # fmt: skip
            running = _Running(self.worker, call, self.words)
        except RefusedError as error:
            return self._refused(error.status, str(error), error.param)
        except QueueFullError as error:
            return self._refused(429, str(error), headers=retry)
        except StoppedError as error:
            return self._refused(503, str(error), headers=retry)
        if call.is_stream:
            return _EventStream(running)
        return await self._whole(request, running)

    async def _body(self, request: HTTPRequest) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RefusedError("Content-Type: wanted application/json", status=415)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > self.most_bytes:
                        wanted = f"wanted at most {self.most_bytes:,} bytes"
                        raise RefusedError(f"the body is too long; {wanted}", status=413)
        except TimeoutError:
            raise RefusedError("the body did not arrive in time", status=408) from None
        return bytes(body)

    async def _whole(self, request: HTTPRequest, running: "_Running") -> Response:
        async def gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        answer, leaving = asyncio.create_task(running.whole()), asyncio.create_task(gone())
        try:
            await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return Response(status_code=499)  # nobody reads it
            return JSONResponse(answer.result())
        except StoppedError as error:
            return self._refused(503, str(error))
        except Exception as error:
            return self._refused(500, f"the engine failed: {type(error).__name__}")
        finally:
            answer.cancel()
            leaving.cancel()
            running.close()

    def _refused(
        self, status: int, message: str, param: str | None = None, headers: Any = None
    ) -> Response:
        self.metrics.refused.labels(str(status)).inc()
        kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(status, "invalid_request_error")
        error = {"message": message, "type": kind, "param": param, "code": None}
        # Half of a surrogate pair in a name is shown as an escape.
        content = json.dumps({"error": error})
        return Response(content, status, headers, media_type="application/json")


class _Running:
    """The requests of one call at the worker, and the text that comes of them."""

    def __init__(self, worker: Worker, call: Call, words: Words) -> None:
        self.call, self._worker, self._written = call, worker, 0
        self._events: asyncio.Queue[tuple[int, Written | Exception]] = asyncio.Queue()
        self._texts = [TextStream(words.tokenizer, call.stops) for _ in call.requests]
        self._tickets: list[Ticket] = []
        loop = asyncio.get_running_loop()
        try:
            for index, request in enumerate(call.requests):

                def on_token(event: Written | Exception, index: int = index) -> None:
                    if not loop.is_closed():
                        loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

                self._tickets.append(worker.submit(request, on_token))
        except ValueError as error:
            self.close()
            raise RefusedError(str(error), str(error).partition(":")[0]) from None
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Cancel what has not ended."""
        for ticket in self._tickets:
            self._worker.cancel(ticket)

    async def pieces(self) -> AsyncIterator[tuple[int, str, str | None]]:
        """(choice, text, reason) as they come; the reason with the last of each choice."""
        left = {*range(len(self._tickets))}
        while left:
            index, event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if index not in left:
                continue
            self._written += 1
            text, reason = self._texts[index], event.reason
            piece = "" if reason == "stop" else text.push(event.token)
            if reason is not None:
                piece += text.finish()
            if text.is_stopped and reason is None:
                self._worker.cancel(self._tickets[index])
            if text.is_stopped:
                reason = "stop"
            if reason is not None:
                left.remove(index)
            if piece or reason is not None:
                yield index, piece, reason

    async def whole(self) -> dict[str, Any]:
        """The answer in one object."""
        texts = ["" for _ in self._tickets]
        reasons: list[str | None] = [None for _ in self._tickets]
        async for index, piece, reason in self.pieces():
            texts[index] += piece
            reasons[index] = reason
        pairs = enumerate(zip(texts, reasons, strict=True))
        choices = [self.call.choice(index, text, reason) for index, (text, reason) in pairs]
        return self.call.answer(choices, self.call.usage(self._written))

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        begun: set[int] = set()
        try:
            async for index, piece, reason in self.pieces():
                choice = self.call.choice(index, piece, reason, is_first=index not in begun)
                begun.add(index)
                yield _event(self.call.answer([choice]))
            if self.call.wants_usage:
                yield _event(self.call.answer([], self.call.usage(self._written)))
            yield DONE
        except StoppedError as error:
            yield _event({"error": {"message": str(error), "type": "server_error"}})
        except asyncio.CancelledError:
            raise
        except Exception as error:
            message = f"the engine failed: {type(error).__name__}"
            yield _event({"error": {"message": message, "type": "server_error"}})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


class _EventStream(StreamingResponse):
    """Server-sent events whose requests end when the client has left."""

    def __init__(self, running: _Running) -> None:
        super().__init__(running.events(), media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-store"
        self._running = running

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.close()
