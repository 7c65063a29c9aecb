"""The three ways to move KV from a sender on the prefill host to a receiver on the decode host: disagg's own, a bare
socket, and base64 in JSON over HTTP."""

from __future__ import annotations

import base64
import hmac
import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import numpy
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from disagg.api.base import Contract
from disagg.api.layout import Layout
from disagg.bench.handoff.channel import (
    ROUND_TIMEOUT_S,
    STEP_TIMEOUT_S,
    accept_with_key,
    address_family,
    connect_with_key,
)
from disagg.engines import synthetic
from disagg.engines.synthetic import SyntheticKV
from disagg.errors import PeerLost
from disagg.kv.arena import Arenas
from disagg.kv.fingerprint import Fingerprint, token_hash
from disagg.kv.frames import Header
from disagg.kv.receive import KVServer
from disagg.kv.receive.incoming import Expected
from disagg.kv.receive.tickets import KVOutcome, Tickets
from disagg.kv.received import ByteRanges, ReceivedKV
from disagg.kv.transfer import Transfer

_FINGERPRINT = Fingerprint("benchmark", 1, "none", "none", "none", "none")
_REQUEST = "benchmark"
_CALL_BYTES = 1 << 20
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class RandomKV:
    """The KV of `tokens` tokens of one model."""

    layout: Layout
    tokens: int

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes(self.tokens)


class ReceiverOffer(Contract, frozen=True, kw_only=True):
    """Where and with which secret the sender connects. key: of the bare socket and HTTP. ticket: of the hand-off."""

    host: str
    port: int
    key: str = ""
    ticket: str = ""


class Sender(Protocol):
    """The prefill host's end."""

    def prepare(self, offer: ReceiverOffer) -> None:
        """Untimed: connect to the receiver."""

    def send(self) -> None:
        """Timed: send all of the KV."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """The decode host's end."""

    def offer(self) -> ReceiverOffer:
        """Untimed: listen, and return what the sender needs to connect."""

    def accept(self) -> None:
        """Untimed: called after the sender's `prepare`."""

    def receive(self) -> Sequence[Any]:
        """Timed: receive all of the KV. Returns each tensor's bytes, ready for the decode engine, keys and values
        alternating."""

    def close(self) -> None: ...


class HandoffSender:
    """Sends as a prefill host does, one transfer of the KV protocol for each round."""

    def __init__(self, shape: RandomKV, source: SyntheticKV) -> None:
        self._shape = shape
        self._source = source
        self._transfer: Transfer | None = None

    def prepare(self, offer: ReceiverOffer) -> None:
        header = Header(offer.ticket, _REQUEST, _FINGERPRINT, self._shape.layout, token_hash([]), self._shape.tokens)
        deadline = time.monotonic() + ROUND_TIMEOUT_S
        self._transfer = Transfer.open(offer.host, offer.port, header, deadline=deadline)

    def send(self) -> None:
        assert self._transfer is not None, "prepare comes first"
        self._source.emit(self._transfer.send)
        self._transfer.finish()

    def close(self) -> None:
        if self._transfer is not None:
            self._transfer.abort()


class HandoffReceiver:
    """Receives as a decode host does, into memory of its engine; each round has a ticket."""

    def __init__(self, shape: RandomKV, host: str) -> None:
        from disagg.engines.mlx import memory  # the sending host need not have mlx

        self._shape = shape
        # The memory of one transfer is kept for the next, as on a decode host.
        self._tickets = Tickets(Arenas(memory.allocate, keep_bytes=2 * shape.nbytes))
        self._server = KVServer(host, 0, self._tickets)
        self._outcomes: queue.Queue[KVOutcome] = queue.Queue()

    def offer(self) -> ReceiverOffer:
        expected = Expected(_REQUEST, self._shape.layout, _FINGERPRINT, token_hash([]), self._shape.tokens)
        slot = self._tickets.issue(expected, self._outcomes.put, deadline=time.monotonic() + ROUND_TIMEOUT_S)
        return ReceiverOffer(host=self._server.host, port=self._server.port, ticket=slot.ticket)

    def accept(self) -> None:
        """Nothing to do: the transfer's header carries the ticket."""

    def receive(self) -> Sequence[Any]:
        outcome = self._outcomes.get(timeout=ROUND_TIMEOUT_S + STEP_TIMEOUT_S)  # the ticket's deadline is earlier
        if not isinstance(outcome, ReceivedKV):
            raise outcome
        tensors = synthetic.ingest(outcome)
        outcome.release(reuse=True)  # the bytes are read before the next transfer begins
        return tensors

    def close(self) -> None:
        self._server.close()


class BareSender:
    """Sends nothing but the tensors' bytes, over one connection for all rounds."""

    def __init__(self, shape: RandomKV, source: SyntheticKV) -> None:
        self._tensors = source.flat()
        self._socket: socket.socket | None = None

    def prepare(self, offer: ReceiverOffer) -> None:
        if self._socket is None:
            self._socket = connect_with_key(offer.host, offer.port, offer.key)

    def send(self) -> None:
        assert self._socket is not None, "prepare comes first"
        for tensor in self._tensors:
            self._socket.sendall(tensor)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


class BareReceiver:
    """Receives the tensors' bytes into memory that is mapped before the clock starts."""

    def __init__(self, shape: RandomKV, host: str) -> None:
        ranges = ByteRanges.of(shape.layout, shape.tokens)
        self._data: Any = numpy.zeros(ranges.nbytes, numpy.uint8)
        self._data[:] = 255  # every page is mapped before the clock starts
        self._places = [place for pair in zip(ranges.keys, ranges.values, strict=True) for (place,) in pair]
        self._listener = socket.create_server((host, 0), family=address_family(host))
        self._host = host
        self._key = secrets.token_hex(32)
        self._socket: socket.socket | None = None

    def offer(self) -> ReceiverOffer:
        return ReceiverOffer(host=self._host, port=self._listener.getsockname()[1], key=self._key)

    def accept(self) -> None:
        if self._socket is None:
            self._socket = accept_with_key(self._listener, self._key, STEP_TIMEOUT_S)
            self._socket.settimeout(STEP_TIMEOUT_S)

    def receive(self) -> Sequence[Any]:
        assert self._socket is not None, "accept comes first"
        tensors = [self._data[place] for place in self._places]
        for tensor in tensors:
            fill(self._socket, tensor)
        return tensors

    def close(self) -> None:
        self._listener.close()
        if self._socket is not None:
            self._socket.close()


def fill(connection: socket.socket, tensor: Any) -> None:
    """Receive a tensor's bytes into its memory. ConnectionError if the sender closes the connection before."""
    view, received = memoryview(tensor), 0
    while received < len(view):
        count = connection.recv_into(view[received : received + _CALL_BYTES])
        if not count:
            raise ConnectionError("the sender closed the connection")
        received += count


class JSONSender:
    """Posts each layer as JSON to one HTTP server."""

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
    """An HTTP server that takes each layer as JSON."""

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
        synthetic.copy_to_mlx(tensors)
        self._tensors += tensors
        if len(self._tensors) == self._count:
            self._complete.set()
        return JSONResponse({"ok": True})


def _text(tensor: Any) -> str:
    return base64.b64encode(tensor).decode("ascii")
