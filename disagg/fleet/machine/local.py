"""This machine, through the same scripts as one over SSH."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from contextlib import suppress
from threading import Thread
from typing import IO

from disagg.config.addresses import home
from disagg.errors import FleetError
from disagg.fleet.machine import interruption
from disagg.fleet.machine.machine import BOOTSTRAP, Invocation, Machine, OutputStream

_DRAIN_S = 1.0
"""How long to wait for output after the command ended: a process that it left behind may keep the pipe open."""


class LocalMachine(Machine):
    """A host with connector "local"."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return self._name

    def execute(self, invocation: Invocation) -> int:
        began = time.monotonic()
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", BOOTSTRAP],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                cwd=home(),
            )
        except OSError as error:
            raise FleetError(f"{self._name}: cannot run /bin/sh here: {error.strerror}") from error
        self._running = process
        with process:
            feeder = Thread(target=_feed, args=(process, invocation), daemon=True)
            feeder.start()
            try:
                _collect(process, invocation, began)
            except BaseException:  # also an interruption: leave nothing running
                _kill(process)
                raise
            finally:
                self._running = None
                process.wait()
                feeder.join()
        code = process.returncode
        return 128 - code if code < 0 else code

    def close(self) -> None:
        process = self._running
        if process is not None:
            _kill(process)


def _feed(process: subprocess.Popen[bytes], invocation: Invocation) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it ended early; its own output has the reason
        process.stdin.write(invocation.program)
        while invocation.payload is not None and (data := invocation.payload.read(1 << 16)):
            process.stdin.write(data)
        process.stdin.flush()
    with suppress(BrokenPipeError):
        process.stdin.close()


def _collect(process: subprocess.Popen[bytes], invocation: Invocation, began: float) -> None:
    """Read output until both streams end, or the process has ended and nothing arrives any more."""
    assert process.stdout is not None and process.stderr is not None
    streams: list[tuple[IO[bytes], OutputStream]] = [
        (process.stdout, invocation.stdout),
        (process.stderr, invocation.stderr),
    ]
    with selectors.DefaultSelector() as selector:
        for pipe, stream in streams:
            selector.register(pipe, selectors.EVENT_READ, stream)
        last = time.monotonic()
        while selector.get_map():
            for key, _ in selector.select(interruption.POLL_S):
                last = time.monotonic()
                if data := os.read(key.fd, 1 << 16):
                    key.data.feed(data)
                else:
                    selector.unregister(key.fileobj)
            interruption.check()
            if time.monotonic() > invocation.due(began):
                raise TimeoutError
            if process.poll() is not None and time.monotonic() - last > _DRAIN_S:
                break
        while process.poll() is None:  # it closed its output and still runs
            interruption.check()
            if time.monotonic() > invocation.due(began):
                raise TimeoutError
            with suppress(subprocess.TimeoutExpired):
                process.wait(interruption.POLL_S)
    for _, stream in streams:
        stream.end()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process group: SIGTERM, so that scripts remove unfinished files, then SIGKILL."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a group of zombies
            os.killpg(process.pid, kind)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
