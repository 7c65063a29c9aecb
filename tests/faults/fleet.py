"""Two prefill and two decode servers of one model, with a proxy before every port."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from disagg.config import Host, load
from disagg.inference.client import AsyncClient
from tests.faults import process
from tests.faults.flow import Fault
from tests.faults.proxy import Injection, OnCall, Proxy
from tests.faults.ptrace import StoppedThread, busiest_thread
from tests.fleets import TOKEN, RunningFleet
from tests.ports import free_ports

MODEL = "tiny"
CONTEXT = 8192
START_S = 120.0
QUIET_S = 20.0
IDLE = {"queue": 0, "running": 0, "kv_bytes": 0}


@dataclass(slots=True)
class FaultFleet:
    """Servers, and the fleet as its caller sees it: through the proxies. servers: by host name."""

    seen: Path
    servers: Mapping[str, RunningFleet]
    proxies: Mapping[str, Proxy]
    links: Mapping[str, Proxy]
    broken: set[str] = field(default_factory=set)
    _stopped: list[StoppedThread] = field(default_factory=list)

    def client(self) -> AsyncClient:
        """A client that reaches every host through its proxy, if there is one."""
        return AsyncClient(load(self.seen), token=TOKEN)

    def names(self, role: str = "") -> list[str]:
        return [name for name in self.servers if name.startswith(role)]

    def host(self, name: str) -> Host:
        return self.servers[name].fleet.hosts[name]

    def pid(self, name: str) -> int:
        return self.servers[name].processes[name].pid

    def ended(self, name: str) -> bool:
        """Whether the server's process has ended."""
        return self.servers[name].processes[name].poll() is not None

    def inject(self, side: str, fault: Fault, on_call: OnCall | None = None) -> Injection:
        """The fault on the HTTP ports of one role ("prefill", "decode"), or on the KV ports ("kv")."""
        injection = Injection(fault, on_call)
        for proxy in self._side(side):
            proxy.inject(injection)
        return injection

    @contextmanager
    def no_host_left(self) -> Iterator[None]:
        """Refuse connections to the HTTP ports of every host, and after the block reset those that are open."""
        for proxy in self.proxies.values():
            proxy.refuse()
        yield
        for proxy in self.proxies.values():
            proxy.reset_all()

    def busy(self, role: str) -> str:
        """The host of this role that has a request; the first one if none has."""
        for name in self.names(role):
            with self.servers[name].http(name) as http:
                load = http.get("/load").json()
            if load["queue"] + load["running"]:
                return name
        return self.names(role)[0]

    def reset(self, name: str) -> None:
        """Reset every connection of a host."""
        for side in (self.proxies, self.links):
            if name in side:
                side[name].reset_all()

    def kill(self, name: str) -> None:
        """End the process. Its port refuses connections, as the proxy in front of it does from now on."""
        self.broken.add(name)
        process.kill(self.pid(name))
        if name in self.proxies:
            self.proxies[name].refuse()

    def freeze(self, name: str) -> None:
        self.broken.add(name)
        process.freeze(self.pid(name))

    def stop_engine(self, name: str) -> None:
        """Stop the thread that computes, until the fleet is healed."""
        self._stopped.append(StoppedThread(busiest_thread(self.pid(name))))

    def tell(self, lie: str) -> None:
        """From now on every prefill host tells this lie of tests.hostile.peers or idles, or the first that is asked."""
        (self.seen.parent / LIE_FILE).write_text(lie)

    def heal(self) -> None:
        """Undo every fault: proxies forward, frozen servers and threads run and are well, killed servers are started
        again and ready, and prefill hosts are honest."""
        for file in (LIE_FILE, LIE_FILE + ONCE):
            (self.seen.parent / file).unlink(missing_ok=True)
        for proxy in (*self.proxies.values(), *self.links.values()):
            proxy.heal()
        while self._stopped:
            self._stopped.pop().release()
        self.restart(*(self.broken | {name for name in self.names() if self.ended(name)}))
        self.broken.clear()
        for name in self.names():
            self.servers[name].wait_ready(self.host(name))

    def restart(self, *names: str) -> None:
        """Kill these servers, start them again and wait until they are ready."""
        for name in names:
            process.kill(self.pid(name))
            self.servers[name].processes.pop(name).wait()
            self.servers[name].start(self.host(name))
        for name in names:
            self.servers[name].wait_ready(self.host(name))

    def held(self) -> dict[str, process.Held]:
        return {name: process.held(self.pid(name)) for name in self.names()}

    def left_over(self, before: Mapping[str, process.Held]) -> list[str]:
        """What servers still hold of requests that have ended; empty if they are as idle as `before`."""
        found = []
        for name in self.names():
            status = self.servers[name].status(name)
            found += [f"{name}: {key} {status[key]}" for key, idle in IDLE.items() if status[key] != idle]
            now = process.held(self.pid(name))
            if now.sockets > before[name].sockets + SPARE_SOCKETS:
                found.append(f"{name}: {now.sockets} sockets, {before[name].sockets} before")
            found += [f"{name}: {what}" for what in leaked_threads(before[name].threads, now.threads)]
        return found

    def wait_idle(self, before: Mapping[str, process.Held]) -> list[str]:
        """What is still held after QUIET_S; usually empty at once."""
        deadline = time.monotonic() + QUIET_S
        while (found := self.left_over(before)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _side(self, side: str) -> Sequence[Proxy]:
        if side == "kv":
            return list(self.links.values())
        return [proxy for name, proxy in self.proxies.items() if name.startswith(side)]


TWO_AND_TWO: Final[Mapping[str, int]] = {"prefill": 2, "decode": 2}
LIE_FILE: Final = "lie"
ONCE: Final = " once"  # as in tests.hostile.peers, which imports torch
KV: Final = " KV"  # ends the name of the proxy of a KV port
POOLS: Final[Mapping[str, int]] = {
    "asyncio": min(32, (os.cpu_count() or 1) + 4),  # for work off the event loop
    "kv-memory": 8,  # four that allocate memory for KV, and the thread of the stream of MLX that each of them has
    "form-processes_": 1,  # starts what compiles the forms of answers; a name is cut to 15 letters
}
"""Pools of a server that grow up to so many threads while it is used, and stay."""
SPARE_SOCKETS: Final = 2
"""A health check's own connections."""


def leaked_threads(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """The names of which there are more threads than before, and than their pool may have."""
    return [
        f"{count} threads {name}, {before.get(name, 0)} before"
        for name, count in now.items()
        if count > max(before.get(name, 0), POOLS.get(name, 0))
    ]


@contextmanager
def running(
    folder: Path,
    model: Path,
    *,
    proxied: bool = True,
    roles: Mapping[str, int] = TWO_AND_TWO,
    max_kv_bytes: int = 1 << 28,
) -> Iterator[FaultFleet]:
    """The fleet, ready. proxied: callers and prefill hosts reach hosts through proxies. max_kv_bytes: of each host,
    which bounds the KV of finished prompts and conversations that it keeps."""
    hosts = {f"{role}-{n + 1}": role for role, count in roles.items() for n in range(count)}
    decode = [name for name, role in hosts.items() if role == "decode"]
    ports = dict(zip(hosts, free_ports(len(hosts)), strict=True))
    kv_ports = dict(zip(decode, free_ports(len(decode)), strict=True))
    with ExitStack() as stack:
        proxies: dict[str, Proxy] = {}
        links: dict[str, Proxy] = {}
        if proxied:
            proxies = {name: stack.enter_context(Proxy(name, port, TOKEN)) for name, port in ports.items()}
            links = {name: stack.enter_context(Proxy(f"{name}{KV}", port)) for name, port in kv_ports.items()}
        for name, link in links.items():  # the slot event names the KV port: callers learn the proxy's
            proxies[name].rewrite = (_port_text(kv_ports[name]), _port_text(link.port))
        seen = {**ports, **{name: proxy.port for name, proxy in proxies.items()}}
        seen_kv = {**kv_ports, **{name: link.port for name, link in links.items()}}
        for file, http, kv in (("seen", seen, seen_kv), ("prefill", ports, seen_kv), ("decode", ports, kv_ports)):
            (folder / f"{file}.toml").write_text(hosts_file(model, hosts, http, kv, max_kv_bytes))
        (folder / "token").write_text(TOKEN)
        lies = {name: str(folder / LIE_FILE) for name, role in hosts.items() if role == "prefill"}
        servers = {name: RunningFleet(load(folder / f"{role}.toml"), folder, lies=lies) for name, role in hosts.items()}
        fleet = FaultFleet(folder / "seen.toml", servers, proxies, links)
        stack.callback(stop_all, servers)
        for name, server in servers.items():
            server.start(fleet.host(name))
        for name, server in servers.items():
            server.wait_ready(fleet.host(name))
        yield fleet


def stop_all(servers: Mapping[str, RunningFleet]) -> None:
    for name, server in servers.items():
        if name in server.processes:
            process.kill(server.processes.pop(name).pid)


def _port_text(port: int) -> bytes:
    return f'"port":{port}'.encode()


def hosts_file(
    model: Path,
    hosts: Mapping[str, str],
    ports: Mapping[str, int],
    kv_ports: Mapping[str, int],
    max_kv_bytes: int,
) -> str:
    lines = ['[fleet]\nname = "faults"', f'[models."{MODEL}"]\ncontext = {CONTEXT}']
    lines.append(f'[models."{MODEL}".sources]\ntransformers = "{model}"\nmlx = "{model}"')
    for name, role in hosts.items():
        lines.append(f'[hosts.{name}]\naddress = "127.0.0.1"\nport = {ports[name]}\nroles = ["{role}"]')
        lines.append(f'model = "{MODEL}"\nconnector = "local"\nservice = "process"')
        if role == "decode":
            lines.append(f"kv_port = {kv_ports[name]}")
        engine = "mlx" if role == "decode" else "transformers"
        decodes = f"max_kv_bytes = {max_kv_bytes}"
        option = decodes if role == "decode" else f"chunk_tokens = 256\nmax_held_bytes = {max_kv_bytes}"
        lines.append(
            f'[hosts.{name}.engine]\nname = "{engine}"\ndtype = "float32"\ndevice = "cpu"\nthreads = 1\n{option}'
        )
    return "\n".join(lines) + "\n"
