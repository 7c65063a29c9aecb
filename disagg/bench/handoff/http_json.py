"""The simplest transport: base64 in JSON over HTTP, one request per layer, decoded into mlx arrays.

One request per layer is its fastest form: all 805 MB in one request took 87 s on a busy machine, this takes 10.
"""

from __future__ import annotations

import base64
import hmac
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import numpy
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from disagg.bench.handoff.transport import ROUND_TIMEOUT_S, STEP_TIMEOUT_S, RandomKV, ReceiverOffer
from disagg.engines.simulated import synthetic_kv
from disagg.engines.simulated.synthetic_kv import SyntheticKV
from disagg.errors import PeerLost

_POLL_S = 0.01


class JSONSender:
    """See transport.Sender."""

    def __init__(self, shape: RandomKV, source: SyntheticKV) -> None:
        self._tensors = source.flat()
        self._client: httpx.Client | None = None
        self._url = ""

    def prepare(self, offer: ReceiverOffer) -> None:
        host = f"[{offer.host}]" if ":" in offer.host else offer.host
        self._url = f"http://{host}:{offer.port}/layer"
        key = {"Authorization": f"Bearer {offer.key}"}
        self._client = self._client or httpx.Client(headers=key, timeout=ROUND_TIMEOUT_S, trust_env=False)

    def send(self) -> None:
        assert self._client is not None, "prepare comes first"
        for keys, values in zip(self._tensors[::2], self._tensors[1::2], strict=True):
            layer = {"keys": _text(keys), "values": _text(values)}
            try:
                self._client.post(self._url, json=layer).raise_for_status()
            except httpx.HTTPError as error:
                raise PeerLost(f"the benchmark's HTTP server did not accept a layer: {error}") from error

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


class JSONReceiver:
    """See transport.Receiver."""

    def __init__(self, shape: RandomKV, host: str) -> None:
        self._count = 2 * len(shape.layout.layers)
        self._host = host
        self._key = secrets.token_hex(32)
        self._tensors: list[Any] = []
        self._complete = threading.Event()
        app = Starlette(routes=[Route("/layer", self._take, methods=["POST"])])
        config = uvicorn.Config(app, host=host, port=0, log_config=None, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, name="http-json", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while not self._server.started:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the HTTP server did not start within {STEP_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)

    def offer(self) -> ReceiverOffer:
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return ReceiverOffer(host=self._host, port=port, key=self._key)

    def accept(self) -> None:
        self._tensors = []
        self._complete.clear()

    def receive(self) -> Sequence[Any]:
        if not self._complete.wait(ROUND_TIMEOUT_S):
            raise TimeoutError(f"not all layers arrived within {ROUND_TIMEOUT_S:g} s")
        return self._tensors

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(STEP_TIMEOUT_S)

    async def _take(self, request: Request) -> Response:
        key = f"Bearer {self._key}".encode()
        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), key):
            return JSONResponse({"error": "the benchmark's key is missing or wrong"}, 401)
        layer = await request.json()
        tensors = [numpy.frombuffer(base64.b64decode(layer[kind]), numpy.uint8) for kind in ("keys", "values")]
        synthetic_kv.copy_to_mlx(tensors)
        self._tensors += tensors
        if len(self._tensors) == self._count:
            self._complete.set()
        return JSONResponse({"ok": True})


def _text(tensor: Any) -> str:
    return base64.b64encode(tensor).decode("ascii")
