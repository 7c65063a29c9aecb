"""Pull models to the hosts that require them: what has to come from where, and carrying that out.

One download of each from the hub, then copies from host to host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from disagg.config import Fleet, Host
from disagg.config.addresses import same_machine
from disagg.errors import CommandFailed, DisaggError, FleetError
from disagg.fleet.facts.host import read_host_facts
from disagg.fleet.facts.python import HostPython, json_or_none, last_json, python_on, run_program, server_python
from disagg.fleet.machine.connect import Connect, Machines, machine_for
from disagg.fleet.machine.fan_out import each
from disagg.fleet.machine.machine import CommandResult
from disagg.fleet.models.copy import copy
from disagg.fleet.models.inventory import (
    ModelInventory,
    ProgramFailure,
    StoredModel,
    cache_of,
    required_model,
    stored_models,
)
from disagg.planning.verdicts import verdict

HUB: Final = Path(__file__).with_name("hub_program.py")
PASSED_ON: Final = ("HF_TOKEN", "HF_ENDPOINT")
"""Variables passed on from this machine's environment if set: the key of a gated model, a mirror of the hub."""
_LONGEST_S: Final = 24 * 3600.0
_LONGEST_FILE_S: Final = 120.0


OnProgress = Callable[[Host, str, str], None]
"""Called with a host, what it does, and how far it is."""


PullOutcome = Literal["there", "downloaded", "copied", "failed"]


@dataclass(frozen=True, slots=True)
class PullResult:
    """The result on one host."""

    host: Host
    source: str
    result: PullOutcome
    bytes: int = 0
    seconds: float = 0.0
    source_host: str = ""
    error: DisaggError | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "host": self.host.name,
            "model": self.host.model,
            "source": self.source,
            "result": self.result,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "from": self.source_host or None,
            "error": self.error.to_json() if self.error else None,
        }


@dataclass(slots=True)
class Models:
    """The models of some hosts. Machines stay connected until it is closed."""

    fleet: Fleet
    connect: Connect = machine_for
    machines: Machines = field(init=False)

    def __post_init__(self) -> None:
        self.machines = Machines(self.connect)

    def __enter__(self) -> Models:
        return self

    def __exit__(self, *_: object) -> None:
        self.machines.close()

    def survey(self, hosts: Sequence[Host]) -> list[ModelInventory | DisaggError]:
        """The inventory of each of these of `Fleet.served`, of the sources that any of them requires; or the error that
        prevents it."""
        tables = list({host.table: self.fleet.hosts[host.table] for host in hosts}.values())
        facts = {
            outcome.host.name: outcome
            for outcome in each(tables, lambda table: read_host_facts(self.machines[table], table))
        }
        required = {
            host.name: required_model(self.fleet, host, found)
            for host in hosts
            if (found := facts[host.table].value) is not None
        }
        sources = list(dict.fromkeys(one.source for one in required.values()))
        readers = {  # by machine and source: the host whose running server uses these files
            (same_machine(host.address), required[host.name].source): host.table
            for host in hosts
            if (found := facts[host.table].value) is not None and found.pid is not None
        }

        def look(host: Host) -> ModelInventory:
            outcome = facts[host.table]
            if outcome.value is None:
                raise outcome.error or FleetError(f"{host.name}: its facts cannot be read")
            python = python_on(host, outcome.value) or ""
            hub = server_python(host, outcome.value) or ""
            there = stored_models(self.machines[host], python, host, sources) if python else {}
            reader = readers.get((same_machine(host.address), required[host.name].source), "")
            return ModelInventory(required[host.name], there, python, hub, reader)

        looked = each(hosts, look)
        return [one.value if one.value is not None else one.error or FleetError("nothing") for one in looked]

    def pull(
        self, inventories: Sequence[ModelInventory], wanted: Sequence[Host], on_progress: OnProgress
    ) -> list[PullResult]:
        """Pull what is missing. Downloads come first, because other hosts copy from them."""
        tasks = {task.host.name: task for task in plan(inventories, wanted)}
        by_name = {inventory.host.name: inventory for inventory in inventories}
        done: dict[str, PullResult] = {}
        for copying in (False, True):
            stage = [task.host for task in tasks.values() if (task.source_host is not None) is copying]

            def act(host: Host) -> PullResult:
                return self._carry_out(tasks[host.name], by_name, done, on_progress)

            for outcome in each(stage, act):
                task = tasks[outcome.host.name]
                result = outcome.value or PullResult(task.host, task.source, "failed", error=outcome.error)
                done[outcome.host.name] = replace(result, seconds=outcome.seconds)
        there = {
            host.name: PullResult(host, by_name[host.name].required.source, "there", by_name[host.name].model.bytes)
            for host in wanted
            if host.name in by_name
        }
        return [done.get(host.name) or there[host.name] for host in wanted if host.name in there]

    def _carry_out(
        self,
        task: PullTask,
        inventories: Mapping[str, ModelInventory],
        done: Mapping[str, PullResult],
        on_progress: OnProgress,
    ) -> PullResult:
        if task.error is not None:
            raise task.error
        inventory = inventories[task.host.name]
        if task.source_host is None:
            on_progress(task.host, f"download {task.source}", "")
            size = self._download(inventory, on_progress)
            return PullResult(task.host, task.source, "downloaded", size)
        failed = done.get(task.source_host.name)
        if failed is not None and failed.error is not None:
            raise FleetError(
                f"{task.host.name}: {task.source} was to be copied from {task.source_host.name}, whose download failed"
            )
        return self._copy(task, inventory, inventories[task.source_host.name], on_progress)

    def _download(self, inventory: ModelInventory, on_progress: OnProgress) -> int:
        host, source = inventory.host, inventory.required.source
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        hub = partial(run_program, self.machines[host], inventory.hub_python, HUB, environment=passed)
        try:
            found = hub(argv=(source, cache_of(host), "config"), timeout=_LONGEST_FILE_S)
            self._require_served(host, source, found)
            hub(
                argv=(source, cache_of(host)),
                timeout=_LONGEST_S,
                on_line=lambda line: on_progress(host, f"download {source}", line),
            )
        except CommandFailed as error:
            raise _hub_error(error, host, source) from error
        return stored_models(self.machines[host], inventory.python, host, [source])[source].bytes

    def _require_served(self, host: Host, source: str, printed: CommandResult) -> None:
        """FleetError if the config.json that the hub has shows that the model cannot be handed over."""
        config = last_json(printed, self.machines[host], HubConfig).config
        found = verdict(config, host.engine.name)
        if found.sure:
            raise FleetError(f"{host.name}: {source} was not downloaded: {found.why}", "use another model")

    def _copy(
        self, task: PullTask, inventory: ModelInventory, source_host: ModelInventory, on_progress: OnProgress
    ) -> PullResult:
        what = f"copy {task.source} from {source_host.host.name}"
        on_progress(task.host, what, "")

        def progress(done: int, total: int) -> None:
            on_progress(task.host, what, f"{done / max(1, total):.0%} of {total >> 20} MiB")

        with closing(self.connect(source_host.host)) as source:  # for this copy only: closing it ends the server
            there = stored_models(source, source_host.python, source_host.host, [task.source])[task.source]
            copied = copy(
                HostPython(source_host.host, source, source_host.python),
                HostPython(task.host, self.machines[task.host], inventory.python),
                there,
                inventory.model.root or task.source,
                progress,
            )
        return PullResult(task.host, task.source, "copied", copied.bytes, source_host=source_host.host.name)


@dataclass(frozen=True, slots=True)
class HubConfig:
    """What the program prints of a repository: its config.json."""

    config: Mapping[str, Any]


def _hub_error(error: CommandFailed, host: Host, source: str) -> FleetError:
    failure = json_or_none(error.stdout, ProgramFailure)
    reason = failure.error if failure else error.message
    return CommandFailed(
        f"{host.name}: {source} cannot be downloaded from the hub: {reason}",
        "HF_TOKEN for a model behind a gate, HF_ENDPOINT for a mirror; or put the model on any host of the fleet and "
        "pull again: it is then copied from there. Files that arrived are kept",
        exit_status=error.exit_status,
        stdout=error.stdout,
    )


@dataclass(frozen=True, slots=True)
class PullTask:
    """Pull a source to a host, from the hub or from `source_host`. error: why that is impossible."""

    host: Host
    source: str
    source_host: Host | None = None
    error: FleetError | None = field(default=None, compare=False)


def plan(inventories: Sequence[ModelInventory], wanted: Sequence[Host]) -> list[PullTask]:
    """What to pull where: nothing to hosts that have it, at most one download of each source."""
    tasks: list[PullTask] = []
    coming: dict[str, Host] = {}  # source -> the host that has it or downloads it
    busy: set[tuple[str, str]] = set()  # machine and source: two hosts of one machine share its files
    for inventory in inventories:
        if inventory.model.complete:
            coming.setdefault(inventory.required.source, inventory.host)
    for inventory in sorted(inventories, key=lambda one: -one.model.bytes):  # the largest part first
        host, source = inventory.host, inventory.required.source
        place = (same_machine(host.address), source)
        if host not in wanted or inventory.model.complete or inventory.required.carried or place in busy:
            continue
        busy.add(place)
        source_host = next(
            (one.host for one in inventories if one.stored.get(source, StoredModel(source, "absent")).complete), None
        )
        source_host = source_host or coming.get(source)
        tasks.append(_task(inventory, source_host))
        if source_host is None and tasks[-1].error is None:
            coming[source] = host
    return tasks


def _task(inventory: ModelInventory, source_host: Host | None) -> PullTask:
    host, source = inventory.host, inventory.required.source
    if not inventory.python:
        return PullTask(
            host, source, error=FleetError(f"{host.name}: it has no usable Python", f"disagg doctor --host {host.name}")
        )
    if source_host is not None:
        return PullTask(host, source, source_host)
    if not inventory.required.on_hub:
        put = f"rsync -a FOLDER/ {host.address}:{source}/; then, for the other hosts: disagg models pull"
        return PullTask(host, source, error=FleetError(f"{host.name}: no host of the fleet has {source}", put))
    if not inventory.hub_python:
        deploy = f"disagg deploy --host {host.name}"
        missing = f"{host.name}: downloading needs a deployed environment, and there is none"
        return PullTask(host, source, error=FleetError(missing, deploy))
    return PullTask(host, source)
