"""Ports of models, and what outlives a keeper."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from disagg.errors import FleetError
from disagg.keeper.child import Child, Measured, Records, assigned, end_orphan
from tests.deadlines import LONG_S, wait_until

PORTS = range(100, 108)


@pytest.mark.parametrize(
    ("models", "before", "ports"),
    [
        (["a", "b"], {}, {"a": (100, 101), "b": (102, 103)}),
        (["b", "a"], {"a": (100, 101), "b": (102, 103)}, {"a": (100, 101), "b": (102, 103)}),
        (["c"], {"a": (100, 101), "b": (102, 103)}, {"c": (104, 105), "a": (100, 101), "b": (102, 103)}),
        (["b", "d"], {"a": (100, 101), "b": (102, 103)}, {"b": (102, 103), "d": (104, 105), "a": (100, 101)}),
        (["a"], {"a": (90, 91)}, {"a": (100, 101)}),
        (["a"], {"a": (100,)}, {"a": (100, 101)}),
    ],
    ids=["new", "another order", "others are remembered", "one is gone", "another range", "another role"],
)
def test_a_model_keeps_its_ports(
    models: list[str], before: dict[str, tuple[int, ...]], ports: dict[str, tuple[int, ...]]
) -> None:
    assert assigned(models, PORTS, 2, before) == ports


def test_ports_of_models_that_are_listed_no_more_are_given_away_when_none_are_left() -> None:
    before = {name: (100 + 2 * number, 101 + 2 * number) for number, name in enumerate("abcd")}
    found = assigned(["d", "e", "f"], PORTS, 2, before)
    assert found["d"] == (106, 107) and {*found["e"], *found["f"]} == {100, 101, 102, 103}
    assert len({port for pair in found.values() for port in pair}) == 2 * len(found)


def test_too_few_ports_are_one_clear_error() -> None:
    with pytest.raises(FleetError, match="5 models need 10 ports, and 100-107 are 8"):
        assigned(list("abcde"), PORTS, 2, {})


def test_the_record_is_there_for_the_next_keeper_and_one_that_is_damaged_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keeper.json"
    records = Records(path)
    records.assign(["a"], PORTS, 2)
    records.note("a", measured=Measured(1.5, 7, "digest"))
    again = Records(path)
    assert again.measured == {"a": Measured(1.5, 7, "digest")}
    assert again.assign(["b", "a"], PORTS, 2)["a"] == (100, 101)
    path.write_text('{"ports": 3}')
    assert Records(path).measured == {}
    assert "keeper_record_lost" in caplog.text


def test_an_orphan_is_ended_and_another_process_with_its_number_is_not() -> None:
    sleeps = "import time; time.sleep(600)"
    ours = subprocess.Popen([sys.executable, "-c", sleeps, "disagg.servers"], start_new_session=True)
    other = subprocess.Popen([sys.executable, "-c", sleeps], start_new_session=True)
    try:
        began = {process: psutil.Process(process.pid).create_time() for process in (ours, other)}
        assert not end_orphan(ours.pid, began[ours] - 60)
        assert not end_orphan(other.pid, began[other])
        assert end_orphan(ours.pid, began[ours]) and not psutil.pid_exists(ours.pid)
        assert not end_orphan(ours.pid, began[ours])
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


@pytest.mark.slow
async def test_a_process_whose_own_processes_load_the_model_shows_that_it_works(tmp_path: Path) -> None:
    loads = "import subprocess, sys; subprocess.call([sys.executable, '-c', 'while True: pass'])"
    child = Child([sys.executable, "-c", loads], tmp_path / "log", lambda: None)
    try:
        started = child.heard
        async with asyncio.timeout(LONG_S):
            while child.heard == started:
                child.watch(time.monotonic())
                await asyncio.sleep(0.05)
        assert psutil.Process(child.pid).cpu_times().user < 1
    finally:
        child.signal(signal.SIGKILL)
        child.close()
        await asyncio.to_thread(wait_until, lambda: child.ended() is not None)
