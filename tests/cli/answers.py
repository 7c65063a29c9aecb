"""Completions to show, and a client that streams them without any server."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, ClassVar

from disagg.api.events import TokenLogprob
from disagg.config import EngineOptions, Host
from disagg.errors import UnknownModel
from disagg.inference.hosts.route import Candidates, Choice, Ranking
from disagg.inference.metrics import Metrics, TTFTParts
from disagg.inference.stream import AsyncStream
from disagg.inference.types import Chunk, Completion

TEXT = "\n    return fibonacci(n - 1)\n"


def metrics(model: str, **changed: Any) -> Metrics:
    parts = TTFTParts(
        client=0.0004,
        queue=0.0021,
        tokenise=0.0008,
        prefill=0.0213,
        exposed_transfer=0.0011,
        ingest=0.0006,
        first_step=0.0042,
        network=0.0005,
    )
    values = {
        "method": "disaggregated",
        "prefill_server": "prefill-1",
        "decode_server": "decode-1",
        "prompt_tokens": 7,
        "completion_tokens": 128,
        "total_tokens": 135,
        "prefill_time": 0.0213,
        "decode_time": 0.4312,
        "total_time": 0.4631,
        "prefill_speed": 7 / 0.0213,
        "decode_speed": 127 / 0.4312,
        "ttft": parts.total,
        "ttft_parts": parts,
        "hidden_transfer": 0.0185,
        "exposed_transfer": 0.0011,
        "kv_bytes": 1310720,
        "decode_computed_tokens": 1,
    }
    return Metrics(model=model, **{**values, **changed})


def completion(model: str, warnings: tuple[str, ...] = (), text: str = TEXT, **changed: Any) -> Completion:
    tokens = (TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.0))),)
    return Completion(text, tokens, "length", metrics(model, **changed), warnings)


def host(name: str) -> Host:
    return Host(name, "127.0.0.1", ("decode",), "m", EngineOptions("simulated"), 1)


class FakeClient:
    """Stands in for AsyncClient: streams `text` in two pieces. `on_stream(model)` may raise. Notes its requests."""

    requests: ClassVar[list[dict[str, Any]]] = []
    on_stream = staticmethod(lambda model: None)
    text = TEXT
    note = ""

    def __init__(self, fleet: Any, *, token: Any = None) -> None:
        self.token = token

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *exc: Any) -> None:
        return None

    async def connect(self, *models: str) -> None:
        return None

    def explain(self, model: str, prompt: Any = None, **options: Any) -> Ranking:
        hosts = Candidates(model, (host("mac-1"), host("mac-2")), (host("dgx-1"),))
        decode = Choice(hosts.decode[0], {"queue": 0.25, "prompt": 0.5}, held_tokens=64)
        return Ranking(hosts, (decode,), (Choice(hosts.prefill[0], {"compute": 0.0}),), {"mac-2": "down"})

    def stream(self, model: str, prompt: Any = None, **options: Any) -> AsyncStream:
        FakeClient.requests.append({"model": model, "prompt": prompt, **options})
        return AsyncStream(functools.partial(self.answer, model))

    async def answer(self, model: str, deliver: Callable[[Chunk], None]) -> Completion:
        await asyncio.sleep(0)
        if model == "unknown":
            raise UnknownModel("no such model")
        self.on_stream(model)
        half = len(self.text) // 2
        if self.note:
            deliver(Chunk("", (), note=self.note))
        deliver(Chunk(self.text[:half], (TokenLogprob(1, 0.0),)))
        deliver(Chunk(self.text[half:], (TokenLogprob(2, 0.0),)))
        return completion(model, text=self.text)
