"""The package index that pip uses on this machine, for the hosts of the bed, which can reach nothing but each other.

A web server with a foot in two networks: it listens where the hosts are, and asks where this machine is. What pip is
configured with here (index, further indexes, find-links, certificates) becomes one index there, in which a project has
the files of them all. Pages are kept, files are not. Of a locked project the page shows the locked version alone:
pages of a thousand files take seconds of CPU time here and on each host.
"""

from __future__ import annotations

import ast
import html
import re
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from socket import socket
from typing import Any, BinaryIO
from urllib.error import URLError
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit
from urllib.request import Request, urlopen

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from disagg.fleet.deploy.requirements import CONSTRAINTS, committed_locks, locked_packages
from tests.offline import outside
from tests.secure import in_thread
from tests.testbed.bed import Bed

_SECTIONS = ("global.", "install.", ":env:.")  # a later one overrides
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Sources:
    """Where this machine's pip gets packages from."""

    indexes: tuple[str, ...]
    find_links: tuple[str, ...]
    certificates: str | None

    @staticmethod
    def of_pip() -> Sources:
        """As its files and its environment say."""
        said = {"index-url": _pip("-c", "from pip._internal.models.index import PyPI; print(PyPI.simple_url)").strip()}
        listed = _pip("-m", "pip", "config", "list").splitlines()
        for section in _SECTIONS:
            for line in (line.removeprefix(section) for line in listed if line.startswith(section)):
                key, _, value = line.partition("=")
                said[key] = str(ast.literal_eval(value))
        indexes = (said["index-url"], *said.get("extra-index-url", "").split())
        return Sources(indexes, tuple(said.get("find-links", "").split()), said.get("cert"))


def _pip(*argv: str) -> str:
    return subprocess.run([sys.executable, *argv], check=True, capture_output=True, text=True, timeout=60).stdout


@dataclass(frozen=True)
class File:
    """One file of a project. `attributes`: what its link says besides, such as the Python that it needs."""

    name: str
    url: str
    fragment: str
    attributes: tuple[tuple[str, str], ...] = ()


class Index:
    """All sources as one. `url`: for hosts of the bed. `sent`: bytes of packages that hosts have taken."""

    def __init__(self, url: str, sources: Sources) -> None:
        self.url = url
        self.sent = 0
        self._sources = sources
        self._context = ssl.create_default_context(cafile=sources.certificates)
        self._pages: dict[str, bytes] = {}
        self._urls: dict[str, str] = {}  # of the files that pages have named: no other is handed out
        self._lock = threading.Lock()

    def page(self, project: str) -> tuple[BinaryIO, int]:
        """The project's files, as an index shows them, and its size. LookupError where no source has any."""
        content = self._pages.get(project)
        if content is None:
            content = self._made_page(project)
        return BytesIO(content), len(content)

    def _made_page(self, project: str) -> bytes:
        files: dict[str, File] = {}
        for file in self._files(project):
            files.setdefault(file.name, file)
        if not files:
            raise LookupError("no source has it")
        locked = _locked_versions().get(project, set())
        shown = [file for file in files.values() if not locked or _version(file.name) in locked] or [*files.values()]
        content = "\n".join(["<!DOCTYPE html>", *map(_link, shown), ""]).encode()
        with self._lock:
            self._urls |= {file.name: file.url for file in shown}
            self._pages[project] = content
        return content

    def file(self, name: str) -> tuple[BinaryIO, int]:
        """A file that a page has named, or its metadata, and its size. LookupError for any other."""
        with self._lock:
            url = self._urls.get(name)
            if url is None and (whole := self._urls.get(name.removesuffix(".metadata"))) is not None:
                url = f"{whole}.metadata"
        if url is None:
            raise LookupError("no page has named it")
        answer = self._get(url)
        return answer, int(answer.headers["Content-Length"])

    def count(self, size: int) -> None:
        with self._lock:
            self.sent += size

    def _files(self, project: str) -> Iterator[File]:
        for place in self._sources.find_links:
            if Path(place).is_dir():
                found = [File(path.name, path.as_uri(), "") for path in sorted(Path(place).iterdir())]
            else:
                found = list(self._listed(place))
            yield from (file for file in found if _project(file.name) == project)
        for index in self._sources.indexes:
            url = f"{index.rstrip('/')}/{project}/"
            yield from self._listed(url if urlsplit(url).scheme != "file" else f"{url}index.html")

    def _listed(self, url: str) -> Iterator[File]:
        """What a page links to; nothing where there is no such page."""
        try:
            with self._get(url) as page:
                text = page.read().decode()
        except URLError as error:
            if getattr(error, "code", 0) == 404 or isinstance(error.reason, FileNotFoundError):
                return
            raise
        for href, attributes in _links(text):
            address, fragment = urldefrag(urljoin(url, href))
            yield File(unquote(urlsplit(address).path.rpartition("/")[2]), address, fragment, attributes)

    def _get(self, url: str) -> Any:
        request = Request(url, headers={"Accept": "text/html, */*;q=0.1"})
        with outside():  # a connection stays in the network in which it was made
            return urlopen(request, timeout=_TIMEOUT_S, context=self._context)


_ANCHOR = re.compile(r"<a\s([^>]*)>", re.IGNORECASE)
_ATTRIBUTE = re.compile(r"""([\w-]+)\s*=\s*(?:"([^"]*)"|'([^']*)')""")


def _links(text: str) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    """The links of a page, each with its data- attributes. html.parser would take five times as long."""
    for anchor in _ANCHOR.finditer(text):
        attributes = {key.lower(): html.unescape(one or other) for key, one, other in _ATTRIBUTE.findall(anchor[1])}
        if href := attributes.get("href"):
            yield href, tuple((key, value) for key, value in attributes.items() if key.startswith("data-"))


def _link(file: File) -> str:
    fragment = f"#{file.fragment}" if file.fragment else ""
    said = "".join(f' {key}="{html.escape(value)}"' for key, value in file.attributes)
    return f'<a href="../../files/{quote(file.name)}{html.escape(fragment)}"{said}>{html.escape(file.name)}</a><br>'


def _project(filename: str) -> str:
    with suppress(InvalidWheelFilename):
        return parse_wheel_filename(filename)[0]
    with suppress(InvalidSdistFilename):
        return parse_sdist_filename(filename)[0]
    return ""


def _version(filename: str) -> str:
    """Of a wheel or source archive, without its local part."""
    stem = filename.removesuffix(".zip").removesuffix(".tar.gz")
    return stem.split("-")[1 if filename.endswith(".whl") else -1].partition("+")[0] if "-" in stem else ""


@cache
def _locked_versions() -> dict[str, set[str]]:
    """The versions that any lock of disagg names, by canonical project."""
    versions: dict[str, set[str]] = {}
    for text in (CONSTRAINTS.read_text(encoding="utf-8"), *committed_locks().values()):
        for name, package in locked_packages(text).items():
            versions.setdefault(name, set()).add(package.version)
    return versions


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    index: Index

    def do_GET(self) -> None:
        kind, _, name = unquote(self.path).strip("/").partition("/")
        try:
            answer, size = self.index.file(name) if kind == "files" else self.index.page(canonicalize_name(name))
        except LookupError as error:
            self.send_error(404, str(error))
            return
        except OSError as error:
            self.send_error(502, "a source does not answer", str(error))
            return
        with answer:
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream" if kind == "files" else "text/html")
            self.send_header("Content-Length", str(size))
            self.end_headers()
            if self.command == "GET":
                self._send(answer, size if kind == "files" else 0)

    do_HEAD = do_GET

    def _send(self, answer: BinaryIO, counted: int) -> None:
        try:
            shutil.copyfileobj(answer, self.wfile, 1 << 20)
            self.index.count(counted)
        except OSError:  # in the middle, the end of the connection is the only way to say so
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """The installers tell what went wrong."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listener: socket, handler: type[_Handler]) -> None:
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # an installer that was interrupted
            super().handle_error(request, client_address)


@contextmanager
def package_index(bed: Bed) -> Iterator[Index]:
    """Within, the bed's hosts have a package index. To be called from outside of the hub, whose network has none."""
    listener = bed.listener()
    address, port = listener.getsockname()
    index = Index(f"http://{address}:{port}/simple", Sources.of_pip())
    with in_thread(_Server(listener, type("Handler", (_Handler,), {"index": index}))):
        yield index
