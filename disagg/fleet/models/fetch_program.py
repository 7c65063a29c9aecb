"""Copies one model from the host that serves it. Standard library only: it runs on the host, and is never imported.

    ADDRESS PORT ROOT   ROOT: the target folder

Prints {"done", "total"} every half second, at the end {"bytes"}. $DISAGG_COPY_TOKEN is the one-time secret of this
copy. A file is named NAME.part until its SHA-256 is verified; the next run resumes from it. Files that make a model
look complete come last. Exits with code 3 and a JSON line {"error"} if it fails.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import hmac
import http.client
import json
import os
import sys
import threading
import time
from typing import IO, Any, Dict

PIECE = 1 << 20
PATIENCE_S = 20.0
TRIES = 4
STREAMS = 3
FINAL = (28, 122, 30, 13)  # disk full, quota, read-only, not permitted: trying again does not help
Entry = Dict[str, Any]  # as serve_program.py lists them
TOKEN = os.environ.get("DISAGG_COPY_TOKEN", "")


class Failed(Exception):
    pass


class Fetch:
    def __init__(self, address: str, port: int, root: str) -> None:
        self.address, self.port, self.root = address, port, os.path.expanduser(root)
        self.entries = json.loads(self.get("/list"))
        self.total = sum(entry["size"] for entry in self.entries)
        self.lock, self.done, self.resumed, self.skipped, self.repaired = threading.Lock(), 0, 0, 0, 0

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.address, self.port, timeout=PATIENCE_S)

    def get(self, path: str) -> str:
        connection = self.connect()
        connection.timeout = PATIENCE_S if path == "/list" else 3600.0  # a checksum takes as long as reading the file
        try:
            connection.request("GET", path, headers={"Authorization": "Bearer " + TOKEN})
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200:
                raise Failed(f"the serving host answers {answer.status}")
            return body.decode()
        finally:
            connection.close()

    def run(self) -> None:
        self.check_room()
        reporter = threading.Thread(target=self.report, daemon=True)
        reporter.start()
        for stage in range(4):
            numbers = [number for number, entry in enumerate(self.entries) if entry["stage"] == stage]
            with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
                for future in [pool.submit(self.copy, number) for number in numbers]:
                    future.result()
        counts = {"resumed": self.resumed, "skipped": self.skipped, "repaired": self.repaired}
        print_json(bytes=self.total, files=len(self.entries), **counts)

    def check_room(self) -> None:
        os.makedirs(self.root, exist_ok=True)
        room = os.statvfs(self.root)
        need = 0
        for entry in self.entries:
            path = self.place(entry)
            have = max(length(path), length(path + ".part"))
            need += max(0, entry["size"] - have)
        if need > room.f_bavail * room.f_frsize:
            free = room.f_bavail * room.f_frsize
            raise Failed(f"{free >> 20} MiB are free in {self.root}, and {need >> 20} MiB are needed")

    def place(self, entry: Entry) -> str:
        parts = entry["path"].split("/")
        if entry["path"].startswith("/") or ".." in parts or "" in parts:
            raise Failed(f"{entry['path']!r} is not a path below the folder")
        return os.path.join(self.root, *parts)

    def copy(self, number: int) -> None:
        entry = self.entries[number]
        path = self.place(entry)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if "link" in entry:
            if ".." in os.path.normpath(os.path.join(os.path.dirname(entry["path"]), entry["link"])).split("/"):
                raise Failed(f"{entry['path']!r} leads out of the folder")
            if os.path.lexists(path):
                os.unlink(path)
            os.symlink(entry["link"], path)
        elif "text" in entry:
            with open(path + ".part", "w") as file:
                file.write(entry["text"])
            os.replace(path + ".part", path)
        elif length(path) == entry["size"] and os.path.exists(path):
            self.add(entry["size"])
            self.skipped += 1
        else:
            self.file(number, entry, path)

    def file(self, number: int, entry: Entry, path: str) -> None:
        """Copy one file: resume after a broken connection, and start again once if the checksum is wrong."""
        part, tries, restarted = path + ".part", TRIES, False
        while True:
            try:
                received = self.stream(number, entry, part)
                wanted = entry["sha256"] or self.get(f"/sum/{number}")
            except (OSError, http.client.HTTPException) as error:
                tries -= 1
                if tries == 0 or getattr(error, "errno", None) in FINAL:
                    raise
                time.sleep(1.0)
                continue
            if hmac.compare_digest(received, wanted):
                os.replace(part, path)
                return
            os.unlink(part)
            self.add(-entry["size"])
            if restarted:
                raise Failed(
                    f"{entry['path']} arrives damaged twice: the file on the serving host does not match its checksum"
                )
            restarted = True
            self.repaired += 1

    def stream(self, number: int, entry: Entry, part: str) -> str:
        """Fetch what is missing of a file; returns the SHA-256 of all of it."""
        total, have = hashlib.sha256(), 0
        with open(part, "ab+") as file:
            if os.fstat(file.fileno()).st_size > entry["size"]:
                file.truncate(0)
            file.seek(0)
            while True:
                piece = file.read(PIECE)
                if not piece:
                    break
                total.update(piece)
                have += len(piece)
            self.resumed += have
            self.add(have)
            try:
                have += self.receive(number, entry, have, file, total)
            except BaseException:  # whatever it is: what is there is not counted twice when the file is begun again
                file.flush()
                self.add(-os.fstat(file.fileno()).st_size)
                raise
            os.fsync(file.fileno())
        return total.hexdigest()

    def receive(self, number: int, entry: Entry, start: int, file: IO[bytes], total: Any) -> int:
        connection, got, view = self.connect(), 0, memoryview(bytearray(PIECE))
        try:
            headers = {"Authorization": "Bearer " + TOKEN, "Range": f"bytes={start}-"}
            connection.request("GET", f"/file/{number}", headers=headers)
            answer = connection.getresponse()
            if answer.status != (206 if start else 200):
                raise Failed(f"the serving host answers {answer.status}")
            while True:
                count = answer.readinto(view)
                if not count:
                    break
                file.write(view[:count])
                total.update(view[:count])
                got += count
                self.add(count)
        finally:
            connection.close()
        if start + got != entry["size"]:
            raise http.client.IncompleteRead(b"", entry["size"] - start - got)
        return got

    def add(self, count: int) -> None:
        with self.lock:
            self.done += count

    def report(self) -> None:
        while True:
            print_json(done=self.done, total=self.total)
            time.sleep(0.5)


def length(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def print_json(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main(address: str, port: str, root: str) -> None:
    try:
        Fetch(address, int(port), root).run()
    except (OSError, http.client.HTTPException, Failed) as error:
        print_json(error=getattr(error, "strerror", None) or str(error) or type(error).__name__)
        os._exit(3)  # other threads may still be waiting


main(*sys.argv[1:])
