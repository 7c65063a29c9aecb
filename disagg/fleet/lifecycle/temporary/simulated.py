"""A fleet whose machines are simulated on this one: real servers, real bytes, predicted times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

from disagg.config import Deploy, EngineOptions, Fleet, Host, Model
from disagg.fleet.lifecycle.fleet_servers import OnProgress
from disagg.fleet.lifecycle.temporary.running import RunningFleet, temporary_fleet
from disagg.planning.sizing import hardware_of, size_source

ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Devices:
    """Machines to simulate instead of those that hosts.toml names."""

    prefill: str | None = None
    decode: str | None = None


def simulated_fleet(fleet: Fleet, devices: Devices | None = None) -> Fleet:
    """The same fleet with every host local and simulated; names, models, batch and queue sizes stay.

    Hosts may share a port: the fleet is to be started with all ports replaced. The links between the hosts are this
    machine's loopback, and not simulated. Raises UsageError if a model's size or a host's hardware is unknown.
    """
    return replace(
        fleet,
        models={name: _simulated_model(model) for name, model in fleet.models.items()},
        hosts={host.name: _simulated_host(host, devices or Devices()) for host in fleet.engine_hosts},
        token_file=None,
        deploy=Deploy(),
    )


@contextmanager
def running_simulated(
    fleet: Fleet,
    devices: Devices | None = None,
    *,
    timeout_s: float = 60.0,
    report: OnProgress = lambda host, state: None,
    ending: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[RunningFleet]:
    """The simulated fleet as a `temporary_fleet`."""
    copy = simulated_fleet(fleet, devices)
    with temporary_fleet(copy, move="all", timeout_s=timeout_s, report=report, ending=ending) as running:
        yield running


def _simulated_model(model: Model) -> Model:
    return replace(model, sources={"simulated": size_source(model.name, model.sources.values())}, written={})


def _simulated_host(host: Host, devices: Devices) -> Host:
    instead = devices.prefill if "prefill" in host.roles else devices.decode
    options = host.engine
    return Host(
        name=host.name,
        address=ADDRESS,
        roles=host.roles,
        model=host.model,
        engine=EngineOptions(
            "simulated",
            dtype=options.dtype,
            chunk_tokens=options.chunk_tokens,
            max_batch=options.max_batch,
            max_kv_bytes=options.max_kv_bytes,
        ),
        port=host.port,
        kv_port=host.kv_port,
        connector="local",
        service="process",
        queue_size=host.queue_size,
        hardware=hardware_of(host.name, host.hardware, instead),
    )
