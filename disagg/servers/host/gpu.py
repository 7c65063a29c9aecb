"""GPU utilisation, from nvidia-smi or macOS' ioreg. Neither needs root."""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from disagg import nvidia
from disagg.servers.host.work import on_daemon_thread

COMMANDS: Final = {
    "cuda": ("nvidia-smi", *nvidia.ARGUMENTS),
    "gpu": ("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"),
    "mps": ("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"),
}


class Gauge:
    """Utilisation for the event loop, measured on one thread of its own, which a driver that hangs may keep.

    measure: the utilisation of a backend. wait_s: what GET /status waits for it.
    """

    def __init__(self, measure: Callable[[str], float | None] | None = None, wait_s: float = 0.75) -> None:
        self._measure = measure or GPUTool().utilisation
        self._wait_s = wait_s
        self._reading: asyncio.Task[float | None] | None = None
        self._last: float | None = None

    async def read(self, backend: str) -> float | None:
        """The utilisation, or the last figure if reading it takes longer than is waited."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(on_daemon_thread(partial(self._measure, backend), "utilisation"))
        reading = self._reading
        await asyncio.wait((reading,), timeout=self._wait_s)
        if reading.done():
            self._reading = None if self._reading is reading else self._reading
            self._last = reading.result()
        return self._last


@dataclass(slots=True)
class GPUTool:
    """What measures the GPU of one host: one thread at a time asks it. commands: by device. timeout_s: how long one may
    run. max_age_s: of a figure that is given again."""

    commands: Mapping[str, Sequence[str]] = field(default_factory=lambda: COMMANDS)
    timeout_s: float = 0.5
    max_age_s: float = 1.0
    _measured: float = float("-inf")
    _value: float | None = None
    _killed: subprocess.Popen[str] | None = None  # took too long: a driver that hangs keeps it alive after SIGKILL

    def utilisation(self, backend: str) -> float | None:
        """Utilisation of the busiest GPU, 0 to 1. None for a CPU, and if the tool is missing or fails.

        backend: as engines name it, e.g. "transformers/cuda".
        """
        command = self.commands.get(backend.rpartition("/")[2].partition(":")[0])
        if command is None:
            return None
        if time.monotonic() - self._measured > self.max_age_s:
            self._value, self._measured = parse(self._output(command)), time.monotonic()
        return self._value

    def _output(self, command: Sequence[str]) -> str:
        if self._killed is not None and self._killed.poll() is None:
            return ""
        self._killed = None
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
            return tool.communicate(timeout=self.timeout_s)[0]
        except subprocess.TimeoutExpired:  # the driver is busy
            tool.kill()
            self._killed = tool
            if tool.stdout is not None:
                tool.stdout.close()
            return ""


def parse(text: str) -> float | None:
    """The largest utilisation that either tool printed, 0 to 1."""
    shares = [int(percent) / 100 for percent in re.findall(r'"Device Utilization %"=(\d+)', text)]
    shares += [card.utilisation for card in nvidia.parse(text) if card.utilisation is not None]
    return max(shares, default=None)
