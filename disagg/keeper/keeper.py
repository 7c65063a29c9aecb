"""What a host with several models is asked to do with them, and what it states of them."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from math import inf
from typing import Final

from disagg import logs
from disagg.api.keeper import KeptModel, LoadEvent, PullEvent
from disagg.config import Fleet, Host
from disagg.errors import FleetError, ModelBusy, ModelError, Overloaded, UnknownModel
from disagg.keeper import weights
from disagg.keeper.kept import Kept
from disagg.keeper.policy import refusal
from disagg.keeper.processes import WATCH_S, Processes, happens
from disagg.units import size

MAX_PULLS: Final = 8
"""Models of one host that are fetched or removed at a time."""


class Keeper(Processes):
    """The models of a host, for those who ask for them."""

    def kept(self, name: str) -> Kept:
        """The model with this name or alias."""
        for one in self.by_name.values():
            if not one.removed and name in (one.name, *one.model.aliases):
                return one
        there = ", ".join(one.name for one in self.by_name.values() if not one.removed)
        raise UnknownModel(f"{self.host.name} has no model {name!r}: it has {there}", "add it to its `models`")

    # What is asked for

    async def load(self, name: str, keep_alive_s: float | None = None) -> AsyncGenerator[LoadEvent, None]:
        """Wait until a model is ready. Ending the generator gives the place up."""
        kept = self.kept(name)
        if kept.child is None and kept.files.reason and kept.source not in self.changing:
            await self.look_again()
        self._require_loadable(kept)
        kept.keep_alive_s = keep_alive_s
        with self._waiting(kept):
            faults = kept.faults
            while True:
                self._require_loadable(kept)  # files are removed, and others are pinned, meanwhile
                if kept.faults != faults:
                    raise ModelError(f"{self.host.name} cannot load {kept.name}: {kept.failed or kept.files.reason}")
                if kept.removed:
                    raise UnknownModel(
                        f"{kept.name} was taken off {self.host.name}", "`disagg models` lists what is where"
                    )
                if self.stopping:
                    raise Overloaded(f"{self.host.name} is shutting down", "ask another host of the model")
                news, state = self.news, kept.state
                yield kept.event(self.ahead.get(kept.name))
                if state == "ready":
                    return
                await happens(news, WATCH_S)

    async def unload(self, name: str, *, force: bool = False) -> None:
        """Unload a model, and wait until its memory is free. force: also if requests use it, or somebody waits."""
        kept = self.kept(name)
        child = kept.child
        if not kept.waiting:
            self.unwant(kept.name)
        if child is None:
            return
        busy = ModelBusy(f"{self.host.name}: requests use {kept.name}", "wait for them, or unload it with force")
        if not force and (kept.waiting or (kept.occupied and not kept.going)):
            raise busy
        if force:
            loading = kept.state == "loading"
            self.go(kept, "asked")
            if loading:
                child.signal(signal.SIGTERM)
            else:
                child.order(drains=False, cuts=True)
            kept.killed_at = min(kept.killed_at, time.monotonic() + self.patience.stop_s)
        elif not kept.going:
            self.let_go(kept, "asked", drains=False)
        while kept.child is child:
            if kept.going is None:
                raise busy
            await happens(self.news, WATCH_S)

    def keep(self, name: str, keep_alive_s: float) -> None:
        """How long a loaded model stays after its last request."""
        kept = self.kept(name)
        if kept.child is not None:
            kept.keep_alive_s = keep_alive_s
            self.wake()

    def pin(self, name: str, *, pinned: bool) -> None:
        """Until this keeper ends, whatever hosts.toml states."""
        kept = self.kept(name)
        kept.pinned = kept.asked_pin = pinned
        self.wake()

    async def delete(self, name: str) -> None:
        """Remove a model's files. It is unloaded first."""
        kept = self.kept(name)
        source = kept.source
        weights.require_hub_id(self.host.name, source, "remove")
        self._require_unused(kept)
        if source in self.changing:
            raise ModelBusy(f"{self.host.name}: {source} is being pulled or deleted", "try again after that")
        with self._changes(source):
            await self.unload(kept.name)
            self._require_unused(kept)
            for one in self.by_name.values():
                if one.source == source:
                    one.files = replace(one.files, folder=None, reason=f"{source} is being removed")
            try:
                freed = await weights.remove(source)
            finally:
                await self.look_again()
        logs.info("model_deleted", model=kept.name, bytes=freed)

    async def pull(self, name: str) -> AsyncGenerator[PullEvent, None]:
        """Fetch a model's files. Ending the generator ends the fetch, which goes on from there the next time. A
        folder of the user's own is only looked at."""
        kept = self.kept(name)
        source = kept.source
        if source and not weights.hub_id(source):
            await self.look_again()
            if not kept.files.reason:
                yield PullEvent(status="success", total=kept.files.nbytes, completed=kept.files.nbytes)
                return
        hub_id = weights.require_hub_id(self.host.name, source, "put")
        while source in self.changing:
            yield PullEvent(status="waiting for another pull of it")
            await asyncio.sleep(WATCH_S)
        if len(self.changing) >= MAX_PULLS:
            raise Overloaded(f"{self.host.name} pulls {MAX_PULLS} models already", "try again when one is there")
        with self._changes(source):
            async with aclosing(weights.pull(hub_id)) as events:
                async for event in events:
                    yield event
            await self.look_again()
        if kept.files.reason:
            raise FleetError(f"{self.host.name}: {kept.files.reason}", "pull it again")
        yield PullEvent(status="success", total=kept.files.nbytes, completed=kept.files.nbytes)

    @contextmanager
    def _changes(self, source: str) -> Iterator[None]:
        """Nobody else pulls or removes these files meanwhile."""
        self.changing.add(source)
        try:
            yield
        finally:
            self.changing.discard(source)

    def _require_unused(self, kept: Kept) -> None:
        """Raise ModelBusy if another model, or another host of the machine, uses the files of this one."""
        for other in self.by_name.values():
            if other is not kept and other.child is not None and other.source == kept.source:
                raise ModelBusy(
                    f"{self.host.name}: {other.name} uses {kept.source}", f"disagg models unload {other.name}"
                )
        for claim in self.ledger.others():
            if claim.source == kept.source:
                hint = f"disagg stop --host {claim.host}"
                raise ModelBusy(f"the running server of {claim.host} uses {kept.source}", hint)

    # What is stated

    def stated(self) -> tuple[KeptModel, ...]:
        """Every model, as of now."""
        now = time.monotonic()
        return tuple(
            kept.stated(self.ahead.get(kept.name), self.settings, now, self.patience)
            for kept in self.by_name.values()
            if not kept.removed
        )

    # Those who wait

    @contextmanager
    def _waiting(self, kept: Kept) -> Iterator[None]:
        kept.asked_at = time.monotonic()
        kept.waiting += 1
        if kept.failed:
            kept.failed, kept.tries, kept.not_before = "", 0, -inf
        if kept.state != "ready":
            self.want(kept.name, evicts=True)
        try:
            yield
        finally:
            kept.waiting -= 1
            kept.asked_at = time.monotonic()
            if not kept.waiting:
                preloads = kept.name in self.wants and kept.name in self.settings.preload and kept.state != "ready"
                self.unwant(kept.name)
                if preloads:
                    self.want(kept.name, evicts=False)
            self.wake()

    def _require_loadable(self, kept: Kept) -> None:
        """Raises ModelError for what can never be loaded here, before anything goes for it."""
        if kept.child is not None:
            return
        if kept.files.reason:
            raise ModelError(
                f"{self.host.name} has no files of {kept.name}: {kept.files.reason}",
                f"disagg models pull {kept.name} --host {self.host.name}",
            )
        staying = sum(claim.nbytes for claim in self.others if claim.stays)
        ours, room = self.settings.memory_bytes, max(0, self.room.nbytes - staying)
        limits = replace(self.limits(), budget=room if ours is None else min(ours, room))
        why = refusal(kept.need, [one.seen(self.settings) for one in self.models], limits, kept.name)
        if why == "pinned places":
            raise ModelError(
                f"{self.host.name} has pinned as many models as it may load, and {kept.name} is none of them",
                "unpin one, or raise max_loaded",
            )
        if why:
            others = " beside what is pinned" if why == "pinned memory" else ""
            raise ModelError(
                f"{kept.name} needs {size(kept.need)}, and {self.host.name} has room for {size(limits.budget)}{others}",
                "a smaller context or KV limit, fewer pinned models, or another machine",
            )


def require_kept(fleet: Fleet, name: str) -> Host:
    """The host of this name, if it has several models still."""
    host = fleet.hosts.get(name)
    if host is None or not host.keeps:
        raise FleetError(f"{fleet.path} states no models of {name} any more", "restart it")
    return host
