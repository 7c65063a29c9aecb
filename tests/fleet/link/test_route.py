from __future__ import annotations

from disagg.fleet.link.route import parse_path
from tests.values import present

SPARK = """\
@@ip-route
169.254.150.101 dev enP7s7 src 169.254.150.103 uid 1000 \\    cache
@@ip-addresses
1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever
2: enP7s7    inet 169.254.150.103/16 brd 169.254.255.255 scope link noprefixroute enP7s7\\       valid_lft forever
2: enP7s7    inet6 fe80::4ebb:47ff:fe1d:1111/64 scope link noprefixroute \\       valid_lft forever
3: wlP9s9    inet 192.168.1.40/24 brd 192.168.1.255 scope global dynamic wlP9s9\\       valid_lft 86000sec
7: tailscale0    inet 100.101.102.103/32 scope global tailscale0\\       valid_lft forever preferred_lft forever
@@interfaces
enP2p1s0f0np0 wired 200000 9000
enP7s7 wired 10000 1500
lo loopback -1 65536
tailscale0 tunnel -1 1280
wlP9s9 wifi -1 1500
@@end
"""
MAC = """\
@@route-get
   route to: 169.254.150.103
destination: 169.254.0.0
       mask: 255.255.0.0
    gateway: {gateway}
  interface: {interface}
      flags: <UP,DONE,CLONING>
 recvpipe  sendpipe  ssthresh  rtt,msec    rttvar  hopcount      mtu     expire
       0         0         0         0         0         0      1500    106060
@@ifconfig
lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\tinet 127.0.0.1 netmask 0xff000000
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 00:00:5e:00:53:01
\tinet6 fe80::1c8d:1111%en0 prefixlen 64 secured scopeid 0xe
\tinet 169.254.150.101 netmask 0xffff0000 broadcast 169.254.255.255
\tmedia: autoselect (10Gbase-T <full-duplex>)
\tstatus: active
en1: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tinet 192.168.1.50 netmask 0xffffff00 broadcast 192.168.1.255
\tmedia: autoselect
\tstatus: active
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tinet 169.254.9.1 netmask 0xffff0000 broadcast 169.254.255.255
\tmedia: <unknown type>
utun4: flags=8051<UP,POINTOPOINT,RUNNING,MULTICAST> mtu 1380
\tinet 10.8.0.2 --> 10.8.0.1 netmask 0xffffffff
@@hardware-ports

Hardware Port: Ethernet
Device: en0
Ethernet Address: 00:00:5e:00:53:01

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 00:00:5e:00:53:02

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 00:00:5e:00:53:03
@@end
"""


def mac(gateway: str = "en0", interface: str = "en0") -> str:
    return MAC.replace("{gateway}", gateway).replace("{interface}", interface)


def test_a_direct_way_on_linux_names_its_interface_source_and_speed() -> None:
    path = parse_path("169.254.150.101", SPARK)
    assert (path.interface, path.source, path.gateway) == ("enP7s7", "169.254.150.103", "")
    assert (
        present(path.outgoing).speed == 10e9
        and present(path.outgoing).mtu == 1500
        and present(path.outgoing).kind == "wired"
    )
    assert present(path.outgoing).reaches("169.254.150.101") and not present(path.outgoing).reaches("192.168.1.1")


def test_wifi_tunnels_and_loopback_are_told_apart_on_linux() -> None:
    interfaces = parse_path("169.254.150.101", SPARK).interfaces
    kinds = {name: one.kind for name, one in interfaces.items()}
    assert kinds == {
        "enP2p1s0f0np0": "wired",
        "enP7s7": "wired",
        "lo": "loopback",
        "tailscale0": "tunnel",
        "wlP9s9": "wifi",
    }
    assert interfaces["wlP9s9"].speed is None and interfaces["enP2p1s0f0np0"].speed == 200e9


def test_a_router_in_between_is_seen_on_linux() -> None:
    routed = "10.1.0.5 via 192.168.1.1 dev wlP9s9 src 192.168.1.40 uid 1000 \\    cache"
    path = parse_path("10.1.0.5", SPARK.replace(SPARK.splitlines()[1], routed))
    assert (path.gateway, path.interface) == ("192.168.1.1", "wlP9s9")


def test_no_route_at_all_is_reported_in_the_systems_words() -> None:
    text = "@@ip-route\nRTNETLINK answers: Network is unreachable\n@@ip-addresses\n@@interfaces\n@@end\n"
    path = parse_path("10.1.0.5", text)
    assert (path.interface, path.error) == ("", "Network is unreachable")


def test_a_direct_way_on_a_mac_names_its_interface_source_and_speed() -> None:
    path = parse_path("169.254.150.103", mac())
    assert (path.interface, path.source, path.gateway) == ("en0", "169.254.150.101", "")
    assert present(path.outgoing).speed == 10e9 and present(path.outgoing).addresses[0] == "169.254.150.101/16"


def test_a_hardware_address_as_gateway_is_still_a_direct_way_on_a_mac() -> None:
    assert parse_path("169.254.150.103", mac(gateway="0:0:5e:0:53:9")).gateway == ""


def test_a_router_in_between_is_seen_on_a_mac() -> None:
    path = parse_path("10.1.0.5", mac(gateway="192.168.1.1", interface="en1"))
    assert (path.gateway, path.interface, present(path.outgoing).kind) == ("192.168.1.1", "en1", "wifi")


def test_wifi_tunnels_and_thunderbolt_are_told_apart_on_a_mac() -> None:
    kinds = {name: one.kind for name, one in parse_path("169.254.150.103", mac()).interfaces.items()}
    assert kinds == {"lo0": "loopback", "en0": "wired", "en1": "wifi", "bridge0": "thunderbolt", "utun4": "tunnel"}


def test_a_machine_without_the_tools_leaves_the_way_open() -> None:
    path = parse_path("10.0.0.1", "@@end\n")
    assert path.outgoing is None and path.interface == "" and path.error == ""
