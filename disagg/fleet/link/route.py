"""The network path from a host to an address, read from `ip`, `route`, `ifconfig` and `networksetup`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from disagg.fleet.machine.machine import Machine, script

Kind = Literal["wired", "wifi", "tunnel", "thunderbolt", "loopback"]
_TUNNEL_NAMES: Final = re.compile(r"(utun|tun|tap|wg|tailscale|zt|ppp|ipsec|gif|nordlynx|feth)[0-9a-z]*")
_MEDIA: Final = re.compile(r"(\d+(?:\.\d+)?)(G?)base", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface of a host. speed: negotiated, bits per second, None if unknown. mtu: bytes.

    addresses: with prefix length, 10.0.0.1/24."""

    name: str
    kind: Kind = "wired"
    speed: float | None = None
    mtu: int = 0
    addresses: tuple[str, ...] = ()

    def reaches(self, address: str) -> bool:
        """Whether the address is in one of this interface's networks."""
        try:
            wanted = ipaddress.ip_address(address)
            return any(wanted in ipaddress.ip_interface(own).network for own in self.addresses)
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class NetworkPath:
    """The path to `target`. interface: the outgoing one, "" if unknown. source: this host's address on the path.
    gateway: "" if there is none. error: the system's message if there is no path. interfaces: all, by name."""

    target: str
    interface: str = ""
    source: str = ""
    gateway: str = ""
    error: str = ""
    interfaces: Mapping[str, Interface] = field(default_factory=dict)

    @property
    def outgoing(self) -> Interface | None:
        """The interface that packets leave by, None if unknown."""
        return self.interfaces.get(self.interface)


def read_path(machine: Machine, target: str) -> NetworkPath:
    """The path from a machine to an address. Raises HostUnreachable."""
    result = machine.run([target], script=script("route.sh"), timeout=20.0)
    return parse_path(target, result.stdout)


def parse_path(target: str, text: str) -> NetworkPath:
    """The path to `target`, from what the script printed."""
    parts = _parts(text)
    if "ip-route" in parts:
        return _linux(target, parts)
    if "route-get" in parts:
        return _macos(target, parts)
    return NetworkPath(target)


def _parts(text: str) -> dict[str, str]:
    pieces = re.split(r"^@@(\S+)\n", text, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def _linux(target: str, parts: Mapping[str, str]) -> NetworkPath:
    addresses: dict[str, list[str]] = {}
    for line in parts.get("ip-addresses", "").splitlines():
        if match := re.match(r"\d+:\s+(\S+)\s+inet6?\s+(\S+)", line):
            own = match[2] if "/" in match[2] else f"{match[2]}/32"
            addresses.setdefault(match[1].partition("@")[0], []).append(own)
    interfaces = {}
    for line in parts.get("interfaces", "").splitlines():
        name, kind, megabits, mtu = line.split()
        speed = float(megabits) * 1e6 if megabits.isdigit() and int(megabits) > 0 else None
        interfaces[name] = Interface(name, _kind(kind, name), speed, _int(mtu), tuple(addresses.get(name, ())))
    route = parts["ip-route"]
    device = re.search(r"\bdev (\S+)", route)
    if device is None:
        return NetworkPath(target, error=route.strip().removeprefix("RTNETLINK answers: "), interfaces=interfaces)
    return NetworkPath(
        target,
        interface=device[1],
        source=_first(r"\bsrc (\S+)", route),
        gateway=_first(r"\bvia (?:inet6? )?(\S+)", route),
        interfaces=interfaces,
    )


def _kind(reported: str, name: str) -> Kind:
    if _TUNNEL_NAMES.fullmatch(name):
        return "tunnel"
    if re.fullmatch(r"thunderbolt\d*", name):
        return "thunderbolt"
    return next((kind for kind in ("wifi", "tunnel", "loopback") if kind == reported), "wired")


def _macos(target: str, parts: Mapping[str, str]) -> NetworkPath:
    listed = re.findall(r"Hardware Port: (.+)\nDevice: (\S+)", parts.get("hardware-ports", ""))
    ports = {device: port for port, device in listed}
    interfaces = {}
    for block in re.split(r"^(?=\S)", parts.get("ifconfig", ""), flags=re.MULTILINE):
        name = block.partition(":")[0].strip()
        if name:
            interfaces[name] = _mac_interface(name, block, ports.get(name, ""))
    route = parts["route-get"]
    device = _first(r"interface: (\S+)", route)
    if not device:
        return NetworkPath(target, error=route.strip().splitlines()[-1] if route.strip() else "", interfaces=interfaces)
    gateway = _first(r"gateway: (\S+)", route)
    taken = interfaces.get(device)
    source = _first(r"if ?address: (\S+)", route) or _source(taken, target)
    # A direct path has its interface or a hardware address here.
    direct = not re.fullmatch(r"[0-9.]+|[0-9a-f:]*::[0-9a-f:%a-z0-9]*", gateway) or gateway == target
    return NetworkPath(target, device, source, "" if direct else gateway, interfaces=interfaces)


def _mac_interface(name: str, block: str, port: str) -> Interface:
    addresses = []
    for address, mask in re.findall(r"inet (\S+)(?: --> \S+)? netmask (0x[0-9a-f]+)", block):
        addresses.append(f"{address}/{int(mask, 16).bit_count()}")
    for address, length in re.findall(r"inet6 ([0-9a-f:]+)(?:%\S+)? prefixlen (\d+)", block):
        addresses.append(f"{address}/{length}")
    return Interface(
        name, _mac_kind(name, port), _media_speed(block), _int(_first(r"mtu (\d+)", block)), tuple(addresses)
    )


def _mac_kind(name: str, port: str) -> Kind:
    if name.startswith("lo"):
        return "loopback"
    if _TUNNEL_NAMES.fullmatch(name):
        return "tunnel"
    if "Wi-Fi" in port or "AirPort" in port or name.startswith("awdl"):
        return "wifi"
    return "thunderbolt" if "Thunderbolt Bridge" in port else "wired"


def _media_speed(block: str) -> float | None:
    """Bits per second of the medium in use, in parentheses after `autoselect`: (10Gbase-T <full-duplex>)."""
    media = _first(r"media: (.+)", block)
    match = _MEDIA.search(media)
    return float(match[1]) * (1e9 if match[2] else 1e6) if match else None


def _source(interface: Interface | None, target: str) -> str:
    if interface is None or not interface.addresses:
        return ""
    near = [own for own in interface.addresses if Interface("", addresses=(own,)).reaches(target)]
    return (near or list(interface.addresses))[0].partition("/")[0]


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _int(text: str) -> int:
    return int(text) if text.isdigit() else 0
