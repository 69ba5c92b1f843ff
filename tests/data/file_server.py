"""A web server on this host that serves parts of files, and fails as it is told."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class FileServer(ThreadingHTTPServer):
    """Serves `files` by name. `fails` says of each read, counted from 1, how it fails."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.etags = {}, {}
        self.num_reads, self.num_looks = 0, 0
        self.serves_parts = True
        self.fails = lambda number: None

    def url(self, name):
        return f"http://127.0.0.1:{self.server_port}/{name}"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_HEAD(self):
        self.server.num_looks += 1
        data = self._data()
        if data is not None:
            self._head(200, len(data))

    def do_GET(self):
        self.server.num_reads += 1
        failure = self.server.fails(self.server.num_reads)
        if isinstance(failure, int):
            self.send_error(failure)
            return
        data = self._data()
        if data is None:
            return
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if part is None or not self.server.serves_parts:
            self._head(200, len(data))
        else:
            data = data[int(part[1]) : int(part[2]) + 1]
            self._head(206, len(data))
        self.wfile.write(data[: len(data) // 2] if failure == "cut off" else data)

    def _data(self):
        data = self.server.files.get(self.path.partition("?")[0].lstrip("/"))
        if data is None:
            self.send_error(404)
        return data

    def _head(self, status, num_bytes):
        self.send_response(status)
        self.send_header("Content-Length", str(num_bytes))
        self.send_header("ETag", self.server.etags.get(self.path.lstrip("/"), "first"))
        self.end_headers()

    def log_message(self, *_):
        """Nothing is written to standard error."""


@contextmanager
def serving() -> Iterator[FileServer]:
    with FileServer() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
