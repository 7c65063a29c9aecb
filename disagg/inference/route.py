"""Which hosts serve a request."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from disagg.config import Fleet, Host
from disagg.errors import ServerUnavailable


@dataclass(frozen=True, slots=True)
class Route:
    """The model's canonical name, and the hosts to try, best first."""

    model: str
    decode: tuple[Host, ...]
    prefill: tuple[Host, ...]


@dataclass(slots=True)
class Router:
    """Spreads requests over the hosts of a model in turn."""

    fleet: Fleet
    _turns: dict[str, Iterator[int]] = field(default_factory=lambda: defaultdict(itertools.count))

    def route(self, model: str) -> Route:
        """The route of a model by name or alias. UnknownModel; ServerUnavailable where no host decodes it."""
        name = self.fleet.model(model).name
        turn = next(self._turns[name])
        decode = _rotated(self.fleet.serving(name, "decode"), turn)
        if not decode:
            raise ServerUnavailable(f"no decode host serves {name}", "add one to hosts.toml")
        return Route(name, decode, _rotated(self.fleet.serving(name, "prefill"), turn))


def _rotated(hosts: list[Host], turn: int) -> tuple[Host, ...]:
    cut = turn % len(hosts) if hosts else 0
    return (*hosts[cut:], *hosts[:cut])
