"""The conditions that a host must meet for its engine, and what it does not meet. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from disagg.config import Fleet, Host
from disagg.fleet.conditions import machine, memory
from disagg.fleet.conditions import python as pythons
from disagg.fleet.conditions.memory import Fit
from disagg.fleet.facts.findings import Finding
from disagg.fleet.facts.host import HostFacts


@dataclass(frozen=True, slots=True)
class Subject:
    """A host and what is known of it. config, nbytes: of its model's files there; without them, what is known of the
    source. disk: bytes that a deployment needs, 0 if that is judged elsewhere."""

    fleet: Fleet
    host: Host
    facts: HostFacts
    config: Mapping[str, Any] = field(default_factory=dict)
    nbytes: int | None = None
    disk: int = 0


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition. unmet: findings about what is missing, none if it is met. refuses: a host that does not meet it is
    not deployed to; else its plan notes that. A warning never refuses."""

    name: str
    unmet: Callable[[Subject], Iterable[Finding]]
    refuses: bool = True


def fit(one: Subject) -> Fit | None:
    """What the host needs for its model, and has; None if that is not known."""
    if one.host.gateway:
        return None
    model, hardware = one.fleet.models[one.host.model], one.facts.hardware
    return memory.fit(one.host, model, hardware, one.facts.os, config=one.config, nbytes=one.nbytes)


def _memory(one: Subject) -> Iterable[Finding]:
    found = fit(one)
    return memory.unmet(found) if found is not None else ()


CONDITIONS: Final = (
    Condition("system", lambda one: machine.system(one.facts)),
    Condition("engine", lambda one: machine.engine(one.host, one.facts)),
    Condition("disk", lambda one: machine.disk(one.host, one.facts, one.disk)),
    Condition("service", lambda one: machine.service(one.host, one.facts)),
    Condition("driver", lambda one: machine.driver(one.host, one.facts), refuses=False),
    Condition("cards", lambda one: machine.cards(one.host, one.facts)),
    Condition("nodes", lambda one: machine.nodes(one.fleet, one.host)),
    Condition("python", lambda one: pythons.unmet(one.host, one.fleet.deploy, one.facts)),
    Condition("memory", _memory),
)


def unmet(subject: Subject) -> list[Finding]:
    """All that the host does not meet."""
    return [one for condition in CONDITIONS for one in condition.unmet(subject)]


def judged(subject: Subject) -> tuple[list[Finding], list[Finding]]:
    """What a deployment refuses the host for, and what it is deployed without."""
    refused: list[Finding] = []
    noted: list[Finding] = []
    for condition in CONDITIONS:
        for one in condition.unmet(subject):
            (refused if condition.refuses and one.level == "fault" else noted).append(one)
    return refused, noted
