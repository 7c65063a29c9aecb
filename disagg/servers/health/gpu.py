"""GPU utilisation, from nvidia-smi or macOS' ioreg. Neither needs root."""

from __future__ import annotations

import re
import subprocess
import time
from threading import Lock
from typing import Final

from disagg import nvidia

_COMMANDS: Final = {
    "cuda": ("nvidia-smi", *nvidia.ARGUMENTS),
    "gpu": ("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"),
    "mps": ("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"),
}
_TIMEOUT_S: Final = 0.5
_MAX_AGE_S: Final = 1.0

_lock = Lock()
_cached: dict[str, tuple[float, float | None]] = {}


def utilisation(backend: str) -> float | None:
    """Utilisation of the busiest GPU, 0 to 1, at most a second old. None for a CPU, and if the tool is missing or
    fails. Blocks for up to half a second.

    backend: as engines name it, e.g. "transformers/cuda".
    """
    device = backend.rpartition("/")[2].partition(":")[0]
    command = _COMMANDS.get(device)
    if command is None:
        return None
    with _lock:
        measured, value = _cached.get(device, (float("-inf"), None))
        if time.monotonic() - measured > _MAX_AGE_S:
            value = parse(_output(command))
            _cached[device] = (time.monotonic(), value)
        return value


def parse(text: str) -> float | None:
    """The largest utilisation that either tool printed, 0 to 1."""
    shares = [int(percent) / 100 for percent in re.findall(r'"Device Utilization %"=(\d+)', text)]
    shares += [card.utilisation for card in nvidia.parse(text) if card.utilisation is not None]
    return max(shares, default=None)


def _output(command: tuple[str, ...]) -> str:
    try:
        completed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # the tool is missing, or the driver is busy
        return ""
    return completed.stdout
