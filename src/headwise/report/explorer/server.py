"""The explorer's server: one page and its plans, for this machine only.

It listens on 127.0.0.1 and answers two paths, `/` and `/plan`; no file is ever looked up. A page of
another site can send requests here through a name of its own that resolves to 127.0.0.1, so a
request must name this host, which such a page cannot fake.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from headwise.errors import BudgetError, HeadwiseError
from headwise.report.explorer.answers import Answers, Choice

ADDRESS = "127.0.0.1"


class Server(ThreadingHTTPServer):
    """Serves one page and the answers of one profile."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, answers: Answers, page: str, port: int = 0) -> None:
        self.answers, self.page = answers, page.encode()
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

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 60
    # An answer leaves at once and in one piece; else its second half waits 40 ms for a receipt.
    disable_nagle_algorithm = True
    wbufsize = -1
    server_version, sys_version = "headwise", ""

    def do_GET(self) -> None:
        """The page or a plan."""
        parts = urlsplit(self.path)
        paths: dict[str, Callable[[str], None]] = {"/": self._page, "/plan": self._plan}
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
            words = dict(parse_qsl(query, keep_blank_values=True))
            answer = self.server.answers.answer(Choice.parse(words))
        except BudgetError as error:  # a fair question: there is no such plan
            self._say(HTTPStatus.OK, str(error))
            return
        except HeadwiseError as error:
            self._say(HTTPStatus.BAD_REQUEST, str(error))
            return
        self._send(HTTPStatus.OK, "application/json", json.dumps(answer).encode())

    def _say(self, status: HTTPStatus, sentence: str) -> None:
        self._send(status, "application/json", json.dumps({"error": sentence}).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """The library prints nothing."""
