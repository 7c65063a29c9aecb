from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from disagg.config import load
from disagg.errors import PeerLost
from disagg.fleet.link.judge import far_below, hidden_tokens_per_s, judge, rate
from disagg.fleet.link.measure import MeasuredLink
from disagg.fleet.link.route import Interface, NetworkPath
from tests.testbed.bed import HOSTS_TOML

HOSTS = load(HOSTS_TOML).hosts
SPARK, MAC = HOSTS["dgx-spark-1"], HOSTS["mac-studio-2"]
WIRED = Interface("enP7s7", "wired", 10e9, 1500, ("169.254.150.103/16",))
WIFI = Interface("wlP9s9", "wifi", None, 1500, ("169.254.1.2/16",))
TUNNEL = Interface("tailscale0", "tunnel", None, 1280, ("100.64.0.1/32",))


def link(
    gbits: float = 9.4,
    *,
    interface: Any = WIRED,
    gateway: str = "",
    others: tuple[Any, ...] = (),
    source: str = "169.254.150.103",
    **changes: Any,
) -> Any:
    interfaces = {one.name: one for one in (interface, *others)}
    path = NetworkPath(MAC.address, interface.name, source, gateway, interfaces=interfaces)
    return replace(MeasuredLink(SPARK.name, MAC.name, MAC.address, path, int(gbits * 1e9 / 8), 1.0, 0.0003), **changes)


def levels(found: Any) -> list[str]:
    return [finding.level for finding in found]


def test_a_link_as_it_should_be_is_one_short_line() -> None:
    assert [finding.text for finding in judge(link(), SPARK, MAC)] == ["9.4 Gb/s of 10 Gb/s by enP7s7"]


def test_a_link_far_below_its_interface_is_a_warning_with_the_command_that_shows_its_errors() -> None:
    (finding,) = judge(link(0.94), SPARK, MAC)
    assert finding.level == "warning"
    assert finding.text == "940 Mb/s, far below the 10 Gb/s of enP7s7 (9%)"
    assert finding.hint.endswith("disagg exec --host dgx-spark-1 -- ip -s link show enP7s7")


@pytest.mark.parametrize(("gbits", "interface", "far"), [
    (6.1, 10e9, False),
    (5.9, 10e9, True),
    (0.94, 1e9, False),
    (25.0, 200e9, False),
    (20.0, 200e9, True),
    (0.02, None, False),
])  # fmt: skip
def test_far_below_is_less_than_six_tenths_of_what_one_stream_can_take(
    gbits: float, interface: float | None, far: bool
) -> None:
    assert far_below(link(gbits, interface=replace(WIRED, speed=interface))) is far


def test_wifi_is_named_and_a_wired_network_asked_for() -> None:
    (finding,) = judge(link(0.3, interface=WIFI), SPARK, MAC)
    assert finding.level == "warning" and "wlP9s9, which is Wi-Fi" in finding.text
    assert "data_address" in finding.hint


def test_a_vpn_is_named() -> None:
    found = judge(link(0.3, interface=TUNNEL, source="100.64.0.1"), SPARK, MAC)
    assert "tailscale0, which is a VPN or tunnel" in found[0].text
    assert "not in the network of 169.254.150.102" in found[1].text


def test_a_router_on_the_way_is_a_warning() -> None:
    (finding,) = judge(link(9.0, gateway="192.168.1.1"), SPARK, MAC)
    assert "through the router 192.168.1.1" in finding.text


def test_leaving_from_another_address_than_the_senders_data_address_is_a_warning() -> None:
    found = judge(link(), replace(SPARK, data_address="10.7.0.1"), MAC)
    assert levels(found) == ["warning"] and "not from the data address 10.7.0.1" in found[0].text


def test_a_faster_interface_that_is_not_used_is_worth_a_note() -> None:
    fast = Interface("enP2p1s0f0np0", "wired", 200e9, 9000, ("10.7.0.1/24",))
    found = judge(link(others=(fast,)), SPARK, MAC)
    assert levels(found) == ["ok", "note"]
    assert "enP2p1s0f0np0 with 200 Gb/s" in found[1].text and "data_address in [hosts.mac-studio-2]" in found[1].hint


def test_a_faster_interface_without_an_address_is_not_a_way() -> None:
    bare = Interface("enP2p1s0f0np0", "wired", 200e9, 9000)
    assert levels(judge(link(others=(bare,)), SPARK, MAC)) == ["ok"]


def test_what_kept_it_from_being_measured_is_the_only_finding() -> None:
    found = judge(link(error=PeerLost("no answer", "ping it")), SPARK, MAC)
    assert [(one.level, one.text, one.hint) for one in found] == [("fault", "no answer", "ping it")]


def test_no_route_is_a_fault() -> None:
    path = NetworkPath(MAC.address, error="Network is unreachable")
    assert levels(judge(link(path=path, bytes=0), SPARK, MAC)) == ["fault", "fault"]


def test_two_hosts_of_one_machine_need_no_network() -> None:
    twin = replace(MAC, address=SPARK.address)
    assert levels(judge(link(interface=Interface("lo", "loopback")), SPARK, twin)) == ["ok"]


def test_an_unknown_way_is_said_and_the_rate_still_told() -> None:
    found = judge(link(path=NetworkPath(MAC.address)), SPARK, MAC)
    assert levels(found) == ["ok", "note"] and found[0].text == "9.4 Gb/s"


def test_a_rate_hides_so_many_tokens_per_second() -> None:
    assert hidden_tokens_per_s(10e9, 98304) == pytest.approx(12715.7, abs=0.1)


@pytest.mark.parametrize(("bits", "text"), [
    (9.412e9, "9.41 Gb/s"),
    (10e9, "10 Gb/s"),
    (200e9, "200 Gb/s"),
    (76.7e6, "76.7 Mb/s"),
    (999.9e6, "1 Gb/s"),
    (0.4e6, "0.4 Mb/s"),
    (None, "–"),
])  # fmt: skip
def test_rates_have_three_digits(bits: float | None, text: str) -> None:
    assert rate(bits) == text
