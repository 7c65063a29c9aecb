from __future__ import annotations

import pytest

from disagg.servers.health import gpu

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


def test_the_tool_runs_at_most_once_a_second_and_is_stopped_if_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_cached", {})
    monkeypatch.setitem(gpu._COMMANDS, "cuda", ("sh", "-c", f"printf '{card('50')}'"))
    assert gpu.utilisation("transformers/cuda") == 0.5
    monkeypatch.setitem(gpu._COMMANDS, "cuda", ("sleep", "20"))
    assert gpu.utilisation("transformers/cuda") == 0.5
    monkeypatch.setattr(gpu, "_cached", {})
    assert gpu.utilisation("transformers/cuda") is None
