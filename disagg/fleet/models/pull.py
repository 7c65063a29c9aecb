"""Bring models to the hosts that need them: one download from the hub, then copies from host to host."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from disagg.config import Fleet, Host
from disagg.config.addresses import same_machine
from disagg.errors import CommandFailed, DisaggError, FleetError
from disagg.fleet.facts.host import read_host_facts
from disagg.fleet.facts.python import deployed_python, python_on, run_program
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.connect import machine_for
from disagg.fleet.machine.fan_out import each
from disagg.fleet.models.copy import Place, copy
from disagg.fleet.models.inventory import Held, cache_of, held
from disagg.fleet.models.sources import Need, need

HUB: Final = Path(__file__).with_name("hub_program.py")
PASSED_ON: Final = ("HF_TOKEN", "HF_ENDPOINT")
"""Of this machine's environment, where they are set: a gated model's key, a mirror of the hub."""
_LONGEST_S: Final = 24 * 3600.0

Told = Callable[[Host, str, str], None]
"""Told a host, what it does, and how far that is."""

Result = Literal["there", "downloaded", "copied", "failed"]


@dataclass(frozen=True, slots=True)
class Stock:
    """A host and what it has of all sources that anyone needs. python: to run programs with; hub_python: with the
    deployed environment's huggingface_hub. "" where there is none. reader: the host whose server now reads this source
    on the same machine, "" where none does."""

    need: Need
    held: Mapping[str, Held]
    python: str = ""
    hub_python: str = ""
    reader: str = ""

    @property
    def host(self) -> Host:
        return self.need.host

    @property
    def wanted(self) -> Held:
        return self.held.get(self.need.source) or Held(self.need.source, "absent")


@dataclass(frozen=True, slots=True)
class Task:
    """Bring a source to a host: from the hub, or from the host `giver`. `error`: why it cannot be brought."""

    host: Host
    source: str
    giver: Host | None = None
    error: FleetError | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Pulled:
    """What became of one host's model."""

    host: Host
    source: str
    result: Result
    bytes: int = 0
    seconds: float = 0.0
    giver: str = ""
    error: DisaggError | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "host": self.host.name,
            "model": self.host.model,
            "source": self.source,
            "result": self.result,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "from": self.giver or None,
            "error": self.error.to_json() if self.error else None,
        }


def plan(stocks: Sequence[Stock], wanted: Sequence[Host]) -> list[Task]:
    """What is to be brought where: nothing to hosts that have it, at most one download of each source. Pure."""
    tasks: list[Task] = []
    coming: dict[str, Host] = {}  # source -> the host that has or downloads it
    busy: set[tuple[str, str]] = set()  # machine and source: two hosts of one machine share its files
    for stock in stocks:
        if stock.wanted.complete:
            coming.setdefault(stock.need.source, stock.host)
    for stock in sorted(stocks, key=lambda one: -one.wanted.bytes):  # who has most of it downloads the rest
        host, source = stock.host, stock.need.source
        place = (same_machine(host.address), source)
        if host not in wanted or stock.wanted.complete or stock.need.carried or place in busy:
            continue
        busy.add(place)
        giver = next((one.host for one in stocks if one.held.get(source, Held(source, "absent")).complete), None)
        giver = giver or coming.get(source)
        tasks.append(_task(stock, giver))
        if giver is None and tasks[-1].error is None:
            coming[source] = host
    return tasks


def _task(stock: Stock, giver: Host | None) -> Task:
    host, source = stock.host, stock.need.source
    if not stock.python:
        return Task(
            host, source, error=FleetError(f"{host.name}: there is no python", f"disagg doctor --host {host.name}")
        )
    if giver is not None:
        return Task(host, source, giver)
    if not stock.need.on_hub:
        put = f"rsync -a FOLDER/ {host.address}:{source}/; the other hosts then get it with: disagg models pull"
        return Task(host, source, error=FleetError(f"{host.name}: no host of the fleet has {source}", put))
    if not stock.hub_python:
        deploy = f"disagg deploy --host {host.name}"
        missing = f"{host.name}: nothing is deployed there whose python could download from the hub"
        return Task(host, source, error=FleetError(missing, deploy))
    return Task(host, source)


@dataclass(slots=True)
class Models:
    """The models of some hosts. Its machines stay connected until it is closed."""

    fleet: Fleet
    connect: Callable[[Host], Machine] = machine_for
    _machines: dict[str, Machine] = field(default_factory=dict)

    def __enter__(self) -> Models:
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as closing:
            for one in self._machines.values():
                closing.callback(one.close)

    def machine(self, host: Host) -> Machine:
        """The host's machine, the same one each time."""
        return self._machines.setdefault(host.name, self.connect(host))

    def survey(self, hosts: Sequence[Host]) -> list[Stock | DisaggError]:
        """What each host has of what any of them needs."""
        for host in hosts:
            self.machine(host)
        facts = {
            outcome.host.name: outcome
            for outcome in each(hosts, lambda host: read_host_facts(self.machine(host), host))
        }
        needs = {name: need(self.fleet, one.host, one.value) for name, one in facts.items() if one.value is not None}
        sources = list(dict.fromkeys(one.source for one in needs.values()))
        readers = {
            (same_machine(one.host.address), needs[name].source): name
            for name, one in facts.items()
            if one.value is not None and one.value.serving is not None and one.value.serving.alive
        }

        def look(host: Host) -> Stock:
            outcome = facts[host.name]
            if outcome.value is None:
                raise outcome.error or FleetError(f"{host.name}: its facts cannot be read")
            python = python_on(host, outcome.value) or ""
            hub = python if host.local else deployed_python(outcome.value) or ""
            there = held(self.machine(host), python, host, sources) if python else {}
            reader = readers.get((same_machine(host.address), needs[host.name].source), "")
            return Stock(needs[host.name], there, python, hub, reader)

        looked = each(hosts, look)
        return [one.value if one.value is not None else one.error or FleetError("nothing") for one in looked]

    def pull(self, stocks: Sequence[Stock], wanted: Sequence[Host], told: Told) -> list[Pulled]:
        """Bring what is missing. Downloads come first, since others are copied from them."""
        tasks = {task.host.name: task for task in plan(stocks, wanted)}
        by_name = {stock.host.name: stock for stock in stocks}
        done: dict[str, Pulled] = {}
        for copying in (False, True):
            stage = [task.host for task in tasks.values() if (task.giver is not None) is copying]

            def act(host: Host) -> Pulled:
                return self._carry_out(tasks[host.name], by_name, done, told)

            for outcome in each(stage, act):
                task = tasks[outcome.host.name]
                result = outcome.value or Pulled(task.host, task.source, "failed", error=outcome.error)
                done[outcome.host.name] = replace(result, seconds=outcome.seconds)
        there = {
            host.name: Pulled(host, by_name[host.name].need.source, "there", by_name[host.name].wanted.bytes)
            for host in wanted
            if host.name in by_name
        }
        return [done.get(host.name) or there[host.name] for host in wanted if host.name in there]

    def _carry_out(self, task: Task, stocks: Mapping[str, Stock], done: Mapping[str, Pulled], told: Told) -> Pulled:
        if task.error is not None:
            raise task.error
        stock = stocks[task.host.name]
        if task.giver is None:
            told(task.host, f"download {task.source}", "")
            size = self._download(stock, told)
            return Pulled(task.host, task.source, "downloaded", size)
        failed = done.get(task.giver.name)
        if failed is not None and failed.error is not None:
            raise FleetError(
                f"{task.host.name}: {task.source} was to come from {task.giver.name}, which has not got it"
            )
        return self._copy(task, stock, stocks[task.giver.name], told)

    def _download(self, stock: Stock, told: Told) -> int:
        host, source = stock.host, stock.need.source
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        try:
            run_program(
                self.machine(host),
                stock.hub_python,
                HUB,
                (source, cache_of(host)),
                environment=passed,
                timeout=_LONGEST_S,
                on_line=lambda line: told(host, f"download {source}", line),
            )
        except CommandFailed as error:
            raise _hub_error(error, host, source) from error
        return held(self.machine(host), stock.python, host, [source])[source].bytes

    def _copy(self, task: Task, stock: Stock, giver: Stock, told: Told) -> Pulled:
        what = f"copy {task.source} from {giver.host.name}"
        told(task.host, what, "")
        source = self.connect(giver.host)  # of its own: closing it ends the server
        there = held(source, giver.python, giver.host, [task.source])[task.source]

        def progress(done: int, total: int) -> None:
            told(task.host, what, f"{done / max(1, total):.0%} of {total >> 20} MiB")

        copied = copy(
            Place(giver.host, source, giver.python),
            Place(task.host, self.machine(task.host), stock.python),
            there,
            stock.wanted.root or task.source,
            progress,
        )
        return Pulled(task.host, task.source, "copied", copied.bytes, giver=giver.host.name)


def _hub_error(error: CommandFailed, host: Host, source: str) -> FleetError:
    last = error.stdout.strip().rpartition("\n")[2]
    try:
        words = json.loads(last)["error"]
    except (ValueError, KeyError, TypeError):
        words = error.message
    return CommandFailed(
        f"{host.name}: {source} cannot be downloaded from the hub: {words}",
        "HF_TOKEN for a model behind a gate, HF_ENDPOINT for a mirror; or put the model on any host of the fleet and "
        "pull again: it is then copied from there. What has arrived is kept",
        exit_status=error.exit_status,
        stdout=error.stdout,
    )
