"""Findings about a measured link, and the prefill rate whose transfer it can hide. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from disagg.config import Host
from disagg.config.addresses import same_machine
from disagg.fleet.facts.findings import Finding, Level, fault, note, ok, warning
from disagg.fleet.link.measure import MeasuredLink
from disagg.fleet.link.route import Interface, NetworkPath

FAR_BELOW: Final = 0.6
"""A link below this share of its interface's rate gets a warning."""
ONE_STREAM: Final = 40e9
"""Bits per second that one TCP stream is expected to fill at most, however fast the interface."""


def judge(link: MeasuredLink, sender: Host, receiver: Host) -> list[Finding]:
    """Findings about a measured link, most serious first; one "ok" if nothing is wrong."""
    name = "link"
    if link.error is not None:
        return [fault(name, link.error.message, link.error.hint)]
    if same_machine(sender.address) == same_machine(receiver.address):
        return [ok(name, f"{rate(link.bits_per_s)} within one machine")]
    findings = [*_route(name, link.path, sender, receiver), *_speed(name, link, sender)]
    if not any(finding.level in ("warning", "fault") for finding in findings):
        findings.insert(0, ok(name, _summary(link)))
    return findings


def far_below(link: MeasuredLink) -> bool:
    """Whether the link carries much less than its interface could."""
    interface, measured = link.path.outgoing, link.bits_per_s
    if measured is None or interface is None or interface.speed is None or interface.kind == "loopback":
        return False
    return measured < FAR_BELOW * min(interface.speed, ONE_STREAM)


def hidden_tokens_per_s(bits_per_s: float, kv_bytes_per_token: float) -> float:
    """The fastest prefill, in tokens per second, whose KV this link carries as fast as it is computed."""
    return bits_per_s / 8 / kv_bytes_per_token


def rate(bits_per_s: float | None) -> str:
    """9.41 Gb/s, 940 Mb/s."""
    if bits_per_s is None:
        return "–"
    value, unit = (bits_per_s / 1e9, "Gb/s") if bits_per_s >= 0.9995e9 else (bits_per_s / 1e6, "Mb/s")
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def _summary(link: MeasuredLink) -> str:
    interface = link.path.outgoing
    if interface is None:
        return rate(link.bits_per_s)
    of = f" of {rate(interface.speed)}" if interface.speed else ""
    return f"{rate(link.bits_per_s)}{of} by {interface.name}"


def _route(name: str, path: NetworkPath, sender: Host, receiver: Host) -> Iterator[Finding]:
    """Whether packets take the way that hosts.toml means."""
    interface, target = path.outgoing, path.target
    choose = f"give {receiver.name} a data_address in a network that {sender.name} is wired to; then: disagg doctor"
    routes = f"disagg exec --host {sender.name} -- ip route get {target}"
    if path.error:
        yield fault(name, f"{sender.name} has no route to {target}: {path.error}", routes)
        return
    if interface is None:
        yield note(name, f"the path from {sender.name} to {target} is unknown: it has no `ip` and no `route`")
        return
    by = f"KV to {target} leaves by {interface.name}"
    if interface.kind == "wifi":
        yield warning(name, f"{by}, which is Wi-Fi", choose)
    elif interface.kind == "tunnel":
        yield warning(name, f"{by}, which is a VPN or tunnel", f"take that network out of the VPN, or {choose}")
    if path.gateway:
        yield warning(name, f"{by} through the router {path.gateway}, not directly to {receiver.name}", choose)
    elif interface.addresses and not interface.reaches(target):
        own = ", ".join(interface.addresses)
        yield warning(name, f"{by} ({own}), which is not in the network of {target}", choose)
    if sender.data_address and path.source and same_machine(path.source) != same_machine(sender.data_address):
        yield warning(
            name,
            f"{by} from {path.source}, not from the data address {sender.data_address} of {sender.name}",
            f"{routes}; correct the routes there, or data_address in hosts.toml",
        )
    if better := _faster(path):
        yield note(
            name,
            f"{sender.name} also has {better.name} with {rate(better.speed)}, where KV leaves by {interface.name} with "
            f"{rate(interface.speed)}",
            f"if {receiver.name} is on that network: data_address in [hosts.{receiver.name}]",
        )


def _faster(path: NetworkPath) -> Interface | None:
    """An interface with an address that is more than twice as fast as the one taken."""
    taken = path.outgoing
    if taken is None or taken.speed is None:
        return None
    others = [
        one
        for one in path.interfaces.values()
        if one.kind in ("wired", "thunderbolt") and one.addresses and (one.speed or 0) > 2 * taken.speed
    ]
    return max(others, key=lambda one: one.speed or 0, default=None)


def _speed(name: str, link: MeasuredLink, sender: Host) -> Iterator[Finding]:
    interface, measured = link.path.outgoing, link.bits_per_s
    if measured is None:
        yield fault(name, "the probe carried no bytes", f"disagg doctor --host {sender.name}")
    elif interface is not None and interface.speed is not None and far_below(link):
        share = measured / min(interface.speed, ONE_STREAM)
        yield warning(
            name,
            f"{rate(measured)}, far below the {rate(interface.speed)} of {interface.name} ({share:.0%})",
            f"look for errors and drops: disagg exec --host {sender.name} -- {_counters(link.path)}",
        )


def _counters(path: NetworkPath) -> str:
    return (
        f"netstat -I {path.interface} -b"
        if path.interface.startswith("en") and path.interface[2:].isdigit()
        else (f"ip -s link show {path.interface}")
    )


def worst(findings: Sequence[Finding]) -> Level:
    """The most serious level among the findings."""
    order: tuple[Level, ...] = ("fault", "warning", "note", "ok")
    return min((finding.level for finding in findings), key=order.index, default="ok")
