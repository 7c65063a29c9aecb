"""Servers in network namespaces of their own, on cables that can be cut, with wall clocks that can jump. Needs root."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Final

from disagg.config import load
from disagg.inference.types import Stage
from tests.faults import fleet as fleets
from tests.faults.cells import MID_TRANSFER, State
from tests.faults.clock import Clock, library
from tests.faults.fleet import FaultFleet
from tests.fleets import TOKEN, Place, RunningFleet, preloaded_process
from tests.preloaded import Preloaded
from tests.testbed import network

PORT, KV_PORT = 8000, 9000
SLOW_LINK: Final = ("rate", "40mbit", "burst", "64kb", "latency", "200ms")
"""Of the cable to a decode host: KV that crosses in a tenth of a second can be cut in mid-transfer."""
JUMP_S: Final = 3600
FIFTH_TOKEN: Final = 5
POLL_S: Final = 0.002


@dataclass(slots=True, kw_only=True)
class LinkedFleet(FaultFleet):
    """Servers at addresses of their own. hub: holds the namespace of the bridge, in which the caller is."""

    hub: Popen[bytes]
    clocks: Mapping[str, Clock]
    mending: list[threading.Timer] = field(default_factory=list)

    def cut_link(self, name: str, seconds: float | None = None) -> None:
        """Take the host's cable out, for so long or until the fleet is healed."""
        self._link(name, "down")
        if seconds is not None:
            self.mending.append(threading.Timer(seconds, self._link, (name, "up")))
            self.mending[-1].start()

    def heal(self) -> None:
        self.cancel_timers()
        for name in self.servers:
            self._link(name, "up")
            self.clocks[name].jump(0)
        FaultFleet.heal(self)

    def cancel_timers(self) -> None:
        """So that no cable is put back in a later fault, or after the fleet's end."""
        while self.mending:
            timer = self.mending.pop()
            timer.cancel()
            timer.join()

    def sent_to(self, name: str) -> int:
        """Bytes that have crossed the cable to the host."""
        lines = Path(f"/proc/{self.hub.pid}/net/dev").read_text().splitlines()
        row = next(line for line in lines if line.strip().startswith(f"{name}:"))
        return int(row.split(":")[1].split()[8])

    def _link(self, name: str, state: str) -> None:
        network.in_network(self.hub, "ip", "link", "set", name, state)


class Moment:
    """Calls `strike` with the names of both hosts, once, when a request comes to a state. struck: when, in
    time.monotonic() seconds."""

    def __init__(self, fleet: LinkedFleet, state: State, strike: Callable[[Mapping[str, str]], None]) -> None:
        self.struck: list[float] = []
        self._fleet, self._state, self._act = fleet, state, strike
        self._hosts: dict[str, str] = {}
        self._tokens = 0

    def stage(self, stage: Stage) -> None:
        """The request comes to another stage."""
        names = {"decode": stage.decode_server, "prefill": stage.prefill_server}
        self._hosts.update({role: name for role, name in names.items() if name})
        if (stage.phase, self._state) in (("queue", "before the slot"), ("prefill", "waiting for KV")):
            self._strike()
        elif stage.phase == "prefill" and self._state == "in the transfer" and not self.struck:
            before = self._fleet.sent_to(self._hosts["decode"])
            threading.Thread(target=self._await_bytes, args=(before + MID_TRANSFER,), daemon=True).start()

    def tokens(self, count: int) -> None:
        """More tokens have arrived."""
        self._tokens += count
        if self._state == "in the answer" and self._tokens >= FIFTH_TOKEN:
            self._strike()

    def _await_bytes(self, wanted: int) -> None:
        deadline = time.monotonic() + fleets.QUIET_S
        while self._fleet.sent_to(self._hosts["decode"]) < wanted and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._strike()

    def _strike(self) -> None:
        if not self.struck:
            self.struck.append(time.monotonic())
            self._act(self._hosts)


@contextmanager
def running(
    folder: Path, model: Path, *, roles: Mapping[str, int] = fleets.TWO_AND_TWO, clocks: bool = True
) -> Iterator[LinkedFleet]:
    """The fleet, ready. This thread, and what it starts, are on its network meanwhile. clocks: they can jump, which
    takes a process of its own with the frameworks."""
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    hosts = {f"{role}-{n + 1}": role for role, count in roles.items() for n in range(count)}
    with ExitStack() as stack:
        hub = stack.enter_context(network.hub())
        parent = preloaded_process()
        if clocks:
            parent = Preloaded({"LD_PRELOAD": str(library(folder))})
            stack.callback(parent.close)
        places, clock, addresses = dict[str, Place](), dict[str, Clock](), dict[str, str]()
        for number, name in enumerate(hosts, 101):
            addresses[name] = f"169.254.150.{number}"
            clock[name] = Clock(folder / f"{name}.clock")
            places[name] = Place(_host(stack, hub, name, addresses[name]), clock[name].variables, parent)
            if name.startswith("decode"):
                network.in_network(hub, "tc", "qdisc", "add", "dev", name, "root", "tbf", *SLOW_LINK)
        path = folder / "hosts.toml"
        path.write_text(_hosts_file(model, hosts, addresses))
        (folder / "token").write_text(TOKEN)
        stack.enter_context(network.inside(hub))
        servers = {name: RunningFleet(load(path), folder, places) for name in hosts}
        fleet = LinkedFleet(path, servers, {}, {}, hub=hub, clocks=clock)
        stack.callback(fleets.stop_all, servers)
        stack.callback(fleet.cancel_timers)
        for name, server in servers.items():
            server.start(fleet.host(name))
        for name, server in servers.items():
            server.wait_ready(fleet.host(name))
        yield fleet


def _host(stack: ExitStack, hub: Popen[bytes], name: str, address: str) -> str:
    """A namespace with a cable to the hub; the file that names it."""
    holder = stack.enter_context(network.child(["unshare", "--net", "sh", "-c", "ip link set lo up && exec cat"]))
    network.wire(hub, holder, name, address)
    return f"/proc/{holder.pid}/ns/net"


def _hosts_file(model: Path, roles: Mapping[str, str], addresses: Mapping[str, str]) -> str:
    text = fleets.hosts_file(model, roles, dict.fromkeys(roles, PORT), dict.fromkeys(roles, KV_PORT), 1 << 28)
    for name, address in addresses.items():
        text = text.replace(f'[hosts.{name}]\naddress = "127.0.0.1"', f'[hosts.{name}]\naddress = "{address}"')
    return text
