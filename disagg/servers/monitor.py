"""What a server does every second beside serving: ends requests whose lease has ended, and watches its engine."""

from __future__ import annotations

import asyncio
import time

from disagg.servers import logs
from disagg.servers.service import AnyService

TICK_S = 1.0


async def monitor(service: AnyService) -> None:
    """Tick until cancelled. A tick that fails is logged and does not end the next ones."""
    while True:
        await asyncio.sleep(TICK_S)
        try:
            service.leases.expire(time.monotonic())
        except Exception as error:  # noqa: BLE001 - a bug in one check must not end all of them
            logs.log.error("monitor_failed", exc_info=error)
