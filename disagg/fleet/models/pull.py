"""Pull models to the hosts that require them: what has to come from where, and carrying that out.

One download of each from the hub, then copies from host to host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
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

HUB: Final = Path(__file__).with_name("hub_program.py")
PASSED_ON: Final = ("HF_TOKEN", "HF_ENDPOINT")
"""Variables passed on from this machine's environment if set: the key of a gated model, a mirror of the hub."""
_LONGEST_S: Final = 24 * 3600.0
_LONGEST_FILE_S: Final = 120.0


OnLine = Callable[[str], None]
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
        self,
        inventories: Sequence[ModelInventory],
        wanted: Sequence[Host],
        on_progress: OnProgress,
        *,
        anyway: bool = False,
    ) -> list[PullResult]:
        """Pull what is missing. Downloads come first, because other hosts copy from them. anyway: also models that
        cannot be served by what their config.json states, which is read before anything else of them."""
        configs = {} if anyway else self._configs(inventories, wanted, on_progress)
        done = _refused(inventories, wanted, configs)
        tasks = {task.host.name: task for task in plan(inventories, [one for one in wanted if one.name not in done])}
        by_name = {inventory.host.name: inventory for inventory in inventories}
        for copying in (False, True):
            stage = [task.host for task in tasks.values() if (task.source_host is not None) is copying]

            def act(host: Host) -> PullResult:
                task = tasks[host.name]
                if task.source_host is None and isinstance(unread := configs.get(task.source), DisaggError):
                    raise unread
                return self._carry_out(task, by_name, done, on_progress)

            for outcome in each(stage, act):
                task = tasks[outcome.host.name]
                result = outcome.value or PullResult(task.host, task.source, "failed", error=outcome.error)
                done[outcome.host.name] = replace(result, seconds=outcome.seconds)
        there = {
            host.name: PullResult(host, by_name[host.name].required.source, "there", by_name[host.name].model.bytes)
            for host in wanted
            if host.name in by_name
        }
        lost = {(same_machine(one.host.address), one.source) for one in done.values() if one.result == "failed"}
        beside = {  # on the machine of a host whose download failed
            name: replace(one, result="failed", bytes=0)
            for name, one in there.items()
            if not by_name[name].model.complete and (same_machine(one.host.address), one.source) in lost
        }
        found = {**there, **beside, **done}
        return [found[host.name] for host in wanted if host.name in found]

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

        def progress(line: str) -> None:
            on_progress(host, f"download {source}", line)

        self._hub(inventory, source, cache_of(host), timeout=_LONGEST_S, on_line=progress)
        return stored_models(self.machines[host], inventory.python, host, [source])[source].bytes

    def _hub(
        self, inventory: ModelInventory, *argv: str, timeout: float, on_line: OnLine | None = None
    ) -> CommandResult:
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        machine = self.machines[inventory.host]
        try:
            return run_program(
                machine, inventory.hub_python, HUB, argv, environment=passed, timeout=timeout, on_line=on_line
            )
        except CommandFailed as error:
            raise _hub_error(error, inventory.host, inventory.required.source) from error

    def _configs(
        self, inventories: Sequence[ModelInventory], wanted: Sequence[Host], on_progress: OnProgress
    ) -> dict[str, Mapping[str, Any] | DisaggError]:
        """By source, of what is to be pulled: the config.json of a host that has all of it, else of the hub; or why
        that cannot be read."""
        by_name = {one.host.name: one for one in inventories}
        found: dict[str, Mapping[str, Any] | DisaggError] = {
            source: stored.config for one in inventories for source, stored in one.stored.items() if stored.complete
        }
        loads = [one for one in plan(inventories, wanted) if one.source_host is None and one.error is None]
        new = [one.host for one in loads if one.source not in found]

        def config(host: Host) -> Mapping[str, Any]:
            on_progress(host, f"read config.json of {by_name[host.name].required.source}", "")
            return self._config(by_name[host.name])

        for read in each(new, config):
            said = read.value if read.value is not None else read.error
            if said is not None:
                found[by_name[read.host.name].required.source] = said
        return found

    def _config(self, inventory: ModelInventory) -> Mapping[str, Any]:
        argv = (inventory.required.source, cache_of(inventory.host), "config")
        printed = self._hub(inventory, *argv, timeout=_LONGEST_FILE_S)
        return last_json(printed, self.machines[inventory.host], HubConfig).config

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


def _refused(
    inventories: Sequence[ModelInventory],
    wanted: Sequence[Host],
    configs: Mapping[str, Mapping[str, Any] | DisaggError],
) -> dict[str, PullResult]:
    """The hosts of these that miss a model which their engine cannot serve, by the config.json of its source."""
    found: dict[str, PullResult] = {}
    for one in inventories:
        config = configs.get(one.required.source)
        missing = one.host in wanted and not one.model.complete and not one.required.carried
        if missing and isinstance(config, Mapping) and (said := one.required.verdict(config)).state == "refused":
            error = FleetError(
                f"{one.host.name}: {one.required.source} is not pulled: {said.why}",
                f"{said.instead}; to pull it all the same: disagg models pull --anyway",
            )
            found[one.host.name] = PullResult(one.host, one.required.source, "failed", error=error)
    return found


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
