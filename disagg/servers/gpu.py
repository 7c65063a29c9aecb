"""How busy the GPU is, asked from the system's own tools: nvidia-smi, or macOS' ioreg. Neither needs root."""

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
_KEPT_S: Final = 1.0

_lock = Lock()
_known: dict[str, tuple[float, float | None]] = {}


def utilisation(backend: str) -> float | None:
    """0 to 1, of the busiest GPU, at most a second old; None for CPUs and where nobody tells. May take half a second.

    backend: as engines name it, "transformers/cuda".
    """
    device = backend.rpartition("/")[2].partition(":")[0]
    command = _COMMANDS.get(device)
    if command is None:
        return None
    with _lock:
        asked, value = _known.get(device, (float("-inf"), None))
        if time.monotonic() - asked > _KEPT_S:
            value = parse(_said(command))
            _known[device] = (time.monotonic(), value)
        return value


def parse(text: str) -> float | None:
    """The largest utilisation that either tool printed, 0 to 1."""
    shares = [int(percent) / 100 for percent in re.findall(r'"Device Utilization %"=(\d+)', text)]
    shares += [card.utilisation for card in nvidia.parse(text) if card.utilisation is not None]
    return max(shares, default=None)


def _said(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # the tool is not there, or the driver is busy: then nobody tells
        return ""
    return done.stdout
