"""From four bare hosts to an answer, and through the troubles of a life: real SSH, real servers, real addresses.

One module, and few servers at a time: four of them share this machine's cores. The tests build on one another.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from disagg.api.events import ShippedEvent
from disagg.api.requests import KVAddress, PrefillBody
from disagg.config import load
from disagg.errors import DisaggError
from disagg.inference.http import host_calls
from disagg.inference.http.connections import Connections
from disagg.kv.preamble import PREAMBLE
from disagg.tls.transport import HANDSHAKE
from disagg.token import Tokens
from tests.deadlines import ends_by_itself, wait_until
from tests.integration.deployed import Operator, edited, operator
from tests.testbed.bed import Bed
from tests.testbed.capture import Capture, capturing
from tests.testbed.false_server import HTTP_ANSWER, KV_ANSWER, false_server
from tests.values import present

PREFILL, OTHER_PREFILL, DECODE, OTHER_DECODE = "dgx-spark-1", "dgx-spark-2", "mac-studio-2", "mac-studio-1"
PATIENCE_S = 240.0
PROMPT = "def fibonacci(n):"
MAX_HELLO = 4096
"""Bytes, of the first message of a TLS handshake."""

pytestmark = [pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def deployed(machines: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """Deployed, and nothing runs yet. Afterwards nothing runs on any host."""
    machines.need_links()
    with machines.entered():
        made = operator(machines, tmp_path_factory.mktemp("operator"))
        assert {one["why"] for one in made.status(3).values()} == {"nothing is deployed there"}
        made.run("deploy", "--yes", timeout=PATIENCE_S)
        yield made
        made.run("stop", "--all")
        assert not servers(machines)


@pytest.fixture(scope="module")
def fleet(deployed: Operator) -> Operator:
    """Started."""
    deployed.run("start", "--timeout", PATIENCE_S, timeout=PATIENCE_S + 60)
    return deployed


def servers(bed: Bed) -> list[str]:
    return [line for host in bed.hosts.values() for line in host.command_lines() if serving(line)]


def serving(line: str) -> bool:
    return "disagg.servers" in line or "supervise" in line


def server_pid(bed: Bed, name: str) -> int:
    """The server's pid as this machine counts."""
    host = bed.hosts[name]
    found = [process.pid for process in host.processes() if "disagg.servers" in _command(process)]
    assert len(found) == 1, host.command_lines()
    return found[0]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def test_a_port_that_another_program_has_is_named_with_the_program(deployed: Operator) -> None:
    assert not servers(deployed.bed), "this is the first test: the others need a started fleet"
    listener = ["python3", "-c", "import socket, time; s = socket.create_server(('0.0.0.0', 8000)); time.sleep(600)"]
    host = deployed.bed.hosts[PREFILL]
    inside = [
        "nsenter",
        "-t",
        str(host.init),
        "-m",
        "-n",
        "-u",
        "-p",
        "setpriv",
        "--reuid=2000",
        "--regid=2000",
        "--clear-groups",
    ]
    with subprocess.Popen([*inside, *listener], start_new_session=True) as other:
        try:
            wait_until(lambda: _listens(host.address, 8000), 60, "the other program to listen")
            refused = " ".join(printed_by(deployed.run("start", "--host", PREFILL, code=1)).split())
            assert "port 8000 there is in use by python3 (pid " in refused
            status = deployed.status(3, "--host", PREFILL, "--timeout", 4)[PREFILL]
            assert status["state"] == "foreign" and "python3 (pid" in status["why"]
        finally:
            os.killpg(other.pid, signal.SIGKILL)


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 1).close()
    except OSError:
        return False
    return True


def printed_by(done: subprocess.CompletedProcess[str]) -> str:
    """The table on stdout, then the errors on stderr."""
    return done.stdout + done.stderr


class FirstAnswers(NamedTuple):
    """`disagg status` by host, the results of `disagg generate` with two models, and all packets of both."""

    statuses: dict[str, dict[str, Any]]
    results: list[dict[str, Any]]
    capture: Capture


@pytest.fixture(scope="module")
def first(fleet: Operator) -> FirstAnswers:
    prompt = ("generate", "-m", "qwen", "-m", "gpt-oss", "--max-tokens", "16", "--json", PROMPT)
    with capturing(fleet.bed) as capture:
        return FirstAnswers(fleet.status(), json.loads(fleet.run(*prompt).stdout)["results"], capture)


def token_file(fleet: Operator) -> Path:
    return next((fleet.folder / "state/disagg").glob("*/token"))


def test_four_bare_hosts_answer_two_models_at_once(first: FirstAnswers) -> None:
    statuses, results, _ = first
    assert {one["state"] for one in statuses.values()} == {"healthy"} and len(statuses) == 4
    assert {one["why"] for one in statuses.values()} == {""}, "code and hosts.toml are those of this checkout"
    assert [one["metrics"]["method"] for one in results] == ["disaggregated", "disaggregated"]
    assert {one["metrics"]["prefill_server"] for one in results} == {PREFILL, OTHER_PREFILL}
    assert all(one["metrics"]["decode_computed_tokens"] == 1 and one["text"] for one in results)


def test_the_packets_of_status_and_two_hand_offs_have_kv_but_neither_token_nor_prompt(
    fleet: Operator, first: FirstAnswers
) -> None:
    hosts = load(fleet.config).hosts
    for one in first.results:
        decode, kv_bytes = hosts[one["metrics"]["decode_server"]], one["metrics"]["kv_bytes"]
        kv = max(first.capture.sent_to(decode.address, present(decode.kv_port)), key=len)
        assert kv.startswith(b"DISAGG") and len(kv) > kv_bytes > 10_000, "KV is not encrypted: the capture is whole"
    assert not first.capture.has(token_file(fleet).read_bytes().strip()) and not first.capture.has(PROMPT.encode())


def test_the_screen_fits_80_columns_and_tells_what_a_plain_process_does_not_do(fleet: Operator) -> None:
    shown = fleet.run("status").stdout
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert all(name in shown for name in fleet.bed.hosts) and "not after a reboot" in " ".join(shown.split())


def test_a_healthy_fleet_is_looked_at_without_ssh(fleet: Operator) -> None:
    code = "import sys; sys.argv[1:1] = ['--config', sys.argv.pop(1)]; from disagg.cli.app import app\n"
    code += "try: app()\nfinally: print('SSH' if 'paramiko' in sys.modules or 'fabric' in sys.modules else 'no SSH')"
    argv = fleet.argv("status")
    done = subprocess.run(
        [argv[0], "-c", code, str(fleet.config), "status"],
        capture_output=True,
        text=True,
        env=fleet.environment,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "no SSH"


def test_the_hand_off_benchmark_runs_between_two_hosts_in_what_is_deployed_there(fleet: Operator) -> None:
    where = ("--from", PREFILL, "--to", DECODE, "--tokens", "64", "--rounds", "1")
    report = json.loads(fleet.run("bench", "handoff", *where, "--json", timeout=PATIENCE_S).stdout)
    assert (report["from"], report["to"]) == (PREFILL, DECODE)
    assert report["address"] == fleet.bed.hosts[DECODE].address
    assert report["handoff_gb_s"] > 0 and report["transports"]["base64_json"]["gb_s"] > 0


def test_starting_again_changes_nothing(fleet: Operator) -> None:
    before = {name: server_pid(fleet.bed, name) for name in fleet.bed.hosts}
    assert fleet.run("start").stdout.count("unchanged") == 4
    assert before == {name: server_pid(fleet.bed, name) for name in fleet.bed.hosts}


def test_a_killed_server_comes_back_by_itself_and_the_log_says_so(fleet: Operator) -> None:
    before = server_pid(fleet.bed, DECODE)
    argv = fleet.argv("logs", "-f", "-n", "1", "--host", DECODE)
    lines: list[str] = []
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=fleet.environment) as following:
        reader = threading.Thread(target=lambda: lines.extend(present(following.stdout)))
        reader.start()
        try:
            wait_until(lambda: lines, 60, "the log to be followed")
            os.kill(before, signal.SIGKILL)
            wait_until(lambda: any("ready" in line for line in lines[1:]), PATIENCE_S, "the server to be back")
            assert any("server_ended" in line and "exit=-9" in line for line in lines)
        finally:
            following.send_signal(signal.SIGINT)
            reader.join(60)
    assert following.returncode == 130
    assert server_pid(fleet.bed, DECODE) != before
    assert fleet.status()[DECODE]["state"] == "healthy"


def test_logs_of_all_hosts_are_one_stream_in_order_of_time(fleet: Operator) -> None:
    shown = fleet.run("logs", "-n", "20").stdout.splitlines()
    times = [match[0] for line in shown if (match := re.match(r"\d\d:\d\d:\d\d\.\d{3}", line))]
    assert times == sorted(times) and all(any(name in line for line in shown) for name in fleet.bed.hosts)
    assert fleet.run("logs", "--since", "1s", "--host", PREFILL).stdout == ""


def test_a_host_whose_link_is_cut_hides_no_other(fleet: Operator) -> None:
    with fleet.bed.cut(OTHER_PREFILL), ends_by_itself():
        statuses = fleet.status(4, "--timeout", 4)
    assert statuses[OTHER_PREFILL]["state"] == "unreachable" and "ping" in statuses[OTHER_PREFILL]["hint"]
    assert [one["state"] for name, one in statuses.items() if name != OTHER_PREFILL] == ["healthy"] * 3


def test_a_watch_tells_a_command_when_a_host_goes_down_and_when_it_is_back(fleet: Operator) -> None:
    changes = fleet.folder / "changes"
    run = f'echo "$DISAGG_HOST $DISAGG_CHANGE" >>{changes}'
    argv = fleet.argv("status", "--notify", "--every", "0.5", "--host", OTHER_PREFILL, "--json", "--run", run)
    lines: list[str] = []

    def last(change: str) -> bool:
        return bool(lines) and json.loads(lines[-1])["change"] == change

    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=fleet.environment) as watching:
        reader = threading.Thread(target=lambda: lines.extend(present(watching.stdout)))
        reader.start()
        try:
            with fleet.bed.cut(OTHER_PREFILL):
                wait_until(lambda: last("down"), PATIENCE_S, "the host to be down")
            wait_until(lambda: last("up"), PATIENCE_S, "the host to be back")
            wait_until(
                lambda: changes.exists() and changes.read_text().endswith(" up\n"), PATIENCE_S, "the command to run"
            )
        finally:
            watching.send_signal(signal.SIGINT)
            reader.join(60)
    assert watching.returncode == 130
    assert changes.read_text().startswith(f"{OTHER_PREFILL} down\n")
    assert json.loads(lines[0])["why"], "the reason that status shows"


def test_a_changed_hosts_toml_is_reported_and_a_restart_picks_the_new_release_up_with_hooks_around_both(
    fleet: Operator,
) -> None:
    old, new = "max_batch = 16\nmax_kv_bytes", "max_batch = 8\nmax_kv_bytes"
    assert old in fleet.config.read_text()
    fleet.config.write_text(fleet.config.read_text().replace(old, new))
    remark = fleet.status(1)[DECODE]
    assert remark["state"] == "healthy" and "runs other settings than hosts.toml here" in remark["why"]
    assert remark["hint"].startswith(f"disagg deploy --host {DECODE} && ")
    note = 'echo "$DISAGG_HOOK $DISAGG_HOSTS $DISAGG_RESULT" >>noted'
    names = ("before_deploy", "after_deploy", "before_restart", "after_restart")
    hooks = "\n".join(["[hooks]", *(f"{name} = '{note}'" for name in names)])
    with edited(fleet, ("[fleet]", f"{hooks}\n\n[fleet]")):
        plan = fleet.run("deploy", "--dry-run", "--host", DECODE).stdout
        assert "+max_batch = 8" in plan and "to send" in plan
        assert "hook after_deploy echo" in plan and "before_restart" not in plan, "a deployment restarts nothing"
        fleet.run("deploy", "--yes", "--host", DECODE)
        refused = printed_by(fleet.run("start", "--host", DECODE, code=1))
        assert "still runs release" in refused and f"disagg restart --host {DECODE}" in refused
        assert "restarted" in fleet.run("restart", "--host", DECODE, "--timeout", PATIENCE_S).stdout
    noted = (fleet.folder / "noted").read_text().splitlines()
    assert noted == [f"{name} {DECODE} {'planned' if 'before' in name else 'done'}" for name in names]
    audit = json.loads(fleet.run("logs", "--audit", "--host", DECODE, "--json").stdout)
    assert [name for name in names if f"hook {name}" in json.dumps(audit)] == list(names)
    healthy = fleet.status(0, "--host", DECODE)[DECODE]
    assert healthy["why"] == "" and healthy["release"] != remark["release"]


def test_a_service_that_crashes_at_start_is_reported_with_its_log_and_not_left_crashing(fleet: Operator) -> None:
    model = next((fleet.bed.hosts[DECODE].home / ".disagg/models/carried").glob("*/config.json"))
    content = model.read_text()
    model.write_text("{ broken")
    try:
        failed = printed_by(fleet.run("restart", "--host", DECODE, "--timeout", PATIENCE_S, code=1))
        assert (
            f"{DECODE} did not start" in failed and "lines of mac-studio-2's log" in failed and "start_failed" in failed
        )
        status = fleet.status(3, "--host", DECODE)[DECODE]
        assert status["state"] == "failed" and "config.json" in status["why"]
        wait_until(lambda: not any(map(serving, fleet.bed.hosts[DECODE].command_lines())), 60, "nothing to run there")
    finally:
        model.write_text(content)


def test_who_has_the_ports_of_a_stopped_server_is_sent_neither_token_nor_prompt_nor_kv(fleet: Operator) -> None:
    host = load(fleet.config).hosts[DECODE]  # it has crashed in the test before this one
    ports = {host.port: HTTP_ANSWER, present(host.kv_port): KV_ANSWER}
    with capturing(fleet.bed) as capture, false_server(fleet.bed.hosts[DECODE], ports):
        status = fleet.status(3, "--host", DECODE)[DECODE]
        fleet.run("generate", "-m", "qwen", "--max-tokens", "2", PROMPT)
        with suppress(DisaggError):
            asyncio.run(hand_off(fleet, KVAddress(host.address, present(host.kv_port))))
    assert status["state"] == "foreign"
    hellos, kv = (capture.sent_to(host.address, port) for port in ports)
    assert hellos and all(hello[0] == HANDSHAKE and len(hello) < MAX_HELLO for hello in hellos)
    assert kv and all(len(sent) == PREAMBLE.size for sent in kv), "a ticket's digest and a nonce"
    assert not capture.has(token_file(fleet).read_bytes().strip()) and not capture.has(PROMPT.encode())


async def hand_off(fleet: Operator, to: KVAddress) -> ShippedEvent:
    """Have a prefill host deliver a prompt's KV, as if its decode host had ended after it had issued the ticket."""
    host = load(fleet.config).hosts[PREFILL]
    body = PrefillBody(model=host.model, prompt=PROMPT, deliver=to, ticket="x" * 43)
    async with Connections(Tokens(token_file(fleet).read_text().strip())) as http:
        return await host_calls.closing_event(http, host_calls.EventCall(host, "/prefill", body, "false"), ShippedEvent)


def test_a_server_that_never_becomes_healthy_is_slow_and_left_running(fleet: Operator) -> None:
    slow = printed_by(fleet.run("start", "--host", DECODE, "--timeout", 0, code=3))
    assert "slow" in slow and "it was left running" in " ".join(slow.split())
    loading = fleet.status(3, "--host", DECODE)[DECODE]
    assert loading["state"] in ("loading", "silent") and loading["pid"] and loading["why"]
    shown = fleet.run("start", "--timeout", PATIENCE_S).stdout
    assert shown.count("unchanged") == 4, "the one that had crashed has its model again, and becomes healthy"


def test_another_token_is_found_out(fleet: Operator) -> None:
    token = token_file(fleet)
    content = token.read_text()
    token.write_text("another-token-for-this-test\n")
    try:
        status = fleet.status(3, "--host", DECODE)[DECODE]
    finally:
        token.write_text(content)
    assert status["state"] == "unauthorised" and status["why"] == "its token differs from the one here"


def test_stop_leaves_no_process_on_any_host_also_of_hosts_that_left_the_file(fleet: Operator) -> None:
    renamed = "mac-studio-9"
    with edited(
        fleet, (f"[hosts.{DECODE}]", f"[hosts.{renamed}]"), (f"[hosts.{DECODE}.engine]", f"[hosts.{renamed}.engine]")
    ):
        assert fleet.run("stop", "--all").stdout.count("stopped") == 4
    wait_until(lambda: not servers(fleet.bed), 60, "nothing to run anywhere")
    assert {one["state"] for one in fleet.status(3).values()} == {"not running"}
