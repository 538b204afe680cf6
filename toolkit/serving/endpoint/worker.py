"""The thread that runs the engine: requests come in by a queue, tokens go out by callbacks."""

import queue
import threading
from collections.abc import Callable
from typing import Any

from toolkit.serving.endpoint.metrics import Metrics
from toolkit.serving.engine import Engine
from toolkit.serving.requests import Request, Written

OnToken = Callable[[Written | Exception], Any]


class QueueFullError(Exception):
    """More requests wait than may."""


class StoppedError(Exception):
    """The engine takes no more requests."""


class Ticket:
    """A request at the worker; its number once the engine has it."""

    def __init__(self, request: Request, on_token: OnToken) -> None:
        self.request, self.on_token = request, on_token
        self.number: int | None = None
        self.is_over = False


class Worker(threading.Thread):
    """Runs an engine until it is stopped; `submit` and `cancel` may be called from any thread."""

    def __init__(self, engine: Engine, metrics: Metrics, *, longest_queue: int) -> None:
        super().__init__(name="engine", daemon=True)
        self.engine, self.metrics = engine, metrics
        self.most = longest_queue + engine.slots
        self.failure: Exception | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: set[Ticket] = set()
        self._by_number: dict[int, Ticket] = {}
        self._lock = threading.Lock()
        self._is_stopping = False

    def submit(self, request: Request, on_token: OnToken) -> Ticket:
        """Hand in a request; ValueError if it does not fit, else one of the errors above."""
        self.engine.check(request)
        ticket = Ticket(request, on_token)
        with self._lock:
            if self._is_stopping or self.failure is not None:
                raise StoppedError("the engine has stopped" if self.failure else "shutting down")
            if len(self._open) >= self.most:
                raise QueueFullError(f"{self.most} requests run or wait; try again later")
            self._open.add(ticket)
        self._inbox.put(lambda: self._begin(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for this request any more."""
        if not ticket.is_over:
            self._inbox.put(lambda: self._cancel(ticket))

    def stop(self) -> None:
        """End after the current turn; requests that go on get a `StoppedError`."""
        with self._lock:
            self._is_stopping = True
        self._inbox.put(lambda: None)

    def _begin(self, ticket: Ticket) -> None:
        if not ticket.is_over:
            ticket.number = self.engine.submit(ticket.request)
            self._by_number[ticket.number] = ticket

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.number is not None and not ticket.is_over:
            self.engine.cancel(ticket.number)
            self._close(ticket)
        else:
            self._over(ticket)

    def _close(self, ticket: Ticket) -> None:
        assert ticket.number is not None
        self.metrics.ended(self.engine.collect(ticket.number))
        del self._by_number[ticket.number]
        self._over(ticket)

    def _over(self, ticket: Ticket) -> None:
        ticket.is_over = True
        with self._lock:
            self._open.discard(ticket)

    def run(self) -> None:
        """The thread's loop."""
        try:
            while not self._is_stopping:
                self._receive()
                for written in self.engine.turn():
                    ticket = self._by_number[written.number]
                    if written.reason is not None:
                        self._close(ticket)
                    ticket.on_token(written)
        except Exception as error:
            self.failure = error
        ending = self.failure or StoppedError("the server was stopped")
        with self._lock:
            self._is_stopping, rest = True, list(self._open)
        for ticket in rest:
            ticket.on_token(ending)

    def _receive(self) -> None:
        """What has come in; waits for something while there is nothing to do."""
        if not self._by_number:
            self._inbox.get()()
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return
