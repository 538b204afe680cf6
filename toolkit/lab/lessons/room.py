"""A class that hands in live: a page on the teacher's machine, to which boxes of lessons post.

    learner: lesson.hand_in() --POST /CODE--> Room --JSON--> folder --gather--> page of the teacher

Only what a page holds as data is kept, never its HTML, and the page made of it escapes every word.
Learners without a connection hand in files, into the same folder.
"""

import hashlib
import json
import secrets
import socket
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from toolkit._checks import checked
from toolkit.lab.lessons.pages import MOST_BYTES, gather, read_page_text

_LETTERS = "ABCDEFGHJKMNPQRSTUVWXYZ23456789"  # none that look alike
_HERE = ("127.0.0.1", "::1")
_REFRESH_SECONDS = 10


class Room(ThreadingHTTPServer):
    """A server that takes learners' pages and shows the room to the machine it runs on.

    Args:
        folder: where the progress is kept, one file per learner and lesson.
        host: the address to listen on; all of this machine's by default.
        port: the port; 0 takes a free one.

    Attributes:
        address: what learners enter, with the join code.
        page_address: what the teacher opens, on this machine.

    Example:
        >>> room = Room("handed-in", port=0)
        >>> room.address.endswith(room.code)
        True
        >>> room.server_close()
    """

    daemon_threads = True
    request_queue_size = 128

    @checked
    def __init__(self, folder: str | Path, host: str = "0.0.0.0", port: int = 8123) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.code = "".join(secrets.choice(_LETTERS) for _ in range(5))
        self._writing, self._is_new, self._page = threading.Lock(), True, b""
        super().__init__((host, port), _Handler)
        own = _own_address() if host == "0.0.0.0" else host
        self.address = f"http://{own}:{self.server_port}/{self.code}"
        self.page_address = f"http://127.0.0.1:{self.server_port}/"

    def take(self, text: str) -> str:
        """Keep the progress in a learner's page; the answer for the learner. ValueError if none."""
        data = read_page_text(text, Path("the page"))
        who = data["learner_id"] or data["learner"]
        name = hashlib.sha256(f"{who} {data['lesson']}".encode()).hexdigest()[:24]
        with self._writing:
            (self.folder / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")
            self._is_new = True
        return f"The room has your page on {data['lesson'].replace('_', ' ')}."

    def page(self) -> bytes:
        """The page of the room, made anew if somebody has handed in."""
        with self._writing:
            if self._is_new:
                try:
                    self._page = gather(self.folder).read_bytes()
                except ValueError:  # nobody has handed in
                    words = f"Nobody has handed in yet. Learners enter {self.address}"
                    self._page = f"<!doctype html><title>The room</title><p>{words}</p>".encode()
                self._is_new = False
            return self._page


class _Handler(BaseHTTPRequestHandler):
    server: Room
    timeout = 30

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not secrets.compare_digest(self.path.encode(), f"/{self.server.code}".encode()):
            self._answer(403, "The join code is another one.")
        elif not length.isdigit() or int(length) > MOST_BYTES:
            self._answer(413, f"A page has at most {MOST_BYTES:,} bytes.")
        else:
            try:
                self._answer(200, self.server.take(self.rfile.read(int(length)).decode()))
            except ValueError:
                self._answer(400, "This is no page of a lesson.")

    def do_GET(self) -> None:
        if self.client_address[0] not in _HERE:
            self._answer(403, "The room is shown on the teacher's machine only.")
        else:
            self._answer(200, self.server.page(), "text/html")

    def _answer(self, status: int, body: str | bytes, kind: str = "text/plain") -> None:
        content = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", "default-src 'none'; img-src data:; "
                         "style-src 'unsafe-inline'")  # fmt: skip
        self.send_header("Refresh", str(_REFRESH_SECONDS))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Say nothing: what is asked for is what a stranger typed."""


def send(page: Path, address: str) -> str:
    """Post a learner's page to a room; its answer. ValueError if the room refuses it."""
    if not address.startswith("http://"):
        raise ValueError(
            f"room: got {address!r}, wanted an address such as http://10.0.0.5:8123/CODE"
        )
    request = urllib.request.Request(address, data=page.read_bytes(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read(1000).decode()
    except urllib.error.HTTPError as refused:
        with refused:
            raise ValueError(f"room: {refused.read(1000).decode()}") from None
    except OSError as error:
        raise OSError(f"room: {address} cannot be reached ({error}); hand in the page") from None


def _own_address() -> str:
    """This machine's address in its network; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]
