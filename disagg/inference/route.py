"""Which hosts may serve a request, best first."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from disagg.config import Fleet, Host
from disagg.errors import ServerUnavailable

Alone = Literal["decode", "prefill"]
"""The role of the one host that runs a request by itself, without a hand-off."""


@dataclass(frozen=True, slots=True)
class Route:
    """The model's canonical name, and the hosts to try, best first. A request that one host is to run alone has hosts
    of that role only."""

    model: str
    decode: tuple[Host, ...]
    prefill: tuple[Host, ...]


@dataclass(slots=True)
class Router:
    """Spreads requests over the hosts of a model in turn."""

    fleet: Fleet
    _turns: dict[str, Iterator[int]] = field(default_factory=lambda: defaultdict(itertools.count))

    def route(self, model: str, alone: Alone | None = None) -> Route:
        """The route of a model, by name or alias.

        Raises UnknownModel, and ServerUnavailable if no host of the model has the role that must answer.
        """
        name = self.fleet.model(model).name
        turn = next(self._turns[name])
        decode = _rotated(self.fleet.serving(name, "decode"), turn)
        prefill = _rotated(self.fleet.serving(name, "prefill"), turn)
        if not (prefill if alone == "prefill" else decode):
            raise ServerUnavailable(f"no {alone or 'decode'} host serves {name}", "add one to hosts.toml")
        return Route(name, () if alone == "prefill" else decode, () if alone == "decode" else prefill)


def _rotated(hosts: list[Host], turn: int) -> tuple[Host, ...]:
    cut = turn % len(hosts) if hosts else 0
    return (*hosts[cut:], *hosts[:cut])
