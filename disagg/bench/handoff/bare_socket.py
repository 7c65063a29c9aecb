"""The fastest transport in pure Python: `sendall` and `recv_into` on one TCP connection. It sends from each tensor's
memory and receives into one buffer."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from typing import Any

import numpy

from disagg.bench.handoff.connect import accept_with_key, address_family, connect_with_key
from disagg.bench.handoff.transport import STEP_TIMEOUT_S, RandomKV, ReceiverOffer
from disagg.engines.simulated.synthetic_kv import SyntheticKV
from disagg.kv.received import ByteRanges

_CALL_BYTES = 1 << 20


class BareSender:
    """See transport.Sender."""

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
    """See transport.Receiver."""

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
