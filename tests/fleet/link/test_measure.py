from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from disagg.config import load
from disagg.fleet.facts.python import HostPython
from disagg.fleet.link.judge import far_below, judge
from disagg.fleet.link.measure import PROBE, MeasuredLink, MeasurementBounds, measure, measure_all, rounds
from disagg.fleet.machine.connect import machine_for
from tests.deadlines import LONG_S, ends_by_itself
from tests.testbed.bed import HOSTS_TOML, Bed
from tests.values import of_type, present

SHORT = MeasurementBounds(seconds=0.5, bytes=64 << 20)
PYTHON = "/usr/bin/python3"


@pytest.fixture
def ends(bed: Bed) -> Iterator[dict[str, HostPython]]:
    bed.need_links()
    made = {name: HostPython(bed.host(name), machine_for(bed.host(name)), PYTHON) for name in bed.hosts}
    yield made
    for end in made.values():
        end.machine.close()


def test_a_link_is_measured_where_kv_goes_with_the_interface_it_takes(bed: Bed, ends: dict[str, HostPython]) -> None:
    link = measure(ends["dgx-spark-1"], ends["mac-studio-2"], SHORT)
    assert link.error is None and link.target == "169.254.150.102"
    assert link.path.interface == "eth0" and link.path.source == "169.254.150.103" and not link.path.gateway
    assert present(link.path.outgoing).speed == 10e9
    assert 0 < link.bytes <= SHORT.bytes and present(link.bits_per_s) > 20e6


@pytest.mark.parametrize("megabit", [40, 150])
def test_a_shaped_link_is_measured_as_no_faster_than_its_limit_and_called_far_below(
    bed: Bed, ends: dict[str, HostPython], megabit: int
) -> None:
    with bed.limited("mac-studio-2", megabit):
        link = measure(ends["dgx-spark-1"], ends["mac-studio-2"], MeasurementBounds(seconds=1.0))
    # Never more than the limit; a busy machine measures less (65 of 100 Mbit/s was seen).
    assert 0 < present(link.bits_per_s) < megabit * 1.15e6
    assert far_below(link)
    (finding,) = judge(link, bed.host("dgx-spark-1"), bed.host("mac-studio-2"))
    assert finding.level == "warning" and "far below the 10 Gb/s of eth0" in finding.text


def test_only_the_kv_direction_counts(bed: Bed, ends: dict[str, HostPython]) -> None:
    """A link that is slow the other way only, as some direct cables are, is not called slow."""
    shape = ["root", "tbf", "rate", "8mbit", "burst", "64kb", "latency", "50ms"]
    bed.hosts["dgx-spark-1"].as_root("tc", "qdisc", "replace", "dev", "eth0", *shape)
    try:
        slow = measure(ends["dgx-spark-1"], ends["mac-studio-2"], SHORT)
        fast = measure(ends["mac-studio-2"], replace_kv(ends["dgx-spark-1"]), SHORT)
    finally:
        bed.hosts["dgx-spark-1"].as_root("tc", "qdisc", "del", "dev", "eth0", "root")
    assert present(slow.bits_per_s) < 9.6e6 < present(fast.bits_per_s)


def replace_kv(end: Any) -> HostPython:
    return HostPython(replace(end.host, kv_port=9001), end.machine, end.python)


def test_a_route_that_is_not_there_is_named_and_the_receiver_does_not_wait(
    bed: Bed, ends: dict[str, HostPython]
) -> None:
    bed.hosts["dgx-spark-1"].as_root("ip", "route", "add", "unreachable", "169.254.150.102/32")
    try:
        with ends_by_itself():
            link = measure(ends["dgx-spark-1"], ends["mac-studio-2"], SHORT)
    finally:
        bed.hosts["dgx-spark-1"].as_root("ip", "route", "del", "unreachable", "169.254.150.102/32")
    assert link.bits_per_s is None and "cannot reach mac-studio-2 at 169.254.150.102" in present(link.error).message
    assert present(link.error).hint == "disagg exec --host dgx-spark-1 -- ping -c 3 169.254.150.102"
    assert measure(ends["dgx-spark-1"], ends["mac-studio-2"], SHORT).error is None  # and can be measured again


def test_a_data_address_that_the_receiver_does_not_have_is_named(ends: dict[str, HostPython]) -> None:
    wrong = ends["mac-studio-2"]
    wrong = HostPython(replace(wrong.host, data_address="10.99.0.1"), wrong.machine, wrong.python)
    link = measure(ends["dgx-spark-1"], wrong, SHORT)
    assert "mac-studio-2: cannot listen on 10.99.0.1" in present(link.error).message


def test_links_that_share_no_machine_are_measured_at_the_same_time() -> None:
    hosts = load(HOSTS_TOML).hosts
    one, two, four, three = (hosts[name] for name in ("dgx-spark-1", "dgx-spark-2", "mac-studio-1", "mac-studio-2"))
    assert rounds([(one, three), (two, four), (one, four), (two, three)]) == [[0, 1], [2, 3]]
    twin = replace(two, address=one.address)
    assert rounds([(one, three), (twin, four)]) == [[0], [1]]


def test_several_links_come_back_in_the_order_of_their_pairs(ends: dict[str, HostPython]) -> None:
    pairs = [("dgx-spark-1", "mac-studio-2"), ("dgx-spark-1", "mac-studio-1"), ("dgx-spark-2", "mac-studio-1")]
    links = measure_all([(ends[one].host, ends[other].host) for one, other in pairs], ends, SHORT)
    found = [of_type(link, MeasuredLink) for link in links]
    assert [(link.sender, link.receiver) for link in found] == pairs
    assert all(link.bits_per_s for link in found)


def test_a_stranger_without_the_token_is_turned_away_and_the_sender_still_served() -> None:
    """The receiver's own program: a wrong token ends that connection, not the measurement."""
    environment = {"DISAGG_LINK_TOKEN": "ab" * 32}
    argv = [sys.executable, "-I", str(PROBE), "receive", "127.0.0.1", f"{LONG_S:g}"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment, text=True) as process:
        port = int(present(process.stdout).readline().split(":")[1].strip(" }\n"))
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"x" * 64)
            assert stranger.recv(1) == b""
        send = [sys.executable, "-I", str(PROBE), "send", "127.0.0.1", str(port), "0.2", str(8 << 20)]
        done = subprocess.run(send, capture_output=True, env=environment, text=True, check=True, timeout=LONG_S)
        assert '"bytes": 8388608' in done.stdout
        assert process.wait(LONG_S) == 0
