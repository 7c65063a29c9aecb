"""The server's ends of two connections: to its fork server, and of each answer to the process that its form has.

A form is what the answer must look like, as a grammar. Its process says which tokens may come next; the fork server
makes these processes and ends them.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import select
import socket
import subprocess
import sys
import time
import weakref
from contextlib import suppress

from disagg.engines.model.matchers import wire
from disagg.engines.model.matchers.limits import Reason
from disagg.engines.model.matchers.wire import Attach, Region, Reply

_log = logging.getLogger(__name__)
fork_servers: set[int] = set()
"""The process ids of this process's fork servers. What they and their children compute is no engine's work, and does
not count as progress of one."""


class Link:
    """The socket and the memory that an answer shares with the process of its form. Not thread-safe but `hang_up`."""

    def __init__(self, sock: socket.socket, region: Region) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._region = region
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._data = b""
        self._sent = 0
        self._last: Reply | None = None  # to the last token, or to the beginning

    def send(self, token: int) -> None:
        self._sent += 1
        self._last = None
        with suppress(OSError):  # its end is found out with the reply
            self._sock.send(wire.TOKEN.pack(token))

    def reply(self, deadline: float) -> Reply | None:
        """The reply to the last token sent; None if there is none by then."""
        while self._last is None:
            reply = self.receive()
            if reply is None:
                left = deadline - time.monotonic()
                if not self._poll.poll(max(0.0, left) * 1000) and left <= 0:
                    return None
            elif reply.kind == wire.FAILED or (reply.kind != wire.COMPILED and reply.count == self._sent):
                self._last = reply
        return self._last

    def receive(self) -> Reply | None:
        """The next reply, None if it is not here yet. The end of the connection is a reply, too."""
        try:
            data = self._sock.recv(wire.REPLY_BYTES - len(self._data))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            return Reply(wire.FAILED, Reason.LOST)
        self._data += data
        if len(self._data) < wire.REPLY_BYTES:
            return None
        reply, self._data = Reply.parse(self._data), b""
        return reply

    async def readable(self) -> None:
        """Wait until something may be received."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def set_arrived() -> None:
            if not arrived.done():
                arrived.set_result(None)

        loop.add_reader(self._sock, set_arrived)
        try:
            await arrived
        finally:
            loop.remove_reader(self._sock)

    @property
    def memory(self) -> mmap.mmap:
        """The shared memory: it has the last mask, or why the form is refused."""
        return self._region.memory

    def hang_up(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
        self._region.close()


class ForkServerProcess:
    """A fork server and the connection to it. It ends when this is collected."""

    def __init__(self, settings: int) -> None:
        """Closes the file of its settings."""
        self._control, theirs = socket.socketpair()
        fds = (theirs.fileno(), settings)
        command = [sys.executable, "-m", "disagg.engines.model.matchers.forkserver", *map(str, fds)]
        try:
            with theirs:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=fds
                )
        except BaseException:
            self._control.close()
            raise
        finally:
            os.close(settings)
        self._control.setblocking(False)
        self._broken = False
        fork_servers.add(self.process.pid)
        self.end = weakref.finalize(self, _end, self.process, self._control)
        _log.info("the fork server of constrained answers has started: process %d", self.process.pid)

    @property
    def alive(self) -> bool:
        return not self._broken and self.process.poll() is None

    def attach(self, attach: Attach, fds: tuple[int, int]) -> None:
        """Raises BlockingIOError if it does not read, another OSError if it has ended."""
        try:
            attach.send(self._control, fds)
        except BlockingIOError:
            raise
        except OSError:
            self._broken = True
            self.process.kill()
            raise


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    fork_servers.discard(process.pid)
