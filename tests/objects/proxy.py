"""Between a client and a server: a thread that lets requests through, refuses them, or says nothing at all."""

from __future__ import annotations

import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


class Proxy:
    """Use as a context. ``mood`` may be changed at any time: ``well``, ``unconditional`` (501 for conditional writes),
    ``silent`` (takes requests and never answers), ``busy`` (503), ``keeping`` (503 for removals), ``losing`` (loses the
    answer to one conditional write, and then is ``well``)."""

    def __init__(self, endpoint: str) -> None:
        self.mood = "well"
        self.archived: str | None = None
        """End of the names that may be listed, and not be read (403)."""
        self.refused = 0
        self._upstream = urlsplit(endpoint).netloc
        self._over = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                conditional = self.headers.get("if-none-match") or self.headers.get("if-match")
                while proxy.mood == "silent" and not proxy._over.wait(0.05):
                    pass
                removal = self.command == "DELETE" or self.path.endswith("?delete")
                if self.command == "GET" and proxy.archived and self.path.endswith(proxy.archived):
                    return self.answer(403, {}, b"")
                refuse = {"busy": True, "unconditional": conditional, "keeping": removal}
                if refuse.get(proxy.mood):
                    proxy.refused += 1
                    return self.answer(501 if proxy.mood == "unconditional" else 503, {}, b"")
                upstream = http.client.HTTPConnection(proxy._upstream, timeout=60)
                upstream.request(self.command, self.path, body, dict(self.headers.items()))
                reply = upstream.getresponse()
                if proxy.mood == "losing" and conditional:
                    proxy.mood, self.close_connection = "well", True
                    return None
                self.answer(reply.status, dict(reply.getheaders()), reply.read())
                upstream.close()

            def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                        self.send_header(name, value)
                length = next((v for k, v in headers.items() if k.lower() == "content-length"), len(body))
                self.send_header("Content-Length", str(length if self.command == "HEAD" else len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        time.sleep(0.1)
        self._server.shutdown()
        self._server.server_close()
