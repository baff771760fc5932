"""The explorer's page, saved as one file or served to this machine only.

The server listens on 127.0.0.1 and answers two paths, `/` and `/plan`; no file is ever looked up.
A page of another site can send requests here through a name of its own that resolves to 127.0.0.1,
so a request must name this host, which such a page cannot fake.

One thread serves one connection, which ends with its answer. A client that does not send its
request in time loses its connection, so that a few slow clients cannot block the others.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from headwise.errors import BudgetError, HeadwiseError, reason_of
from headwise.progress import Progress, silent
from headwise.reporting.explorer.answers import (
    LIVE_STEPS,
    Answers,
    Choice,
    levels,
    model_facts,
    saved_grid,
)
from headwise.reporting.template import page_text

ADDRESS = "127.0.0.1"
READ_SECONDS = 10.0  # for a request to arrive, and for an answer to be taken
MOST_THREADS = 32
MOST_FIELDS = 16  # of a query
# A live page may talk to the server it came from, a saved one to nobody.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "connect-src {connect}; base-uri 'none'; form-action 'none'"
)


def live_page(answers: Answers, where: str) -> str:
    """The page that asks its server for every plan."""
    steps = {mlps: levels(answers, LIVE_STEPS[mlps], mlps) for mlps in answers.mlps}
    return _page({**model_facts(answers, where), "levels": steps}, connect="'self'")


def saved_page(answers: Answers, where: str, step: float, progress: Progress = silent) -> str:
    """The page that holds all its plans."""
    grid = saved_grid(answers, step, progress)
    return _page({**model_facts(answers, where), **grid}, connect="'none'")


def _page(facts: dict[str, Any], connect: str) -> str:
    return page_text("explorer.html", facts=facts, policy=_POLICY.format(connect=connect))


class Server(ThreadingHTTPServer):
    """Serves one page and the answers of one profile."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256  # connections that the kernel holds while all threads are busy

    def __init__(self, answers: Answers, page: str, port: int = 0) -> None:
        self.answers, self.page = answers, page.encode()
        self._free = threading.Semaphore(MOST_THREADS)
        self._unasked: dict[Any, float] = {}  # connections without a request yet: when they end
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise HeadwiseError(
                f"port {port} cannot be served ({reason}); choose another with --port, or 0 for "
                "any free one."
            ) from error

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self.server_port}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names a request may call this server by."""
        return f"{ADDRESS}:{self.server_port}", f"localhost:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection when a thread is free; until then the others wait in the kernel."""
        while not self._free.acquire(timeout=0.1):
            self.service_actions()
        self._unasked[request] = time.monotonic() + READ_SECONDS
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.request_arrived(request)
            self._free.release()

    def request_arrived(self, request: Any) -> None:
        """Stop the timeout of a connection whose request has arrived."""
        self._unasked.pop(request, None)

    def service_actions(self) -> None:
        """End connections whose request does not arrive."""
        now = time.monotonic()
        for request, end in list(self._unasked.items()):
            if end < now:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes its connection early is not an error."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = READ_SECONDS
    # An answer leaves at once and in one piece; else its second half waits 40 ms for a receipt.
    disable_nagle_algorithm = True
    wbufsize = -1
    server_version, sys_version = "headwise", ""

    def do_GET(self) -> None:
        """The page or a plan."""
        self.server.request_arrived(self.request)
        paths: dict[str, Callable[[str], None]] = {"/": self._page, "/plan": self._plan}
        try:
            parts = urlsplit(self.path)
        except ValueError:
            self._say(HTTPStatus.BAD_REQUEST, "the address is not valid.")
            return
        if self.headers.get("Host") not in self.server.hosts:
            self._say(HTTPStatus.FORBIDDEN, f"this server is {self.server.url} only.")
        elif parts.path not in paths:
            self._say(HTTPStatus.NOT_FOUND, "there is only the page at /.")
        else:
            paths[parts.path](parts.query)

    def _page(self, query: str) -> None:
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)

    def _plan(self, query: str) -> None:
        try:
            given = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=MOST_FIELDS))
            answer = self.server.answers.answer(Choice.parse(given))
        except BudgetError as error:  # a fair question: there is no such plan
            self._say(HTTPStatus.OK, str(error))
        except (HeadwiseError, ValueError) as error:
            self._say(HTTPStatus.BAD_REQUEST, str(error))
        except Exception as error:
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, reason_of(error))
        else:
            self._send(HTTPStatus.OK, "application/json", json.dumps(answer).encode())

    def _say(self, status: HTTPStatus, sentence: str) -> None:
        self._send(status, "application/json", json.dumps({"error": sentence}).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")  # an idle connection would hold a thread
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """The library prints nothing."""
