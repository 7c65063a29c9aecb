"""iperf3 over loopback: the kernel's rate for two C programs that neither read the bytes from memory nor keep them."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.peers.pair import TIMEOUT_S, TimedTransfer, TransferFailed
from disagg.fleet.lifecycle.temporary import free_ports

CALL = "1M"  # bytes a call, as the bare socket's; iperf3's own 128K is slower


def run(nbytes: int) -> TimedTransfer:
    """One run of a fresh server and a fresh client."""
    (port,) = free_ports(["127.0.0.1"], set())
    argv = ["iperf3", "--server", "--one-off", "--bind", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        transfer = parse(_client(port, nbytes), nbytes)
        server.wait(TIMEOUT_S)
    finally:
        server.kill()
        server.wait()
    return transfer


def version() -> str:
    """The version that `iperf3 --version` prints."""
    output = subprocess.run(["iperf3", "--version"], check=True, capture_output=True, text=True).stdout
    match = re.match(r"iperf (\S+)", output)
    return match[1] if match else output.partition("\n")[0]


def parse(report: Mapping[str, Any], nbytes: int) -> TimedTransfer:
    """The transfer in a client's JSON report. iperf3 ends with a whole interval and may send fewer or more bytes than
    requested; its rate is used."""
    if "error" in report:
        raise TransferFailed(f"iperf3: {report['error']}")
    end = report["end"]
    received, cpu = end["sum_received"], end["cpu_utilization_percent"]
    seconds = nbytes / (received["bits_per_second"] / 8)
    return TimedTransfer(nbytes, seconds, seconds * cpu["host_total"] / 100, seconds * cpu["remote_total"] / 100)


def _client(port: int, nbytes: int) -> dict[str, Any]:
    """The report of a client, retried until the server listens: the server accepts one connection, so none may be a
    test."""
    argv = ["iperf3", "--client", "127.0.0.1", "--port", str(port), "--bytes", str(nbytes), "--length", CALL, "--json"]
    deadline = time.monotonic() + 5.0
    while True:
        output = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False).stdout
        report: dict[str, Any] = json.loads(output)
        if "unable to connect" not in report.get("error", "") or time.monotonic() > deadline:
            return report
        time.sleep(0.05)
