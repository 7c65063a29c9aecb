"""GPU utilisation, from nvidia-smi or macOS' ioreg. Neither needs root."""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from functools import partial
from threading import Lock
from typing import Final

from disagg import nvidia
from disagg.servers.host.work import on_daemon_thread

_COMMANDS: Final = {
    "cuda": ("nvidia-smi", *nvidia.ARGUMENTS),
    "gpu": ("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"),
    "mps": ("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"),
}
_TIMEOUT_S: Final = 0.5
_MAX_AGE_S: Final = 1.0
READ_S: Final = 0.75
"""What GET /status waits for it."""

_lock = Lock()
_cached: dict[str, tuple[float, float | None]] = {}
_killed: dict[str, subprocess.Popen[str]] = {}
"""Tools that took too long, by device. A driver that hangs keeps its tool alive after SIGKILL."""


def utilisation(backend: str) -> float | None:
    """Utilisation of the busiest GPU, 0 to 1. None for a CPU, and if the tool is missing or fails. At most a second
    old, unless another thread measures it just now. Blocks for half a second at most.

    backend: as engines name it, e.g. "transformers/cuda".
    """
    device = backend.rpartition("/")[2].partition(":")[0]
    command = _COMMANDS.get(device)
    if command is None:
        return None
    measured, value = _cached.get(device, (float("-inf"), None))
    if time.monotonic() - measured <= _MAX_AGE_S or not _lock.acquire(blocking=False):
        return value
    try:
        value = parse(_output(device, command))
        _cached[device] = (time.monotonic(), value)
        return value
    finally:
        _lock.release()


class Gauge:
    """Utilisation for the event loop, measured on one thread of its own, which a driver that hangs may keep."""

    def __init__(self) -> None:
        self._reading: asyncio.Task[float | None] | None = None
        self._last: float | None = None

    async def read(self, backend: str) -> float | None:
        """The utilisation, or the last figure if reading it takes over READ_S."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(on_daemon_thread(partial(utilisation, backend), "utilisation"))
        reading = self._reading
        await asyncio.wait((reading,), timeout=READ_S)
        if reading.done():
            self._reading = None if self._reading is reading else self._reading
            self._last = reading.result()
        return self._last


def parse(text: str) -> float | None:
    """The largest utilisation that either tool printed, 0 to 1."""
    shares = [int(percent) / 100 for percent in re.findall(r'"Device Utilization %"=(\d+)', text)]
    shares += [card.utilisation for card in nvidia.parse(text) if card.utilisation is not None]
    return max(shares, default=None)


def _output(device: str, command: tuple[str, ...]) -> str:
    if (killed := _killed.get(device)) is not None and killed.poll() is None:
        return ""
    _killed.pop(device, None)
    try:
        tool = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
    except OSError:  # the tool is missing
        return ""
    try:
        return tool.communicate(timeout=_TIMEOUT_S)[0]
    except subprocess.TimeoutExpired:  # the driver is busy
        tool.kill()
        _killed[device] = tool
        if tool.stdout is not None:
            tool.stdout.close()
        return ""
