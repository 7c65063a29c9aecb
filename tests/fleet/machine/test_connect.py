"""The machines of a command: one per host, all closed at its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.config import EngineOptions, Host
from disagg.fleet.machine.connect import Machines
from disagg.fleet.machine.fan_out import each
from disagg.fleet.machine.local import LocalMachine

A = Host("a", "127.0.0.1", ("prefill",), "tiny", EngineOptions("transformers"), 8000, connector="local")
HOSTS = [replace(A, name=name) for name in "abc"]


class Watched(LocalMachine):
    closed: list[str]

    def close(self) -> None:
        self.closed.append(self.name)
        super().close()
        if self.name == "b":
            raise RuntimeError("b cannot be closed")


def test_each_host_has_one_machine_also_of_several_threads() -> None:
    with Machines() as machines:
        (first, *_), *others = [[one.value for one in each([A] * 8, lambda host: machines[host])] for _ in range(2)]
        assert first is not None
        assert all(one is first for found in others for one in found)


def test_all_machines_are_closed_when_closing_one_of_them_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(Watched, "closed", closed, raising=False)
    machines = Machines(lambda host: Watched(host.name))
    for host in HOSTS:
        assert machines[host].name == host.name
    with pytest.raises(RuntimeError, match="b cannot be closed"):
        machines.close()
    assert sorted(closed) == ["a", "b", "c"]
