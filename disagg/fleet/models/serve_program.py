"""Serves one model to one other host over HTTP. Standard library only: it runs on the host, and is never imported.

    ADDRESS ROOT REVISION   REVISION: of the hub if ROOT is a repository in its cache; "" for a plain folder

Prints {"port"}, and serves until it is killed or idle for 120 s. $DISAGG_COPY_TOKEN is the one-time secret of this
copy. Exits with code 3 and a JSON line {"error"} if it cannot serve. GET /list: the entries, in the order in which to
create them; /file/N: the bytes of entry N, from `Range` on; /sum/N: its SHA-256.
"""

from __future__ import annotations

import hashlib
import hmac
import http.server
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Dict

PIECE = 1 << 20
PATIENCE_S = 20.0
IDLE_S = 120.0
Entry = Dict[str, Any]  # path, size, stage; and sha256 (a file), link (a link) or text (refs/main)
TOKEN = os.environ.get("DISAGG_COPY_TOKEN", "")


class Failed(Exception):
    pass


def listing(root: str, revision: str) -> list[Entry]:
    """Files and links below `root`, in the order in which to create them."""
    entries = list(hub_entries(root, revision) if revision else folder_entries(root))
    for entry in entries:
        entry["stage"] = stage(entry)
    return sorted(entries, key=lambda entry: (entry["stage"], entry["path"]))


def hub_entries(root: str, revision: str) -> Iterator[Entry]:
    snapshot = os.path.join("snapshots", revision)
    for name, path in walk(os.path.join(root, snapshot)):
        place = os.path.join(snapshot, name)
        if os.path.islink(path):
            blob = os.path.relpath(os.path.realpath(path), os.path.realpath(root))
            if blob.startswith(".."):
                raise Failed(f"{path} leads out of {root}")
            yield file_entry(root, blob)
            yield {"path": place, "link": os.path.relpath(blob, os.path.dirname(place)), "size": 0}
        else:
            yield file_entry(root, place)
    yield {"path": os.path.join("refs", "main"), "text": revision, "size": 0}


def folder_entries(root: str) -> Iterator[Entry]:
    for name, _ in walk(root):
        yield file_entry(root, name)


def walk(root: str) -> Iterator[tuple[str, str]]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and not name.endswith((".part", ".incomplete")):
                path = os.path.join(folder, name)
                yield os.path.relpath(path, root), path


def file_entry(root: str, path: str) -> Entry:
    """A file's entry. In the hub's cache a large file's name is its SHA-256."""
    name = os.path.basename(path)
    known = name if re.fullmatch("[0-9a-f]{64}", name) else ""
    return {"path": path, "size": os.path.getsize(os.path.join(root, path)), "sha256": known}


def stage(entry: Entry) -> int:
    """0: files; 1: config.json, which makes a folder a model; 2: links; 3: refs/main, which names the revision."""
    if "text" in entry:
        return 3
    if "link" in entry:
        return 2
    return 1 if os.path.basename(entry["path"]) == "config.json" else 0


def sha256(path: str) -> str:
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while True:
            piece = file.read(PIECE)
            if not piece:
                return total.hexdigest()
            total.update(piece)


class ServedModel:
    """The entries, and when one was last requested."""

    def __init__(self, root: str, revision: str) -> None:
        self.root, self.entries = root, listing(root, revision)
        self.lock, self.busy, self.last = threading.Lock(), 0, time.monotonic()

    def count(self, change: int) -> None:
        with self.lock:
            self.busy += change
            self.last = time.monotonic()

    def idle(self) -> bool:
        with self.lock:
            return self.busy == 0 and time.monotonic() - self.last > IDLE_S


def handler(served: ServedModel) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = PATIENCE_S

        def log_message(self, *words: object) -> None:
            pass

        def do_GET(self) -> None:
            served.count(1)
            try:
                self.answer()
            except OSError:
                self.close_connection = True  # the client disconnected; it resumes later
            finally:
                served.count(-1)

        def answer(self) -> None:
            authorization = self.headers.get("Authorization", "")
            if not TOKEN or not hmac.compare_digest(authorization.encode(), ("Bearer " + TOKEN).encode()):
                self.reply(401, b"")
                return
            match = re.fullmatch("/(file|sum)/([0-9]{1,9})", self.path)
            if self.path == "/list":
                self.reply(200, json.dumps(served.entries).encode())
            elif not match or int(match[2]) >= len(served.entries) or "sha256" not in served.entries[int(match[2])]:
                self.reply(404, b"")
            elif match[1] == "sum":
                entry = served.entries[int(match[2])]
                entry["sha256"] = entry["sha256"] or sha256(os.path.join(served.root, entry["path"]))
                self.reply(200, entry["sha256"].encode())
            else:
                self.send_file(served.entries[int(match[2])])

        def reply(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def send_file(self, entry: Entry) -> None:
            requested = re.fullmatch("bytes=([0-9]{1,18})-", self.headers.get("Range", "bytes=0-"))
            start = int(requested[1]) if requested else 0
            if start > entry["size"]:
                self.reply(416, b"")
                return
            with open(os.path.join(served.root, entry["path"]), "rb") as file:
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(entry["size"] - start))
                self.end_headers()
                self.wfile.flush()
                if entry["size"] > start:
                    self.connection.sendfile(file, start, entry["size"] - start)

    return Handler


def serve(address: str, root: str, revision: str) -> None:
    served = ServedModel(os.path.expanduser(root), revision)

    class Server(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        daemon_threads = True

    with Server((address, 0), handler(served)) as server:
        print_json(port=server.server_address[1])
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
        while not served.idle():
            time.sleep(0.5)


def print_json(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main(address: str, root: str, revision: str) -> None:
    try:
        serve(address, root, revision)
    except (OSError, Failed) as error:
        print_json(error=getattr(error, "strerror", None) or str(error) or type(error).__name__)
        sys.exit(3)


main(*sys.argv[1:])
