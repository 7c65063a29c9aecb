"""Servers whose hosts a command has locked. The lock of an interrupted command is kept until it has cleaned up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from disagg.config import Host
from disagg.errors import Cancelled, DisaggError
from disagg.fleet.lifecycle.base import Server


class _Held(NamedTuple):
    """stack: releases the server's lock, and closes its connection."""

    server: Server
    stack: ExitStack


@dataclass(slots=True)
class HeldServers:
    """connect: opens the server of a host."""

    connect: Callable[[Host], AbstractContextManager[Server]]
    _held: dict[str, _Held] = field(default_factory=dict)
    _guard: Lock = field(default_factory=Lock)

    @contextmanager
    def changing(
        self, host: Host, why: str, *, break_lock: bool, if_full: bool, keep: Callable[[Host], bool]
    ) -> Iterator[Server]:
        """The host's server, which no other command changes within.

        keep: whether an interruption within leaves the lock to the next `changing` of this host, or to `release`.
        break_lock, if_full: see Server.changing.
        """
        with ExitStack() as stack:
            server = self._entered(host, stack, why, break_lock, if_full)
            try:
                yield server
            except Cancelled:
                if keep(host):
                    with self._guard:
                        self._held[host.name] = _Held(server, stack.pop_all())
                raise

    def release(self) -> None:
        """Release what was kept."""
        with self._guard:
            kept, self._held = self._held, {}
        for _, stack in kept.values():
            with suppress(DisaggError):  # the next command takes the lock of an ended process over
                stack.close()

    def _entered(self, host: Host, stack: ExitStack, why: str, break_lock: bool, if_full: bool) -> Server:
        with self._guard:
            held = self._held.pop(host.name, None)
        if held is not None:
            stack.enter_context(held.stack)
            return held.server
        server = stack.enter_context(self.connect(host))
        stack.enter_context(server.changing(why, break_lock, if_full))
        return server
