"""Reads the live view for `disagg top`: that of a gateway, or one made from the hosts' own answers.

By httpx, unlike requests to hosts: the gateway's --url may be that of a proxy with TLS.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Collection
from typing import Final

import httpx
from msgspec.structs import replace

from disagg.api.base import InvalidValue
from disagg.api.event_stream import EventReader
from disagg.api.gateway import LiveState, Totals
from disagg.config import Fleet
from disagg.errors import DisaggError, ProtocolError, ServerUnavailable, Unauthorized
from disagg.gateway.watch.board import Board, contexts
from disagg.gateway.watch.hosts import live_hosts
from disagg.inference.client import AsyncClient

CONNECT_S: Final = 2.0
SILENCE_S: Final = 5.0  # the gateway sends an event at least once a second
EVERY_S: Final = 1.0
FIRST_S: Final = 6.0  # a host whose port is closed is known to be down before
LOOK_S: Final = 0.1
MAX_EVENT_BYTES: Final = 8 << 20


async def gateway_states(url: str, key: str | None) -> AsyncGenerator[LiveState, None]:
    """The states that the gateway at this URL sends. Raises ServerUnavailable if it does not answer, or any more, or
    is full; Unauthorized if it needs another key."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout, trusted = httpx.Timeout(SILENCE_S, connect=CONNECT_S), ssl.create_default_context()
    try:
        async with (
            httpx.AsyncClient(headers=headers, timeout=timeout, verify=trusted, trust_env=False) as http,
            http.stream("GET", url.rstrip("/") + "/api/live") as answer,
        ):
            _require_ok(answer.status_code, url, key)
            events = EventReader()
            async for piece in answer.aiter_bytes():
                for name, data in events.feed(piece):
                    if name == "state":
                        yield LiveState.from_bytes(data)
                if events.unread > MAX_EVENT_BYTES:
                    raise ProtocolError(f"an event of the gateway is over {MAX_EVENT_BYTES} bytes")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        if isinstance(error.__context__, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY" in str(error):
            raise ServerUnavailable(
                f"the certificate of {url} is not one that this machine trusts", "name its file in $SSL_CERT_FILE"
            ) from error
        raise ServerUnavailable(
            f"no gateway answers at {url}", "start it with `disagg serve`, or name its --url"
        ) from error
    except InvalidValue as error:
        raise ProtocolError(f"the gateway at {url} sent a state that cannot be read: {error}") from None
    raise ServerUnavailable(f"the gateway at {url} has stopped", "start it with `disagg serve`")


async def host_states(fleet: Fleet, first_s: float = FIRST_S) -> AsyncGenerator[LiveState, None]:
    """States with the hosts' own figures. Requests are not known: each belongs to the program that has sent it.

    first_s: until the first one at most, if a host has neither answered nor is known to be down.
    """
    board = Board(fleet.name, contexts(fleet))
    async with AsyncClient(fleet) as client:
        await client.connect()
        with client.watching():
            until = time.monotonic() + first_s
            while "unknown" in _states(fleet, client) and time.monotonic() < until:
                await asyncio.sleep(LOOK_S)
            while True:
                now = time.monotonic()
                hosts = live_hosts(fleet, client.view, now)
                yield of_hosts(board.state(hosts, now))
                await asyncio.sleep(EVERY_S)


def of_hosts(state: LiveState) -> LiveState:
    """The state with the hosts' own counts of what runs and waits. A request counts where it is decoded."""

    def counted(totals: Totals, models: Collection[str]) -> Totals:
        hosts = [one for one in state.hosts if one.model in models and one.role in ("decode", "whole")]
        running, waiting = sum(one.running for one in hosts), sum(one.queue for one in hosts)
        return replace(totals, running=running, waiting=waiting)

    models = tuple(replace(one, totals=counted(one.totals, [one.name])) for one in state.models)
    every = counted(state.totals, [one.name for one in models])
    return replace(state, totals=every, models=models, source="hosts")


def _states(fleet: Fleet, client: AsyncClient) -> set[str]:
    return {client.view.of(host.name).reachable for host in fleet.answering_hosts}


def _require_ok(status: int, url: str, key: str | None) -> None:
    if status == httpx.codes.UNAUTHORIZED:
        why = "refuses the key in DISAGG_API_KEY" if key else "needs a key"
        raise Unauthorized(f"the gateway at {url} {why}", "set DISAGG_API_KEY to what `disagg keys add NAME` prints")
    if status in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE):
        raise ServerUnavailable(f"the gateway at {url} has no place for another watcher", "close a dashboard, or wait")
    if status != httpx.codes.OK:
        hint = "; one with a certificate is asked by https" if url.startswith("http:") else ""
        raise DisaggError(f"{url} answered HTTP {status}, not as a gateway of disagg does", f"name its --url{hint}")
