"""A model hub on this machine that serves one folder: what huggingface_hub asks of it, by HTTP."""

from __future__ import annotations

import hashlib
import http.server
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, Final
from urllib.parse import urlsplit

REVISION: Final = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serving(repository: str, folder: Path) -> Iterator[str]:
    """The URL of a hub that has this repository, with the files of the folder."""
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(repository, files))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _handler(repository: str, files: Mapping[str, bytes]) -> type[http.server.BaseHTTPRequestHandler]:
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    listed = [
        {
            "rfilename": name,
            "size": len(data),
            "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest(),
            "lfs": {"sha256": sums[name], "size": len(data), "pointerSize": 130},
        }
        for name, data in files.items()
    ]
    tree = [
        {
            "type": "file",
            "path": one["rfilename"],
            "size": one["size"],
            "oid": one["blobId"],
            "lfs": {"oid": sums[name], "size": one["size"], "pointerSize": 130},
        }
        for name, one in zip(files, listed, strict=True)
    ]
    about = {"id": repository, "modelId": repository, "sha": REVISION, "private": False, "siblings": listed}

    class Hub(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = urlsplit(self.path).path
            name = path.rsplit("/", 1)[-1]
            if path.startswith(f"/api/models/{repository}"):
                body = json.dumps(tree if "/tree/" in path else about).encode()
                self._send(200, body, {"Content-Type": "application/json"}, with_body=with_body)
            elif path.startswith(f"/{repository}/resolve/") and name in files:
                headers = {"X-Repo-Commit": REVISION, "X-Linked-Size": str(len(files[name]))}
                tags = {"ETag": f'"{sums[name]}"', "X-Linked-ETag": f'"{sums[name]}"'}
                self._send(200, files[name], {**headers, **tags}, with_body=with_body)
            else:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body=with_body)

        def _send(self, status: int, body: bytes, headers: Mapping[str, str], *, with_body: bool) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    return Hub
