"""An HTTP server on loopback with scripted responses, because a real server does not fail on demand."""

import http.server
import json
import socket
import threading
from collections.abc import Callable
from typing import Any


class Server:
    """HTTP server that responds with `answer(path, body)` and records the requests in `got`."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.closed = threading.Event()
        self.answer: Callable[[str, dict[str, Any]], Any] = lambda path, body: {}
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size) or b"{}")
                server.got.append((self.path, body))
                server.headers.append(dict(self.headers))
                try:
                    said = server.answer(self.path, body)
                except Slow as slow:
                    self.hang(slow.seconds)
                    return
                except EOFError:  # disconnect in the middle of the response
                    self.close_connection = True
                    self.send_response(200)
                    self.send_header("Content-Length", "1000")
                    self.end_headers()
                    self.wfile.write(b'{"choices": [{"message"')
                    return
                except ConnectionError:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                status, content, headers = said if isinstance(said, tuple) else (200, said, {})
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST

            def hang(self, seconds: float) -> None:
                """Send no response, and set `closed` if the client disconnects."""
                self.close_connection = True
                self.connection.settimeout(seconds)
                try:
                    if self.connection.recv(1) == b"":
                        server.closed.set()
                except OSError:
                    pass

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class Slow(Exception):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
