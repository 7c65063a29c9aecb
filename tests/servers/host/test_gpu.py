from __future__ import annotations

import subprocess
import threading

import pytest

from disagg.servers.host import gpu

PATIENCE_S = 60.0
IOREG = '+-o AGXAccelerator\n  "PerformanceStatistics" = {"Tiler Utilization %"=3,"Device Utilization %"=42,"x"=1}\n'


def card(percent: str) -> str:
    return f"NVIDIA GB10, 580.95.05, [N/A], [N/A], [N/A], 41, {percent}\n"


@pytest.mark.parametrize(
    ("text", "share"),
    [(card("17"), 0.17), (card("17") + card("93"), 0.93), (IOREG, 0.42), (card("[N/A]"), None), ("", None)],
)
def test_both_tools_are_read(text: str, share: float | None) -> None:
    assert gpu.parse(text) == share


def test_utilisation_is_none_for_a_cpu_and_without_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu._COMMANDS, "cuda", ("no-such-tool",))
    assert gpu.utilisation("transformers/cpu") is None and gpu.utilisation("transformers/cuda:1") is None


def test_the_tool_runs_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_cached", {})
    monkeypatch.setattr(gpu, "_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(gpu, "_MAX_AGE_S", 1e9)
    monkeypatch.setitem(gpu._COMMANDS, "cuda", ("sh", "-c", f"printf '{card('50')}'"))
    assert gpu.utilisation("transformers/cuda") == 0.5
    monkeypatch.setitem(gpu._COMMANDS, "cuda", ("no-such-tool",))
    assert gpu.utilisation("transformers/cuda") == 0.5


def test_a_tool_that_cannot_be_killed_is_not_waited_for_and_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nvidia-smi in a driver that hangs."""
    monkeypatch.setattr(gpu, "_cached", {})
    monkeypatch.setattr(gpu, "_killed", killed := dict[str, subprocess.Popen[str]]())
    monkeypatch.setattr(gpu, "_TIMEOUT_S", 0.01)
    monkeypatch.setattr(gpu, "_MAX_AGE_S", -1.0)
    monkeypatch.setitem(gpu._COMMANDS, "cuda", ("sleep", "1000"))
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "kill", lambda _: None)
        assert gpu.utilisation("transformers/cuda") is None
    tool = killed["cuda"]
    monkeypatch.setattr(gpu, "_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setitem(gpu._COMMANDS, "cuda", ("sh", "-c", f"printf '{card('50')}'"))
    try:
        assert tool.poll() is None
        assert gpu.utilisation("transformers/cuda") is None, "the first one has not ended"
    finally:
        tool.kill()
        tool.wait(PATIENCE_S)
    assert gpu.utilisation("transformers/cuda") == 0.5


def test_whoever_asks_while_another_thread_measures_gets_the_last_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_cached", {"cuda": (0.0, 0.25)})
    monkeypatch.setattr(gpu, "_MAX_AGE_S", -1.0)
    monkeypatch.setitem(gpu._COMMANDS, "cuda", ("no-such-tool",))
    with gpu._lock:
        assert gpu.utilisation("transformers/cuda") == 0.25
    assert gpu.utilisation("transformers/cuda") is None


async def test_a_driver_that_hangs_costs_one_thread_and_the_last_figure_is_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on, measured = threading.Event(), list[str]()

    def hanging(backend: str) -> float:
        measured.append(backend)
        assert goes_on.wait(PATIENCE_S)
        return 0.5

    monkeypatch.setattr(gpu, "READ_S", 0.01)
    gauge = gpu.Gauge()
    monkeypatch.setattr(gpu, "utilisation", lambda _: 0.25)
    while await gauge.read("x/cuda") is None:
        pass
    monkeypatch.setattr(gpu, "utilisation", hanging)
    assert [await gauge.read("x/cuda") for _ in range(3)] == [0.25] * 3 and len(measured) == 1
    goes_on.set()
    while await gauge.read("x/cuda") != 0.5:
        pass


async def test_a_measurement_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """GET /status fails once then, not until the server is started again."""
    shares = iter([None, 0.5])

    def measured(_: str) -> float:
        if (share := next(shares)) is None:
            raise RuntimeError("can't start new thread")
        return share

    monkeypatch.setattr(gpu, "utilisation", measured)
    gauge = gpu.Gauge()
    with pytest.raises(RuntimeError, match="new thread"):
        await gauge.read("transformers/cuda")
    assert await gauge.read("transformers/cuda") == 0.5
