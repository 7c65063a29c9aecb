"""Watts of the machines during the benchmark: measured if this machine can, else as stated.

Energy per request = power of the machines that a mode occupies x time of its turns / requests completed. A machine that
waits for the other one counts, since it is switched on.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from disagg.bench import Mode
from disagg.bench.records import ROLES, TurnResult

ReadWatts = Callable[[], float | None]
INTERVAL_S = 0.2
_MAX_SAMPLES = 1_000_000


@dataclass(slots=True)
class Power:
    """The watts of each role: `stated` on the command line, and measured `samples` of (time.monotonic(), watts)."""

    stated: Mapping[str, float] = field(default_factory=dict)
    samples: dict[str, deque[tuple[float, float]]] = field(default_factory=dict)

    def joules(self, role: str, began: float, ended: float) -> tuple[float, str] | None:
        """Joules of one role between two times and their source, "measured" if possible, else "stated"; or None."""
        if watts := mean_watts(self.samples.get(role, ()), began, ended):
            return watts * (ended - began), "measured"
        return (self.stated[role] * (ended - began), "stated") if role in self.stated else None

    def per_request(self, mode: Mode, turns: Sequence[TurnResult], completed: int) -> dict[str, Any]:
        """`joules_per_request` and `energy_source`; None if a machine's power is unknown or nothing completed."""
        energies = [self.joules(role, turn.began, turn.ended) for turn in turns for role in ROLES[mode]]
        known = [energy for energy in energies if energy is not None]
        if not completed or not energies or len(known) < len(energies):
            return {"joules_per_request": None, "energy_source": None}
        source = " and ".join(sorted({source for _, source in known}))
        return {"joules_per_request": sum(joules for joules, _ in known) / completed, "energy_source": source}


def mean_watts(samples: Sequence[tuple[float, float]], began: float, ended: float) -> float | None:
    """Mean power between two times, linear between samples; None if the samples do not cover both."""
    if ended <= began or len(samples) < 2 or samples[0][0] > began or samples[-1][0] < ended:
        return None
    joules = 0.0
    for (t0, w0), (t1, w1) in itertools.pairwise(samples):
        low, high = max(t0, began), min(t1, ended)
        if low < high:
            middle = w0 + (w1 - w0) * ((low + high) / 2 - t0) / (t1 - t0)
            joules += middle * (high - low)
    return joules / (ended - began)


@contextmanager
def sampled(power: Power, local_roles: Sequence[str]) -> Iterator[Power]:
    """Sample the power of these roles, which run on this machine, during the block; skip what cannot be read."""
    with ExitStack() as stack:
        for role, opener in (("prefill", _nvml), ("decode", _macmon)):
            read = opener(stack) if role in local_roles else None
            if read is not None:
                samples = power.samples.setdefault(role, deque(maxlen=_MAX_SAMPLES))
                stack.enter_context(_sampling(read, samples))
        yield power


@contextmanager
def _sampling(read: ReadWatts, samples: deque[tuple[float, float]]) -> Iterator[None]:
    ended = threading.Event()

    def sample() -> None:
        while True:
            watts = read()
            if watts is not None and math.isfinite(watts):
                samples.append((time.monotonic(), watts))
            if ended.wait(INTERVAL_S):
                return

    thread = threading.Thread(target=sample, name="power", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(5.0)


def _nvml(stack: ExitStack) -> ReadWatts | None:
    """A reader of the sum over this machine's NVIDIA GPUs, if nvidia-ml-py and a driver are installed."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no NVIDIA driver
        return None
    stack.callback(nvml.nvmlShutdown)
    gpus = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]

    def read() -> float | None:
        try:
            return float(sum(nvml.nvmlDeviceGetPowerUsage(gpu) for gpu in gpus)) / 1e3 if gpus else None
        except nvml.NVMLError:  # a GPU that does not report power: no sample
            return None

    return read


def _macmon(stack: ExitStack) -> ReadWatts | None:
    """A reader of the whole Mac's power from `macmon pipe`, if that program is installed."""
    program = shutil.which("macmon")
    if program is None:
        return None
    argv = [program, "pipe", "--interval", str(int(INTERVAL_S * 1e3))]
    process = stack.enter_context(
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    )
    stack.callback(process.kill)
    latest: list[float | None] = [None]

    def follow() -> None:
        assert process.stdout is not None
        with suppress(ValueError):  # the pipe is closed under the reader when the run ends
            for line in process.stdout:
                latest[0] = macmon_watts(line)

    threading.Thread(target=follow, name="macmon", daemon=True).start()
    return lambda: latest[0] if process.poll() is None else None


def macmon_watts(line: str) -> float | None:
    """The machine's watts in one line of macmon's JSON; the key depends on its version. None if there is none."""
    try:
        body = json.loads(line)
    except ValueError:
        return None
    for key in ("sys_power", "all_power"):
        value = body.get(key) if isinstance(body, dict) else None
        if isinstance(value, int | float) and value > 0:
            return float(value)
    return None
