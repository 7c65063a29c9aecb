"""GET /health: whether the gateway can answer a request now."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass

from starlette.requests import Request

from disagg.api.status import Health, Liveness, PendingRelease, ServerState
from disagg.config import Fleet, Host, served_digest
from disagg.http.requests import bearer
from disagg.inference.client import AsyncClient
from disagg.inference.hosts.view import FleetView
from disagg.token import Tokens
from disagg.version import RELEASE_VARIABLE, VERSION, code_hash, pending_release


def live_models(fleet: Fleet, view: FleetView, now: float) -> list[str]:
    """The models that have a host which would get a request now. Pure; now: time.monotonic()."""

    def up(host: Host) -> bool:
        seen = view.of(host.name)
        return seen.reachable == "up" and not seen.obstacle(now)

    def usable(name: str) -> Iterator[Host]:
        yield from fleet.serving(name, "whole")
        if decode := fleet.serving(name, "decode"):
            yield from (*fleet.serving(name, "prefill"), *decode)

    return [name for name in fleet.models if any(map(up, usable(name)))]


@dataclass(frozen=True, slots=True)
class Member:
    """What makes a gateway a server of its fleet. tokens: the fleet's; with one, `disagg status` reads its health."""

    host: Host
    tokens: Tokens


class GatewayHealth:
    """The health of one gateway. member: None for `disagg serve`, which hosts.toml does not name."""

    def __init__(self, client: AsyncClient, member: Member | None = None) -> None:
        self._client = client
        self._member = member
        self._served = False
        self._boot_id = secrets.token_hex(8)
        self._started = time.monotonic()

    def live_models(self) -> list[str]:
        """The models that have a host which would get a request now."""
        return live_models(self._client.fleet, self._client.view, time.monotonic())

    def check(self) -> ServerState:
        """Whether a model can be served now. Noted: until one could at a call of this, the hosts count as starting."""
        if self.live_models():
            self._served = True
            return "ok"
        return "no_host" if self._served else "loading"

    def answer(self, request: Request) -> Liveness:
        """The whole health for a caller with the fleet's token; for others, one word."""
        if self._member is None or not self._member.tokens.accepts(bearer(request)):
            return Liveness(self.check())
        host = self._member.host
        return Health(
            status=self.check(),
            model=host.model,
            role="gateway",
            host=host.name,
            loaded=True,
            backend="gateway",
            version=VERSION,
            code=code_hash(),
            config=served_digest(self._client.fleet, host),
            release=os.environ.get(RELEASE_VARIABLE) or None,
            pending=PendingRelease(*newer) if (newer := pending_release()) else None,
            tokens=self._member.tokens.digests,
            boot_id=self._boot_id,
            uptime_s=round(time.monotonic() - self._started, 3),
            pid=os.getpid(),
        )
