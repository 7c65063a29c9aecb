"""Which other hosts.toml of this user has started a server."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

from disagg.fleet.lifecycle.elsewhere import started_elsewhere
from disagg.fleet.lifecycle.state import ProcessRecord, State
from disagg.fleet.machine import process as local
from tests.fleet.farm import make_fleet


def test_a_damaged_record_hides_no_other_server(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path)
    host = next(iter(fleet.hosts.values()))
    others = [State.of(replace(fleet, path=tmp_path / name / "hosts.toml"), tmp_path / "state") for name in "ab"]
    for other in others:
        other.folder.mkdir(parents=True)
    damaged, running = sorted(others, key=lambda other: other.folder)
    (damaged.folder / "x.pid").write_text("{")
    (running.folder / "a.pid").write_text("{")
    running.record(ProcessRecord("z", os.getpid(), local.identity(os.getpid()) or "", ""))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = started_elsewhere(State.of(fleet, tmp_path / "state"), host, listener.getsockname()[1])
    assert found is not None and (found.hosts_file, found.host) == (running.shown, "z")
