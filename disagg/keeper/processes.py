"""The models of one host and their processes: what is loaded, what goes, what fails, as `policy` decides."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import structs

from disagg import logs
from disagg.api.keeper import (
    EvictionReason,
    MemoryClaim,
)
from disagg.api.status import Counters
from disagg.config import Fleet, Host, KeeperSettings, served_digest, slug
from disagg.keeper import weights
from disagg.keeper.child import Child, Measured, Patience, Records
from disagg.keeper.kept import Kept
from disagg.keeper.policy import LOADED, Decision, Limits, Load, Outlook, Want, decide, outlook
from disagg.ledger import Ledger, MachineRoom, needed

TICK_S: Final = 0.25
WATCH_S: Final = 1.0
STOPPED_S: Final = 5.0
"""A tick that is so late: the keeper, or its machine, was stopped."""
LOOK_AGAIN_S: Final = 10.0
"""`disagg models pull` brings files without a word to the keeper. A look takes 0.03 s of a core."""
TRIES: Final = 4
LONGEST_DELAY_S: Final = 60.0
STEADY_S: Final = 60.0
FAILED_S: Final = 600.0
"""So long a model that has failed is not tried again, unless it is asked for."""


class Machine(NamedTuple):
    """room: for models. ledger: of what all hosts of the machine take of it."""

    room: MachineRoom
    ledger: Ledger


class Starting(NamedTuple):
    """command: that starts the process of a model, but for its options."""

    command: tuple[str, ...] = (sys.executable, "-m", "disagg.servers")
    patience: Patience = Patience()


class Processes:
    """Runs until `stop`. state: the folder of its record and of the models' logs. All of it happens on one event
    loop."""

    def __init__(
        self,
        fleet: Fleet,
        host: Host,
        state: Path,
        machine: Machine,
        starting: Starting = Starting(),  # noqa: B008 - frozen
    ) -> None:
        self.host, self.room = host, machine.room
        self.stopping = False
        self.gone = Counters()  # of processes that have ended
        self.fleet, self._state, self.ledger = fleet, state, machine.ledger
        self._command, self.patience = starting.command, starting.patience
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.records = Records(state / "keeper.json")
        self.records.end_orphans()
        self.by_name: dict[str, Kept] = {}
        self.wants: dict[str, bool] = {}  # by model, in the order in which they were asked for: whether others may go
        self.since: dict[str, float] = {}
        self.changing: set[str] = set()  # sources whose files are fetched or removed
        self._wish = self.ledger.claim(MemoryClaim(host=host.name))
        self.others: list[MemoryClaim] = []
        self.ahead: Mapping[str, Outlook] = {}
        self.news = asyncio.Event()
        self._again_at = inf
        self._looked_at = self._watched_at = -inf
        self._look_lock = asyncio.Lock()
        self._looked = False
        self.reload(fleet)
        for name in self.settings.preload:
            self.want(name, evicts=False)

    @property
    def settings(self) -> KeeperSettings:
        assert self.host.keeping is not None, "the host of a keeper has models"
        return self.host.keeping

    @property
    def models(self) -> list[Kept]:
        return list(self.by_name.values())

    def reload(self, fleet: Fleet) -> None:
        """Take over what hosts.toml states now. What it states as before keeps its process; one that is listed no more
        goes once it has answered, and one that is to run in another way is loaded again after that; one that has failed
        may be tried again. Raises FleetError if there are too few ports."""
        host = fleet.hosts[self.host.name]
        served = {name: fleet.served[f"{host.name}/{name}"] for name in host.models}
        assert host.keeping is not None, "checked by the caller"
        each = 2 if "decode" in host.roles else 1
        ports = self.records.assign(list(served), host.keeping.ports, each)
        self.fleet, self.host = fleet, host
        for name, one in served.items():
            kept = self.by_name.get(name)
            if kept is None:
                kept = self.by_name[name] = Kept(one, fleet.models[name], ports[name])
            kept.host, kept.model, kept.removed = one, fleet.models[name], False
            kept.failed, kept.tries, kept.not_before = "", 0, -inf
            if kept.child is None:
                kept.ports = ports[name]
            kept.pinned = name in host.keeping.pin if kept.asked_pin is None else kept.asked_pin
            kept.config = served_digest(fleet, one)
            measured = self.records.measured.get(name)
            if measured is not None and measured.config == kept.config:
                kept.load_s = kept.load_s or measured.load_s
            if kept.outdated:
                self.want(name, evicts=False)
            self._weigh(kept)
        for name, kept in list(self.by_name.items()):
            if name not in served:
                kept.removed, kept.pinned = True, False
                self.unwant(name)
                if kept.child is None:
                    del self.by_name[name]
        self._looked_at = -inf
        self.wake()

    async def look(self) -> None:
        """Look at the files of models that are not loaded: of all after a change, else of those that had none, or have
        none now. Nothing is loaded before this was done once."""
        everything, self._looked_at = self._looked_at == -inf, time.monotonic()
        asleep = [kept for kept in self.models if kept.child is None and kept.source]
        looked = [kept for kept in asleep if everything or not kept.files.present]
        found = await weights.look({kept.source for kept in looked})
        for kept in looked:
            kept.files = found.get(kept.source, kept.files)
            self._weigh(kept)
        self._looked = True
        self.wake()

    async def look_again(self) -> None:
        """Files have changed, or may have. One at a time: each look is a process."""
        async with self._look_lock:
            self._looked_at = -inf
            await self.look()

    @property
    def budget(self) -> int:
        """Bytes that this host's models may take together, now."""
        others = sum(claim.nbytes for claim in self.others)
        ours = self.settings.memory_bytes
        free = max(0, self.room.nbytes - others)
        return free if ours is None else min(ours, free)

    @property
    def used(self) -> int:
        return sum(kept.need for kept in self.by_name.values() if kept.state in LOADED)

    async def run(self) -> None:
        """Until `stop` has ended all processes."""
        before, looking = time.monotonic(), None
        while not (self.stopping and all(kept.child is None for kept in self.by_name.values())):
            now = time.monotonic()
            if now - before > STOPPED_S:
                for kept in self.by_name.values():
                    if kept.child is not None:
                        kept.child.excuse(now)
            before = now
            if (looking is None or looking.done()) and now - self._looked_at > LOOK_AGAIN_S:
                looking = asyncio.ensure_future(self.look())
            self._step(time.monotonic())
            await happens(self.news, min(TICK_S, max(0.0, self._again_at - time.monotonic())))
        if looking is not None:
            looking.cancel()
            await asyncio.wait((looking,))  # its program ends before this one

    def stop(self) -> None:
        """End all processes once they have answered, side by side."""
        self.stopping = True
        self.wants.clear()
        for kept in self.by_name.values():
            if kept.child is not None:
                self.go(kept, "asked", counts=False)
                kept.child.signal(signal.SIGTERM)
                kept.killed_at = time.monotonic() + self.patience.stop_s
        self.wake()

    def close(self) -> None:
        self._wish.release()

    def wake(self) -> None:
        """Something has changed: those who wait look again."""
        news, self.news = self.news, asyncio.Event()
        news.set()

    def _step(self, now: float) -> None:
        watches = now - self._watched_at >= WATCH_S
        self._watched_at = now if watches else self._watched_at
        for kept in list(self.by_name.values()):
            if kept.child is not None:
                self._attend(kept, kept.child, now, watches=watches)
            elif kept.failed and now - kept.failed_at > FAILED_S:
                kept.failed, kept.tries = "", 0
        with self.ledger.locked() as ours:
            if ours:
                self.others = [claim for claim in self.ledger.others() if claim.pool == self.room.pool]
                self._decide(now)

    def _attend(self, kept: Kept, child: Child, now: float, *, watches: bool) -> None:
        code = child.ended()
        if code is not None:
            self._ended(kept, child, code, now)
            return
        if watches:
            child.watch(now)
            if kept.state == "ready" and child.resident > kept.need and not self.room.pool:
                kept.need = child.resident
        if kept.ready_at < child.started and child.loaded:
            self._ready(kept, child, now)
        if kept.going and child.refused and kept.killed_at == inf:
            kept.evictions[kept.going] -= 1
            kept.going = None
            self.wake()
        if child.report is not None and (child.occupied or child.report.counters.requests != kept.requests):
            kept.requests, kept.used_at = child.report.counters.requests, now
        if (silent_s := child.silent_s(now, self.patience)) and kept.killed_at == inf:
            message = f"{kept.name} hung as a whole: no sign of life of its process for {silent_s:.0f} s"
            logs.event(logging.ERROR, "model_hangs", message=message, pid=child.pid)
            child.signal(signal.SIGABRT)
            kept.killed_at = now + self.patience.traces_s
        if now >= kept.killed_at:
            child.signal(signal.SIGKILL)

    def _ready(self, kept: Kept, child: Child, now: float) -> None:
        child.watch(now)
        kept.ready_at, kept.loads, kept.load_s = now, kept.loads + 1, child.ready_s
        kept.requests = 0
        self.unwant(kept.name)
        measured = Measured(child.ready_s or 0.0, child.resident, kept.started_config)
        self.records.note(kept.name, measured=measured)
        self._weigh(kept)
        logs.info("model_ready", model=kept.name, seconds=round(child.ready_s or 0.0, 3), resident=child.resident)
        self.wake()

    def _ended(self, kept: Kept, child: Child, code: int, now: float) -> None:
        child.close()
        if child.report is not None:
            self.gone = added(self.gone, child.report.counters)
        hung, reason, was_ready = kept.killed_at < inf and not kept.going, kept.going, child.ready_s is not None
        kept.child, kept.going, kept.killed_at = None, None, inf
        if kept.claim is not None:
            kept.claim.release()
            kept.claim = None
        self.records.note(kept.name, ended=True)
        if reason is not None or (code == 0 and was_ready):
            logs.info("model_unloaded", model=kept.name, reason=reason or "ended")
        elif not self.stopping:
            failure = child.failure(code)
            text = "it hung as a whole" if hung else failure.reason
            kept.tries = 1 if was_ready and now - child.started > STEADY_S else kept.tries + 1
            kept.not_before = now + min(2.0 ** (kept.tries - 1), LONGEST_DELAY_S)
            if kept.tries >= TRIES or (failure.final and not was_ready and not hung):
                self._fail(kept, text, now)
            logs.event(logging.ERROR, "model_process_ended", model=kept.name, exit=code, message=text, tries=kept.tries)
            if was_ready and kept.name in self.settings.preload:
                self.want(kept.name, evicts=False)
        if kept.removed:
            del self.by_name[kept.name]
        else:
            kept.ports = self.records.ports[kept.name]
        self.wake()

    def _fail(self, kept: Kept, reason: str, now: float) -> None:
        kept.failed, kept.failed_at, kept.faults = reason, now, kept.faults + 1
        self.unwant(kept.name)

    def _decide(self, now: float) -> None:
        limits = self.limits()
        models = [kept.seen(self.settings) for kept in self.models]
        wants = self._wanted(now) if self._looked and not self.stopping else []
        decision = decide(models, wants, self._reserving(limits, wants), now)
        later = [kept.not_before for kept in self.models if kept.name in self.wants and kept.not_before > now]
        self._again_at = min([decision.again_at, *later])
        self._state_wish(decision, wants)
        for action in decision.actions:
            kept = self.by_name[action.model]
            if isinstance(action, Load):
                self._start(kept, now)
            else:
                self.let_go(kept, action.reason, drains=action.drains)
        for kept in list(self.by_name.values()):
            if kept.outdated and not kept.going:
                self.let_go(kept, "asked", drains=True)
            if kept.claim is not None:
                kept.claim.update(kept.claim_of(self.room.pool))
        models = [kept.seen(self.settings) for kept in self.models]
        self.ahead = outlook(models, wants, limits, now, {kept.name: kept.left_s(now) for kept in self.models})

    def limits(self) -> Limits:
        settings = self.settings
        elsewhere = sum(claim.nbytes for claim in self.others if not claim.stays)
        return Limits(self.budget, settings.max_loaded, settings.min_stay_s, elsewhere)

    def _reserving(self, limits: Limits, wants: list[Want]) -> Limits:
        """Without what other hosts of the machine have waited for longer."""
        own = min((self.since[want.model] for want in wants if want.evicts), default=inf)
        earlier = sum(claim.wanted for claim in self.others if claim.wanted and claim.since < own)
        free = max(0, self.room.nbytes - sum(claim.nbytes for claim in self.others) - earlier)
        return replace(limits, budget=min(limits.budget, free))

    def _wanted(self, now: float) -> list[Want]:
        """Those that somebody waits for before those that are only to be loaded once there is room. A model whose port
        the process of one that was taken off still has is left out."""
        taken = {port for kept in self.models if kept.child is not None for port in kept.ports}
        kept = [(self.by_name[name], evicts) for name, evicts in self.wants.items()]
        wants = [
            Want(one.name, one.need, evicts=evicts)
            for one, evicts in kept
            if one.state == "asleep" and one.not_before <= now and taken.isdisjoint(one.ports)
        ]
        return sorted(wants, key=lambda want: not want.evicts)

    def _state_wish(self, decision: Decision, wants: list[Want]) -> None:
        first = next((want.model for want in wants if want.evicts), "")
        since = self.since.get(first, 0.0) if decision.short else 0.0
        self._wish.update(MemoryClaim(host=self.host.name, pool=self.room.pool, wanted=decision.short, since=since))

    # The processes

    def _start(self, kept: Kept, now: float) -> None:
        folder = kept.files.folder
        if folder is not None and not kept.files.present:
            kept.files = replace(kept.files, folder=None, reason=f"{folder} was removed")
            self._looked_at = -inf
            kept.faults += 1
            self.unwant(kept.name)
            self.wake()
            return
        ports = [
            text
            for option, port in zip(("--port", "--kv-port"), kept.ports, strict=False)
            for text in (option, str(port))
        ]
        argv = [*self._command, "--config", str(self.fleet.path), "--host", kept.host.name, *ports]
        log = self._state / "logs" / "models" / f"{slug(kept.name)}.log"
        try:
            kept.child = Child(argv, log, self.wake)
        except OSError as error:
            self._fail(kept, f"its process cannot be started: {error}", now)
            return
        kept.started_config = kept.config
        kept.claim = self.ledger.claim(kept.claim_of(self.room.pool))
        self.records.note(kept.name, started=kept.child)
        logs.info("model_loading", model=kept.name, pid=kept.child.pid, port=kept.ports[0])
        self.wake()

    def let_go(self, kept: Kept, reason: EvictionReason, *, drains: bool) -> None:
        """Let a process go, unless it refuses since requests have come."""
        if kept.child is None or kept.going:
            return
        if kept.state == "loading":
            kept.child.signal(signal.SIGTERM)
            kept.killed_at = time.monotonic() + self.patience.stop_s
        else:
            kept.child.order(drains=drains)
        self.go(kept, reason)

    def go(self, kept: Kept, reason: EvictionReason, *, counts: bool = True) -> None:
        if not kept.going and counts:
            kept.evictions[reason] = kept.evictions.get(reason, 0) + 1
        kept.going = reason
        logs.info("model_goes", model=kept.name, reason=reason)
        self.wake()

    def _weigh(self, kept: Kept) -> None:
        """What the model takes: as computed, or more if that was measured."""
        kept.need = needed(kept.host, kept.model, self.room, kept.files.folder, kept.files.nbytes)
        measured = self.records.measured.get(kept.name)
        if measured is not None and not self.room.pool and measured.config == kept.config:
            kept.need = max(kept.need, measured.nbytes)

    def want(self, name: str, *, evicts: bool) -> None:
        before = self.wants.get(name, False)
        self.wants[name] = evicts or before
        if evicts and not before:
            self.since[name] = time.time()
        self.wake()

    def unwant(self, name: str) -> None:
        self.wants.pop(name, None)
        self.since.pop(name, None)


async def happens(news: asyncio.Event, seconds: float) -> None:
    """Wait for it, or so long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await news.wait()


def added(one: Counters, other: Counters) -> Counters:
    """The sums of two processes' counters."""
    return Counters(**{name: count + getattr(other, name) for name, count in structs.asdict(one).items()})
