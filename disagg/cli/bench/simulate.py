"""The fleet that `disagg bench --simulate` loads: the hosts of one model, simulated on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from disagg.cli.common.context import stderr
from disagg.cli.common.signals import uninterrupted
from disagg.errors import UsageError

if TYPE_CHECKING:
    from disagg.config import Fleet


@contextmanager
def simulated(fleet: Fleet, model: str, prefill: str | None, decode: str | None) -> Iterator[tuple[Fleet, str]]:
    """The simulated fleet with running servers, and its token. prefill, decode: machines in place of hosts.toml's.

    The servers are stopped at the end of the block. Raises UsageError if a host's hardware or the model's size is
    unknown.
    """
    from disagg.cli.views.fleet.progress import HostProgress
    from disagg.fleet.lifecycle.temporary import Devices, running_simulated

    hosts = {name: host for name, host in fleet.hosts.items() if host.model == model}
    if not hosts:
        raise UsageError(f"no host of {fleet.path.name} serves {model}", "there is nothing to simulate")
    only = replace(fleet, hosts=hosts, models={model: fleet.models[model]})
    shown = HostProgress(stderr())
    with running_simulated(
        only,
        Devices(prefill, decode),
        report=lambda host, doing: shown.report(f"simulated {host}", doing),
        ending=uninterrupted,
    ) as (copy, state):
        yield copy, state.tokens.current
