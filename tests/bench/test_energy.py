"""Energy per request: stated, read, and neither."""

from __future__ import annotations

import sys
import types
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from disagg.bench.energy import Power, macmon_watts, mean_watts, sampled
from disagg.bench.records import TurnResult
from tests.bench.bench_parts import record
from tests.deadlines import wait_until
from tests.programs import python_program


def turn(mode: Any, began: float = 0.0, ended: float = 10.0) -> Any:
    return TurnResult(0, mode, warmup=False, began=began, ended=ended, records=(record(),))


def test_stated_watts_times_the_turns_time_over_the_requests() -> None:
    power = Power(stated={"prefill": 240.0, "decode": 180.0})
    turns = [turn("disaggregated"), turn("disaggregated", 20.0, 25.0)]
    assert power.per_request("disaggregated", turns, 3) == {
        "joules_per_request": 420 * 15 / 3,
        "energy_source": "stated",
    }
    assert power.per_request("decode-alone", [turn("decode-alone")], 5)["joules_per_request"] == 360
    assert power.per_request("prefill-alone", [turn("prefill-alone")], 5)["joules_per_request"] == 480


def test_half_a_fleets_power_gives_no_figure_for_the_hand_off() -> None:
    power = Power(stated={"decode": 180.0})
    assert power.per_request("disaggregated", [turn("disaggregated")], 3)["joules_per_request"] is None
    assert power.per_request("decode-alone", [turn("decode-alone")], 3)["energy_source"] == "stated"


def test_without_completed_requests_there_is_no_energy_per_request() -> None:
    assert Power(stated={"decode": 1.0}).per_request("decode-alone", [turn("decode-alone")], 0) == {
        "joules_per_request": None,
        "energy_source": None,
    }


def test_what_was_read_goes_before_what_was_stated_and_a_mixture_is_named() -> None:
    samples = {"prefill": deque([(-1.0, 100.0), (11.0, 100.0)])}
    power = Power(stated={"prefill": 240.0, "decode": 180.0}, samples=samples)
    assert power.per_request("prefill-alone", [turn("prefill-alone")], 1) == {
        "joules_per_request": pytest.approx(1000.0),
        "energy_source": "measured",
    }
    assert power.per_request("disaggregated", [turn("disaggregated")], 1)["energy_source"] == "measured and stated"


def test_mean_power_is_linear_between_samples() -> None:
    samples = [(0.0, 100.0), (10.0, 200.0), (20.0, 200.0)]
    assert mean_watts(samples, 0.0, 10.0) == pytest.approx(150)
    assert mean_watts(samples, 5.0, 15.0) == pytest.approx((175 * 5 + 200 * 5) / 10)
    assert mean_watts(samples, 2.0, 2.5) == pytest.approx(122.5)


@pytest.mark.parametrize("span", [(-1.0, 5.0), (5.0, 21.0), (5.0, 5.0)])
def test_samples_that_do_not_reach_over_the_turn_give_nothing(span: tuple[float, ...]) -> None:
    assert mean_watts([(0.0, 100.0), (20.0, 100.0)], *span) is None


@pytest.mark.parametrize(
    ("line", "watts"),
    [
        ('{"all_power": 12.5, "sys_power": 30}', 30.0),
        ('{"all_power": 12.5}', 12.5),
        ('{"sys_power": 0.0, "all_power": 7}', 7.0),
        ('{"gpu_power": 3}', None),
        ("[1]", None),
        ("not json", None),
    ],
)
def test_macmons_lines_are_read_tolerantly(line: str, watts: float | None) -> None:
    assert macmon_watts(line) == watts


def test_macmon_is_read_as_a_process_and_ended_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "macmon"
    loop = "while True:\n    print('{\"sys_power\": 55.0}', flush=True)\n    time.sleep(0.05)\n"
    python_program(program, f"import time\n{loop}")
    monkeypatch.setenv("PATH", str(tmp_path))
    power = Power()
    with sampled(power, ["decode"]):
        wait_until(lambda: len(power.samples["decode"]) >= 2, 30, "two samples")
    assert {watts for _, watts in power.samples["decode"]} == {55.0}


def test_nvml_is_the_sum_over_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: a module with NVML's names stands in for it."""
    nvml: Any = types.ModuleType("pynvml")
    calls: list[str] = []
    nvml.NVMLError = OSError
    nvml.nvmlInit = lambda: calls.append("init")
    nvml.nvmlShutdown = lambda: calls.append("shutdown")
    nvml.nvmlDeviceGetCount = lambda: 2
    nvml.nvmlDeviceGetHandleByIndex = lambda number: number
    nvml.nvmlDeviceGetPowerUsage = lambda gpu: 40_000 + gpu
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    power = Power()
    with sampled(power, ["prefill"]):
        wait_until(lambda: len(power.samples["prefill"]) >= 2, 30, "two samples")
    assert power.samples["prefill"][0][1] == pytest.approx(80.001)
    assert calls == ["init", "shutdown"]


def test_a_machine_without_meters_is_left_to_what_was_stated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    power = Power()
    with sampled(power, ["prefill", "decode"]):
        pass
    assert power.samples == {}
