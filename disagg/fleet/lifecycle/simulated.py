"""A fleet as it would be on its own machines, played on this one: real servers, real bytes, predicted times."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from disagg.config import Fleet, Host, load
from disagg.config.words import toml_key, toml_string
from disagg.errors import DisaggError, FleetError
from disagg.fleet.lifecycle.fleet_servers import FleetServers, Report, ServerResult
from disagg.fleet.lifecycle.ports import free_ports
from disagg.fleet.lifecycle.state import State
from disagg.planning.sizing import hardware_of, size_source

ADDRESS = "127.0.0.1"
GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Devices:
    """Machines to play instead of those that hosts.toml names."""

    prefill: str | None = None
    decode: str | None = None


def simulated_fleet(fleet: Fleet, folder: Path, devices: Devices | None = None) -> Fleet:
    """The same fleet from a new hosts.toml in `folder`: every host on this machine, simulated, on free ports.

    Names, models, batch and queue sizes stay. UsageError where it is not known how large a model is, or what machine
    a host is. The links between the hosts are this machine's loopback: not simulated."""
    devices = devices or Devices()
    ports = iter(free_ports([ADDRESS] * (2 * len(fleet.hosts)), set()))
    parts = [f"# Simulated after {fleet.path.name}.\n\n[fleet]\nname = {toml_string(fleet.name)}\n"]
    for model in fleet.models.values():
        aliases = ", ".join(toml_string(alias) for alias in model.aliases)
        parts.append(
            f"[models.{toml_key(model.name)}]\naliases = [{aliases}]\ncontext = {model.context}\n"
            f"sources = {{simulated = {toml_string(size_source(model.name, model.sources.values()))}}}\n"
        )
    parts += [_host(host, devices, ports) for host in fleet.hosts.values()]
    path = folder / "hosts.toml"
    path.write_text("\n".join(parts), encoding="utf-8")
    return load(path)


@contextmanager
def running_simulated(
    fleet: Fleet,
    devices: Devices | None = None,
    *,
    timeout_s: float = 60.0,
    report: Report = lambda host, doing: None,
    ending: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[tuple[Fleet, State]]:
    """The simulated fleet with its servers up, and its state (whose `token()` its clients need); everything is stopped
    and removed at the end, within `ending`. Raises the first host's error where not all come up."""
    with tempfile.TemporaryDirectory(prefix="disagg-simulated-") as folder:
        copy = simulated_fleet(fleet, Path(folder), devices)
        state = State.of(copy, Path(folder) / "state")
        lifecycle = FleetServers(copy, state, report=report, grace_s=GRACE_S)
        try:
            if (error := _first_error(lifecycle.start(timeout_s=timeout_s), timeout_s)) is not None:
                raise error
            yield copy, state
        finally:
            with ending():
                lifecycle.stop()


def _first_error(results: Sequence[ServerResult], timeout_s: float) -> DisaggError | None:
    """A slow host is not left running here, as its own words would have it."""
    for result in results:
        if result.outcome == "slow":
            return FleetError(
                f"simulated {result.host} was not ready after {timeout_s:g} s; all servers were stopped again",
                "is this machine busy? try again",
            )
        if result.error is not None:
            return result.error
    return None


def _host(host: Host, devices: Devices, ports: Iterator[int]) -> str:
    instead = devices.prefill if "prefill" in host.roles else devices.decode
    options, key = host.engine, toml_key(host.name)
    lines = [
        f"[hosts.{key}]",
        f"address = {toml_string(ADDRESS)}",
        f"roles = [{', '.join(toml_string(role) for role in host.roles)}]",
        f"model = {toml_string(host.model)}",
        f"port = {next(ports)}",
        *([f"kv_port = {next(ports)}"] if host.kv_port is not None else []),
        'connector = "local"',
        'service = "process"',
        f"queue_size = {host.queue_size}",
        f"hardware = {toml_string(hardware_of(host.name, host.hardware, instead))}",
        f"[hosts.{key}.engine]",
        'name = "simulated"',
        f"dtype = {toml_string(options.dtype)}",
        f"chunk_tokens = {options.chunk_tokens}",
        f"max_batch = {options.max_batch}",
        f"max_kv_bytes = {options.max_kv_bytes}",
    ]
    return "\n".join(lines) + "\n"
