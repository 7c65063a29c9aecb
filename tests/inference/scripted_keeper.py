"""A keeper whose models are scripted hosts, on the test's own event loop: loads take `load_s`, and there is room for so
many models; see tests.inference.scripted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any

from disagg.api.keeper import KeptModel, LoadEvent, ModelState
from disagg.api.names import Role
from disagg.api.status import Load
from disagg.config import EngineOptions, Fleet, Host, Model
from disagg.config.settings import KeeperSettings
from disagg.errors import DisaggError, Overloaded
from tests.inference.scripted import Body, Script, ScriptedHost

NEED = 1 << 20


class KeptHost(ScriptedHost):
    """The process of one model. It listens only while the model is ready."""

    def __init__(self, scripts: Mapping[str, Script], name: str) -> None:
        super().__init__(scripts, Load("ok", boot_id=name))
        self.state: ModelState = "asleep"
        self.port = 0
        self.loads = 0
        self.evicted = 0
        self.wanted = 0
        self.busy = 0
        self.used = -inf
        self._listens = False
        self._stack = AsyncExitStack()

    async def _answer(self, events: AsyncGenerator[Any, None], writer: asyncio.StreamWriter) -> None:
        if self.state != "ready":
            events = _refused()
        self.busy += 1
        try:
            await super()._answer(events, writer)
        finally:
            self.busy, self.used = self.busy - 1, time.monotonic()

    async def start(self) -> None:
        self.load = Load("ok", boot_id=f"{self.load.boot_id}+")
        if not self._listens:
            await self._stack.enter_async_context(self.listening(port=self.port))
        self.state, self.loads, self._listens = "ready", self.loads + 1, True

    def settle(self) -> None:
        """Its load is over, whether it is ready or not."""
        self.state = "asleep" if self.state == "loading" else self.state

    async def stop(self, *, evicted: bool = True) -> None:
        self.state, self.evicted, self._listens = "asleep", self.evicted + evicted, False
        await self._stack.aclose()

    def sleep(self) -> None:
        """As `stop`, but for the port: who comes is refused as by a process that is about to end."""
        self.state, self.evicted = "asleep", self.evicted + 1


async def _refused() -> AsyncGenerator[Any, None]:
    yield Overloaded("the model is draining")


class ScriptedKeeper(ScriptedHost):
    """The keeper of these models. fails: what a load of a model fails with, by its name. hangs: models whose loads do
    not end."""

    def __init__(self, name: str, models: dict[str, KeptHost], *, load_s: float, room: int) -> None:
        super().__init__({"models/load": self._load_script}, Load("ok", boot_id=name))
        self.models, self.seconds, self.room = models, load_s, room
        self.fails: dict[str, DisaggError] = {}
        self.hangs: set[str] = set()
        self._turn = asyncio.Lock()

    @property
    def load(self) -> Load:
        stated = tuple(self._kept(name, one) for name, one in self.models.items())
        used = sum(NEED for one in self.models.values() if one.state in ("ready", "loading"))
        return Load("ok", boot_id=self.boot_id, models=stated, budget_bytes=self.room * NEED, used_bytes=used)

    @load.setter
    def load(self, load: Load) -> None:
        self.boot_id = load.boot_id

    def _kept(self, name: str, one: KeptHost) -> KeptModel:
        full = sum(other.state in ("ready", "loading") for other in self.models.values()) >= self.room
        return KeptModel(
            model=name,
            state="failed" if name in self.fails else one.state,
            reason=str(self.fails.get(name, "")),
            port=one.port,
            kv_port=9,
            wait_s=0.0 if one.state == "ready" else self.seconds,
            evicts=full and one.state == "asleep",
            need_bytes=NEED,
            loads=one.loads,
            load_s=self.seconds if one.loads else None,
            evictions={"room": one.evicted},
            running=one.busy,
            used_s=time.monotonic() - one.used if one.used > -inf else None,
        )

    async def _load_script(self, body: Body) -> AsyncGenerator[Any, None]:
        """One load at a time, in order of arrival."""
        name = body["model"]
        one = self.models[name]
        if (error := self.fails.get(name)) is not None:
            yield error
            return
        one.wanted += 1
        try:
            while one.state != "ready":
                if one.state == "asleep" and not self._turn.locked():
                    async with self._turn:
                        await self._make_room()
                        one.state = "loading"
                        try:
                            while name in self.hangs:
                                yield self._event(name, self.seconds)
                                await asyncio.sleep(1.0)
                            for second in range(int(self.seconds)):
                                yield self._event(name, self.seconds - second)
                                await asyncio.sleep(1.0)
                            await one.start()
                        finally:
                            one.settle()
                else:
                    yield self._event(name, self.seconds)
                    await asyncio.sleep(1.0)
            yield self._event(name, 0.0)
        finally:
            one.wanted -= 1

    async def _make_room(self) -> None:
        """The model that was not used for the longest time goes, once it has answered what it has."""
        ready = [one for one in self.models.values() if one.state == "ready"]
        if len(ready) >= self.room:
            going = min(ready, key=lambda one: (one.busy > 0, one.used))
            going.state = "draining"
            while going.busy:
                await asyncio.sleep(0.05)
            going.sleep()

    def _event(self, name: str, left_s: float) -> LoadEvent:
        one = self.models[name]
        return LoadEvent(model=name, state=one.state, left_s=left_s, port=one.port, kv_port=9)


@asynccontextmanager
async def kept_fleet(
    *, load_s: float = 5.0, room: int = 1, **keepers: Mapping[str, Mapping[str, Script]]
) -> AsyncIterator[tuple[Fleet, dict[str, ScriptedKeeper]]]:
    """A fleet whose hosts have several models: `d1={"m": {"decode": ...}, "n": ...}`; the models of names that begin
    with p are prefill hosts."""
    async with AsyncExitStack() as stack:
        described, running = dict[str, Host](), dict[str, ScriptedKeeper]()
        for name, models in keepers.items():
            hosts = {model: KeptHost(scripts, f"{name}/{model}") for model, scripts in models.items()}
            for host in hosts.values():
                async with host.listening() as host.port:
                    pass
                stack.push_async_callback(host.stop)
            running[name] = ScriptedKeeper(name, hosts, load_s=load_s, room=room)
            port = await stack.enter_async_context(running[name].listening())
            role: Role = "prefill" if name.startswith("p") else "decode"
            described[name] = Host(
                name,
                "127.0.0.1",
                (role,),
                "",
                EngineOptions("simulated"),
                port,
                models=tuple(models),
                keeping=KeeperSettings(ports=range(1, 2)),
            )
        names = {model for models in keepers.values() for model in models}
        yield (
            Fleet("kept", Path("hosts.toml"), {name: Model(name, {}, 4096) for name in sorted(names)}, described),
            running,
        )
