"""What a wire gives to Python: one TCP connection, `sendall` from each tensor's memory, `recv_into` one buffer."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from typing import Any

import numpy

from disagg.bench.handoff.door import admit, knock
from disagg.bench.handoff.way import PATIENCE_S, Shape
from disagg.engines.simulated.synthetic_kv import SyntheticKV
from disagg.kv.received import Placement

_CALL_BYTES = 1 << 20


class BareSender:
    """See way.Sender."""

    def __init__(self, shape: Shape, source: SyntheticKV) -> None:
        self._tensors = source.flat()
        self._socket: socket.socket | None = None

    def prepare(self, offer: dict[str, Any]) -> None:
        if self._socket is None:
            self._socket = knock(offer["host"], offer["port"], offer["key"])

    def send(self) -> None:
        assert self._socket is not None, "prepare comes first"
        for tensor in self._tensors:
            self._socket.sendall(tensor)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


class BareReceiver:
    """See way.Receiver."""

    def __init__(self, shape: Shape, host: str) -> None:
        placement = Placement.of(shape.layout, shape.tokens)
        self._data: Any = numpy.zeros(placement.nbytes, numpy.uint8)
        self._data[:] = 255  # every page is there before the clock starts
        self._places = [place for pair in zip(placement.keys, placement.values, strict=True) for (place,) in pair]
        self._listener = socket.create_server((host, 0), family=_family(host))
        self._host = host
        self._key = secrets.token_hex(32)
        self._socket: socket.socket | None = None

    def offer(self) -> dict[str, Any]:
        return {"host": self._host, "port": self._listener.getsockname()[1], "key": self._key}

    def accept(self) -> None:
        if self._socket is None:
            self._socket = admit(self._listener, self._key, PATIENCE_S)
            self._socket.settimeout(PATIENCE_S)

    def receive(self) -> Sequence[Any]:
        assert self._socket is not None, "accept comes first"
        tensors = [self._data[place] for place in self._places]
        for tensor in tensors:
            view, got = memoryview(tensor), 0
            while got < len(view):
                count = self._socket.recv_into(view[got : got + _CALL_BYTES])
                if not count:
                    raise ConnectionError("the sender closed the connection")
                got += count
        return tensors

    def close(self) -> None:
        self._listener.close()
        if self._socket is not None:
            self._socket.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
