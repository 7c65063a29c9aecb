from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from pathlib import Path

import pytest

from disagg.servers.host.gpu import Gauge, GPUTool, parse

PATIENCE_S = 60.0
IOREG = '+-o AGXAccelerator\n  "PerformanceStatistics" = {"Tiler Utilization %"=3,"Device Utilization %"=42,"x"=1}\n'


def card(percent: str) -> str:
    return f"NVIDIA GB10, 580.95.05, [N/A], [N/A], [N/A], 41, {percent}\n"


HALF = {"cuda": ("printf", card("50"))}
MISSING = {"cuda": ("no-such-tool",)}


@pytest.mark.parametrize(
    ("text", "share"),
    [(card("17"), 0.17), (card("17") + card("93"), 0.93), (IOREG, 0.42), (card("[N/A]"), None), ("", None)],
)
def test_both_tools_are_read(text: str, share: float | None) -> None:
    assert parse(text) == share


def test_utilisation_is_none_for_a_cpu_and_without_the_tool() -> None:
    tool = GPUTool(MISSING)
    assert tool.utilisation("transformers/cpu") is None and tool.utilisation("transformers/cuda:1") is None


def test_the_tool_runs_at_most_once_a_second() -> None:
    tool = GPUTool(HALF, PATIENCE_S, max_age_s=1e9)
    assert tool.utilisation("transformers/cuda") == 0.5
    tool.commands = MISSING
    assert tool.utilisation("transformers/cuda") == 0.5


def test_a_tool_that_cannot_be_killed_is_not_waited_for_and_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nvidia-smi in a driver that hangs."""
    tool, killed = GPUTool({"cuda": ("sleep", "1000")}, 0.01, max_age_s=-1.0), list[subprocess.Popen[str]]()

    def survive(process: subprocess.Popen[str]) -> None:
        killed.append(process)

    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "kill", survive)
        assert tool.utilisation("transformers/cuda") is None
    tool.commands, tool.timeout_s = HALF, PATIENCE_S
    try:
        assert killed[0].poll() is None
        assert tool.utilisation("transformers/cuda") is None, "the first one has not ended"
    finally:
        killed[0].kill()
        killed[0].wait(PATIENCE_S)
    assert tool.utilisation("transformers/cuda") == 0.5


async def test_whoever_asks_while_a_thread_measures_gets_the_last_value(tmp_path: Path) -> None:
    figure, pipe = tmp_path / "figure", tmp_path / "pipe"
    figure.write_text(card("25"))
    gauge = Gauge(GPUTool({"cuda": ("cat", str(figure))}, PATIENCE_S, max_age_s=-1.0).utilisation, 0.01)
    while await gauge.read("transformers/cuda") is None:
        pass
    os.mkfifo(pipe)
    pipe.replace(figure)  # the tool waits for somebody who writes
    assert [await gauge.read("transformers/cuda") for _ in range(3)] == [0.25] * 3
    await asyncio.to_thread(figure.write_text, "")
    while await gauge.read("transformers/cuda") is not None:
        pass


async def test_a_driver_that_hangs_costs_one_thread_and_the_last_figure_is_stated() -> None:
    hangs, goes_on, measured = threading.Event(), threading.Event(), list[str]()

    def measure(backend: str) -> float:
        if not hangs.is_set():
            return 0.25
        measured.append(backend)
        assert goes_on.wait(PATIENCE_S)
        return 0.5

    gauge = Gauge(measure, 0.01)
    while await gauge.read("x/cuda") is None:
        pass
    hangs.set()
    assert [await gauge.read("x/cuda") for _ in range(3)] == [0.25] * 3 and len(measured) == 1
    goes_on.set()
    while await gauge.read("x/cuda") != 0.5:
        pass


async def test_a_measurement_that_failed_is_made_again() -> None:
    """GET /status fails once then, not until the server is started again."""
    shares = iter([None, 0.5])

    def measured(_: str) -> float:
        if (share := next(shares)) is None:
            raise RuntimeError("can't start new thread")
        return share

    gauge = Gauge(measured)
    with pytest.raises(RuntimeError, match="new thread"):
        await gauge.read("transformers/cuda")
    assert await gauge.read("transformers/cuda") == 0.5
