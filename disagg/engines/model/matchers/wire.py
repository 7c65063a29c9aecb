"""What crosses the sockets between a server, its fork server and the processes of forms; and the memory they share.

A form is what an answer must look like, as a grammar, such as that of a JSON schema. Every message has a fixed length:
an `Attach` names the form by a digest, and its text and the tokens given are in the shared memory of the answer, where
the masks come later.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from disagg.engines.model.matchers.limits import Reason

TOKEN: Final = struct.Struct("<I")
"""Server -> process: a token of the answer."""
_ATTACH: Final = struct.Struct("<16s8sIII")
_REPLY: Final = struct.Struct("<BBxxI")
_NOTE: Final = struct.Struct("<BxxxI")
REPLY_BYTES: Final = _REPLY.size

COMPILED, MASK, FREE, FAILED = range(1, 5)
"""Process -> server: the form is compiled, a mask is in the shared memory, every token is allowed, it cannot go on."""
READY, LEFT = range(1, 3)
"""Process -> fork server: the form is compiled; an answer has left."""


class Attach(NamedTuple):
    """An answer that is to have a form. Server -> fork server -> process, with two descriptors: the process's end of
    the answer's socket, and the shared memory. digest: of form and owner. owner: whose request it is. number: of the
    answer, set by the fork server. text, tokens: how many bytes of the form and tokens of the answer are in the
    memory."""

    digest: bytes
    owner: bytes
    number: int
    text: int
    tokens: int

    def send(self, to: socket.socket, fds: Sequence[int]) -> None:
        """Raises OSError, BlockingIOError if there is no room for it."""
        packed = _ATTACH.pack(*self)
        if socket.send_fds(to, [packed], list(fds)) != len(packed):
            raise BrokenPipeError("a message was cut")  # never seen: the kernel takes so short a message whole

    @staticmethod
    def receive(sock: socket.socket) -> tuple[Attach, tuple[int, int]] | None:
        """The next one and its descriptors, None after the last."""
        data, fds, _, _ = socket.recv_fds(sock, _ATTACH.size, 2)
        if len(data) != _ATTACH.size or len(fds) != 2:
            for fd in fds:
                os.close(fd)
            return None
        return Attach(*_ATTACH.unpack(data)), (fds[0], fds[1])


@dataclass(frozen=True, slots=True)
class Reply:
    """Process or fork server -> server. count: of tokens accepted so far; of bytes of text if the form is refused."""

    kind: int
    reason: Reason = Reason.NONE
    count: int = 0

    def send(self, to: socket.socket) -> None:
        """If the server has left, nobody needs it."""
        with suppress(OSError):
            to.send(_REPLY.pack(self.kind, self.reason, self.count))

    @staticmethod
    def parse(data: bytes) -> Reply:
        kind, reason, count = _REPLY.unpack(data)
        return Reply(kind, Reason(reason), count)


def send_note(to: socket.socket, kind: int, number: int) -> None:
    """Process -> fork server: READY, or LEFT with an answer's number."""
    to.sendall(_NOTE.pack(kind, number))


def receive_notes(sock: socket.socket) -> list[tuple[int, int]] | None:
    """The notes that have arrived, None after the last."""
    data = sock.recv(64 * _NOTE.size)
    if not data:
        return None
    while rest := len(data) % _NOTE.size:
        data += sock.recv(_NOTE.size - rest)
    return list(_NOTE.iter_unpack(data))


class Region:
    """Memory that a server and the process of a form share: first form and tokens, then masks."""

    def __init__(self, fd: int) -> None:
        """Closes fd."""
        try:
            self.memory = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    @staticmethod
    def make(text: bytes, tokens: Sequence[int], mask_bytes: int) -> tuple[Region, int]:
        """New memory, and a descriptor of it for the other side."""
        packed = b"".join(map(TOKEN.pack, tokens))
        fd = anonymous_file("disagg-form")
        try:
            os.ftruncate(fd, max(len(text) + len(packed), mask_bytes, mmap.PAGESIZE))
            region = Region(os.dup(fd))
        except BaseException:
            os.close(fd)
            raise
        region.memory[: len(text) + len(packed)] = text + packed
        return region, fd

    def read(self, attach: Attach) -> tuple[str, list[int]]:
        """The form and the tokens."""
        end = attach.text + attach.tokens * TOKEN.size
        text, tokens = self.memory[: attach.text], self.memory[attach.text : end]
        return text.decode(), [token for (token,) in TOKEN.iter_unpack(tokens)]

    def close(self) -> None:
        self.memory.close()


def anonymous_file(name: str) -> int:
    """The descriptor of an empty file that has no name, so that nothing of it is left however its users end."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
