"""iperf3 over loopback: what the kernel gives two C programs that neither fetch bytes from memory nor keep them."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.peers.pair import TIMEOUT_S, Turn, TurnFailed

CALL = "1M"  # bytes a call, as the bare socket's; iperf3's own 128K is slower


def run(nbytes: int) -> Turn:
    """One run of a fresh server and a fresh client."""
    port = _free_port()
    argv = ["iperf3", "--server", "--one-off", "--bind", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        turn = parse(_client(port, nbytes), nbytes)
        server.wait(TIMEOUT_S)
    finally:
        server.kill()
        server.wait()
    return turn


def version() -> str:
    """As `iperf3 --version` has it."""
    output = subprocess.run(["iperf3", "--version"], check=True, capture_output=True, text=True).stdout
    found = re.match(r"iperf (\S+)", output)
    return found[1] if found else output.partition("\n")[0]


def parse(report: Mapping[str, Any], nbytes: int) -> Turn:
    """A client's JSON report. iperf3 ends on a whole interval and may count fewer or more bytes: the rate is kept."""
    if "error" in report:
        raise TurnFailed(f"iperf3: {report['error']}")
    end = report["end"]
    received, cpu = end["sum_received"], end["cpu_utilization_percent"]
    seconds = nbytes / (received["bits_per_second"] / 8)
    return Turn(nbytes, seconds, seconds * cpu["host_total"] / 100, seconds * cpu["remote_total"] / 100)


def _client(port: int, nbytes: int) -> dict[str, Any]:
    """The report of a client, tried until the server listens: an accepted test connection would be its one."""
    argv = ["iperf3", "--client", "127.0.0.1", "--port", str(port), "--bytes", str(nbytes), "--length", CALL, "--json"]
    deadline = time.monotonic() + 5.0
    while True:
        output = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False).stdout
        report: dict[str, Any] = json.loads(output)
        if "unable to connect" not in report.get("error", "") or time.monotonic() > deadline:
            return report
        time.sleep(0.05)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
