"""`disagg top`: what the fleet is doing now, in the terminal."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.common.context import print_json, settings, stdout
from disagg.cli.common.options import AsJson
from disagg.errors import UsageError

if TYPE_CHECKING:
    from disagg.api.live import LiveState
    from disagg.cli.gateway.screen import Source

GATEWAY = "http://127.0.0.1:8080"


def top(
    context: typer.Context,
    *,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help=f"The gateway. Default: {GATEWAY}, if one answers there.")
    ] = None,
    hosts: Annotated[bool, typer.Option("--hosts", help="Read the hosts themselves, not a gateway.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show live what the fleet is doing: requests in their phase, models and hosts.

    Under a host that is down stands the command that helps. Reads the gateway (a key, if it needs one, from
    $DISAGG_API_KEY; one of `disagg keys add --monitor` sees the requests of all keys). Without --url, and if none
    answers, it reads the hosts of hosts.toml, which do not tell one request from another, and states so. Keys: s sorts,
    m shows one model after the other, d one part, space stops the picture, q ends. Without a terminal, and with --json,
    it shows the present state once.
    """
    import asyncio

    from disagg.cli.gateway.screen import run
    from disagg.cli.views.gateway.top import ScreenChoice, top_view

    if hosts and url is not None:
        raise UsageError("--hosts and --url: which one is to be read?", "give one of them")
    console, gateway = stdout(), full_url(url or GATEWAY)
    asked = "asking the hosts" if hosts else f"asking {gateway}"
    waiting = console.status(asked) if console.is_terminal and not as_json else nullcontext()
    with waiting:
        source, state, caption = asyncio.run(_source(context, gateway, hosts=hosts, only=url is not None))
    if as_json:
        print_json(state.to_json())
    elif not console.is_terminal:
        console.print(top_view(state, ScreenChoice(), caption, keys=False))
    else:
        asyncio.run(run(source, state, console, caption))


def full_url(url: str) -> str:
    """A URL that was typed without its scheme is of http. UsageError if it is of another than http and https."""
    full = url if "://" in url else f"http://{url}"
    if not full.lower().startswith(("http://", "https://")):
        raise UsageError(f"--url: {url} is not a URL of a gateway", "it begins with http:// or https://")
    return full


async def _source(context: typer.Context, url: str, *, hosts: bool, only: bool) -> tuple[Source, LiveState, str]:
    """Where states come from, the first one, and why they are not the gateway's if one was to be asked. only: no other
    gateway and no host is read instead."""
    from disagg.errors import ConfigError, ServerUnavailable
    from disagg.gateway.endpoints import KEY_VARIABLE
    from disagg.gateway.follow import gateway_states, host_states

    caption, gateway = "", partial(gateway_states, url, os.environ.get(KEY_VARIABLE))
    if not hosts:
        try:
            return gateway, await _first(gateway), caption
        except ServerUnavailable as error:
            if only:
                raise
            try:
                fleet = settings(context).fleet()
            except ConfigError:
                raise error from None
            caption = f"{error.message}: these are the hosts' own figures"
    else:
        fleet = settings(context).fleet()
    alone = partial(host_states, fleet)
    return alone, await _first(alone), caption


async def _first(source: Source) -> LiveState:
    states = source()
    try:
        return await anext(states)
    finally:
        await states.aclose()
