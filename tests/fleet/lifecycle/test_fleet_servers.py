from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError, FleetError, HostLocked, PortInUse, StartFailed, UsageError
from disagg.fleet.lifecycle.fleet_servers import FleetServers
from disagg.fleet.lifecycle.state import ProcessRecord, State
from disagg.fleet.machine import process as local
from tests.deadlines import LONG_S, wait_until
from tests.fleet.yards import Farm, make_fleet
from tests.values import no_space, of_type, present


def outcomes(results: Any) -> Any:
    return {result.host: result.outcome for result in results}


def test_start_brings_every_host_up_and_a_second_start_changes_nothing(farm: Farm) -> None:
    assert outcomes(farm.lifecycle.start()) == {"a": "started", "b": "started"}
    pids = {name: present(farm.state.recorded(name)).pid for name in ("a", "b")}
    assert outcomes(farm.lifecycle.start()) == {"a": "unchanged", "b": "unchanged"}
    assert pids == {name: present(farm.state.recorded(name)).pid for name in ("a", "b")}


def test_a_node_is_not_started_to_wait_for_one_that_no_host_is(farm: Farm) -> None:
    nodes = replace(farm.fleet.hosts["a"].engine, nnodes=2, head_address="10.0.0.1:29500")
    farm.use(replace(farm.fleet, hosts={"a": replace(farm.fleet.hosts["a"], engine=nodes)}))
    with pytest.raises(ConfigError, match="a is one of 2 nodes, and no host is the one of node_rank 1"):
        farm.lifecycle.start()


def test_the_nodes_of_one_vllm_are_restarted_together_and_none_is_left_for_another_one(farm: Farm) -> None:
    nodes = replace(farm.fleet.hosts["a"].engine, head_address="10.0.0.1:29500")
    farm.use(replace(farm.fleet, hosts={name: replace(host, engine=nodes) for name, host in farm.fleet.hosts.items()}))
    farm.lifecycle.start()
    farm.behaviour["a"] = "crash"
    assert outcomes(farm.lifecycle.restart()) == {"a": "failed", "b": "restarted"}


def test_servers_run_in_a_session_of_their_own_without_stdin(farm: Farm) -> None:
    farm.lifecycle.start(["a"])
    pid = present(farm.state.recorded("a")).pid
    assert os.getsid(pid) == pid
    assert Path(f"/proc/{pid}/fd/0").readlink() == Path("/dev/null")


def test_the_token_is_in_no_argument_and_no_environment_value(farm: Farm) -> None:
    farm.lifecycle.start(["a"])
    pid, token = present(farm.state.recorded("a")).pid, farm.state.tokens.current
    visible = Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/environ").read_text()
    assert token not in visible
    assert f"DISAGG_TOKEN_FILE={farm.state.tokens.path}" in visible


def test_stop_ends_the_servers_and_leaves_no_record(farm: Farm) -> None:
    farm.lifecycle.start()
    pids = [present(farm.state.recorded(name)).pid for name in ("a", "b")]
    assert outcomes(farm.lifecycle.stop()) == {"a": "stopped", "b": "stopped"}
    assert [local.identity(pid) for pid in pids] == [None, None]
    assert farm.state.recorded_hosts() == []
    assert outcomes(farm.lifecycle.stop()) == {"a": "not running", "b": "not running"}


def test_a_server_that_crashes_is_reported_with_its_last_error_and_hides_no_other(farm: Farm) -> None:
    farm.behaviour["a"] = "crash"
    failed, started = farm.lifecycle.start()
    assert (failed.outcome, started.outcome) == ("failed", "started")
    assert present(failed.error).message == "a did not start: no weights in /models/x"
    assert present(failed.error).hint == "fetch them"
    assert farm.state.recorded_hosts() == ["b"]


def test_a_server_that_dies_without_a_log_line_is_reported_with_the_end_of_its_log(farm: Farm) -> None:
    farm.behaviour["a"] = "die"
    (failed,) = farm.lifecycle.start(["a"])
    assert "Segmentation fault, as it were" in present(failed.error).message
    assert present(failed.error).hint == "disagg logs --host a"
    assert of_type(failed.error, StartFailed).log[-1] == "Segmentation fault, as it were"


def test_a_server_that_loads_past_the_deadline_is_slow_and_left_running(farm: Farm) -> None:
    farm.behaviour["a"] = "slow"
    (slow,) = farm.lifecycle.start(["a"], timeout_s=1)
    assert slow.outcome == "slow" and "is still loading after " in present(slow.error).message
    assert local.identity(present(farm.state.recorded("a")).pid) is not None


def test_a_server_that_listens_but_never_answers_is_slow(farm: Farm) -> None:
    farm.behaviour["a"] = "mute"
    (slow,) = farm.lifecycle.start(["a"], timeout_s=1)
    assert slow.outcome == "slow"


def test_a_server_that_reports_an_error_is_ended(farm: Farm) -> None:
    farm.behaviour["a"] = "broken"
    (failed,) = farm.lifecycle.start(["a"])
    assert (failed.outcome, present(failed.error).message) == ("failed", "a: its engine does not work")
    assert present(failed.error).hint.startswith("read its log: ")
    assert farm.state.recorded("a") is None


def test_a_taken_port_names_the_port_and_its_holder_and_spawns_nothing(farm: Farm) -> None:
    port = farm.fleet.hosts["a"].port
    with socket.create_server(("127.0.0.1", port)):
        failed, started = farm.lifecycle.start()
    assert isinstance(failed.error, PortInUse)
    assert f"port {port}" in failed.error.message and f"pid {os.getpid()}" in failed.error.message
    assert started.outcome == "started" and farm.state.recorded("a") is None


def test_a_taken_kv_port_is_found_too(farm: Farm) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        hosts = {"a": replace(farm.fleet.hosts["a"], kv_port=taken)}
        farm.use(replace(farm.fleet, hosts=hosts))
        (failed,) = farm.lifecycle.start()
    assert isinstance(failed.error, PortInUse) and str(taken) in failed.error.message


def test_stop_never_signals_a_process_that_only_has_the_recorded_pid(farm: Farm) -> None:
    farm.state.prepare(farm.fleet)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        farm.state.record(ProcessRecord("a", bystander.pid, "another boot:123", ""))
        assert outcomes(farm.lifecycle.stop(["a"])) == {"a": "not running"}
        assert bystander.poll() is None
        assert farm.state.recorded("a") is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(farm: Farm) -> None:
    farm.behaviour["a"] = "stubborn"
    farm.lifecycle.start(["a"])
    farm.lifecycle.grace_s = 0.3
    assert outcomes(farm.lifecycle.stop(["a"])) == {"a": "killed"}


def test_a_server_killed_from_outside_is_started_again(farm: Farm) -> None:
    farm.lifecycle.start(["a"])
    pid = present(farm.state.recorded("a")).pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: local.identity(pid) is None)
    assert outcomes(farm.lifecycle.start(["a"])) == {"a": "started"}
    assert farm.state.log_file("a").with_name("a.log.1").exists()


def test_a_changed_host_asks_for_a_restart_instead_of_claiming_unchanged(farm: Farm) -> None:
    farm.lifecycle.start(["a"])
    hosts = {name: replace(host, queue_size=5) for name, host in farm.fleet.hosts.items()}
    changed = FleetServers(replace(farm.fleet, hosts=hosts), farm.state, argv=farm.argv)
    (result,) = changed.start(["a"])
    assert result.outcome == "failed" and present(result.error).hint == "disagg restart --host a"


def test_stop_also_ends_a_server_whose_host_left_the_file(farm: Farm) -> None:
    farm.lifecycle.start()
    smaller = replace(farm.fleet, hosts={"a": farm.fleet.hosts["a"]})
    results = FleetServers(smaller, farm.state, grace_s=3).stop()
    assert outcomes(results) == {"a": "stopped", "b": "stopped"}


def test_stop_all_ends_the_servers_of_other_fleets_on_this_machine(farm: Farm, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Farm(tmp_path / "other")
    other.state = State.of(other.fleet, tmp_path / "state")  # beside the first fleet's, as one user's fleets are
    other.lifecycle.state = other.state
    other.lifecycle.start(["a"])
    path = other.fleet.path
    assert outcomes(farm.lifecycle.stop()) == {"a": "not running", "b": "not running"}
    assert other.state.recorded_hosts() == ["a"], "without --all other fleets go on"
    results = farm.lifecycle.stop(others=True)
    assert outcomes(results) == {"a": "not running", "b": "not running", f"a of {path}": "stopped"}
    assert other.state.recorded_hosts() == []
    assert outcomes(farm.lifecycle.stop(others=True)) == {"a": "not running", "b": "not running"}


def test_a_damaged_record_of_another_fleet_does_not_keep_its_other_servers_running(farm: Farm, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Farm(tmp_path / "other")
    other.state = State.of(other.fleet, tmp_path / "state")
    other.lifecycle.state = other.state
    other.lifecycle.start(["b"])
    record = other.state.folder / "a.pid"
    record.write_text("{")
    path = other.fleet.path
    *_, damaged, stopped = farm.lifecycle.stop(others=True)
    assert (damaged.host, damaged.outcome) == (f"a of {path}", "failed")
    assert f"{record} is damaged" in present(damaged.error).message
    assert (stopped.host, stopped.outcome) == (f"b of {path}", "stopped")
    assert other.state.recorded_hosts() == ["a"]


def test_stop_all_reports_another_fleet_that_is_busy(farm: Farm, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Farm(tmp_path / "other")
    other.state = State.of(other.fleet, tmp_path / "state")
    other.lifecycle.state = other.state
    other.lifecycle.start(["a"])
    with other.state.locked("start"):
        *_, busy = farm.lifecycle.stop(others=True)
    assert (busy.host, busy.outcome) == (f"fleet {other.fleet.path}", "failed")
    assert "for `disagg start` since" in present(busy.error).message
    other.lifecycle.stop()


def test_an_unknown_host_lists_those_there_are(farm: Farm) -> None:
    with pytest.raises(UsageError, match=r"no host c \(it has: a, b\)"):
        farm.lifecycle.start(["c"])


def test_an_interrupted_start_stops_what_it_started_and_nothing_else(farm: Farm) -> None:
    farm.lifecycle.start(["a"])
    farm.behaviour["b"] = "slow"
    main = present(threading.main_thread().ident)
    reported = threading.Event()
    farm.lifecycle.report = lambda host, doing: reported.set() if (host, doing) == ("b", "loading") else None

    def interrupt() -> None:
        reported.wait(LONG_S)
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        farm.lifecycle.start(timeout_s=60)
    interrupter.join()
    assert farm.state.recorded_hosts() == ["a"]
    assert local.identity(present(farm.state.recorded("a")).pid) is not None


def test_two_starts_at_once_do_not_interleave(farm: Farm) -> None:
    refused = pytest.raises(
        HostLocked, match=rf"@{socket.gethostname()} holds it for `disagg start` since .* \(pid \d+\)"
    )
    with farm.state.locked("start"), refused, farm.state.locked("stop"):
        pass
    with farm.state.locked("stop"):
        pass


def test_a_python_that_does_not_exist_is_a_clear_error(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, ("a",), python="/no/such/python")
    (failed,) = FleetServers(fleet, State.of(fleet, tmp_path / "state")).start()
    assert present(failed.error).message == "cannot run /no/such/python: No such file or directory"


def test_the_real_command_line_names_file_and_host(farm: Farm) -> None:
    from disagg.fleet.lifecycle.local import server_argv

    argv, environment = server_argv(farm.fleet, farm.fleet.hosts["a"])
    assert argv[:3] == [sys.executable, "-P", "-m"]
    assert argv[3:] == ["disagg.servers", "--config", str(farm.fleet.path), "--host", "a"]
    assert "PYTHONPATH" in environment


def test_a_server_that_cannot_be_recorded_is_ended_again(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    spawned, spawn = [], local.spawn

    def noted(*arguments: Any, **options: Any) -> int:
        spawned.append(spawn(*arguments, **options))
        return spawned[-1]

    monkeypatch.setattr(local, "spawn", noted)
    farm.state.prepare(farm.fleet)
    monkeypatch.setattr(os, "fsync", no_space)
    (failed,) = farm.lifecycle.start(["a"])
    assert failed.outcome == "failed" and isinstance(failed.error, FleetError)
    assert "a.pid" in failed.error.message and "No space left on device" in failed.error.message
    assert len(spawned) == 1 and local.identity(spawned[0]) is None


def test_stop_says_so_where_a_record_is_damaged(farm: Farm) -> None:
    farm.lifecycle.start(["b"])
    (farm.state.folder / "a.pid").write_text("{")
    a, b = farm.lifecycle.stop()
    assert (a.outcome, b.outcome) == ("failed", "stopped") and "a.pid is damaged" in present(a.error).message
    farm.state.drop_record("a")


def test_a_log_that_cannot_be_written_is_an_error_of_its_host(farm: Farm) -> None:
    farm.state.prepare(farm.fleet)
    (farm.state.folder / "a.log.1").mkdir()
    farm.state.log_file("a").write_text("before\n")
    (failed,) = farm.lifecycle.start(["a"])
    assert (
        failed.outcome == "failed"
        and "cannot write" in present(failed.error).message
        and "a.log" in present(failed.error).message
    )
