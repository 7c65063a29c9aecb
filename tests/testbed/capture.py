"""All packets of the bed's network, as its switch sees them."""

from __future__ import annotations

import socket
import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from tests.testbed import network
from tests.testbed.bed import Bed

_ALL_PROTOCOLS: Final = 0x0003
_RECEIVE_BUFFER_FORCE, _PACKET_LEVEL, _PACKET_STATISTICS = 33, 263, 6  # of Linux; `socket` does not name them
_BUFFER_BYTES: Final = 256 << 20
_LARGEST_FRAME: Final = 1 << 17
_LARGEST_STREAM: Final = 64 << 20
_ETHERNET_BYTES: Final = 14
_IPV4, _TCP, _SYN = b"\x08\x00", 6, 2

End = tuple[str, int]
"""Address and port."""


@dataclass
class Capture:
    """frames: of every cable, so that one that crossed two is there twice. Complete when its block has ended."""

    frames: list[bytes] = field(default_factory=list)

    @property
    def streams(self) -> dict[tuple[End, End], bytes]:
        """What each TCP connection carried one way, by sender and receiver, put together from its packets."""
        segments: dict[tuple[End, End], list[tuple[int, bytes]]] = defaultdict(list)
        for frame in self.frames:
            if (found := _segment(frame)) is not None:
                segments[found[0], found[1]].append(found[2:])
        return {ends: _joined(parts) for ends, parts in segments.items()}

    def sent_to(self, address: str, port: int) -> list[bytes]:
        """What each connection to this address carried to it; without those that carried nothing."""
        return [sent for (_, receiver), sent in self.streams.items() if receiver == (address, port) and sent]

    def has(self, secret: bytes) -> bool:
        """Whether the bytes are in any packet, or in several of one connection."""
        return any(secret in data for data in (*self.frames, *self.streams.values()))


@contextmanager
def capturing(bed: Bed) -> Iterator[Capture]:
    """Within, every packet between hosts of the bed, and between them and the hub, is recorded.

    A packet is recorded before it is delivered: what an end has received is there.
    """
    capture = Capture()
    with network.inside(bed.hub):
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    with tap:
        tap.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER_FORCE, _BUFFER_BYTES)
        yield capture
        tap.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                capture.frames.append(tap.recv(_LARGEST_FRAME))
        _, dropped = struct.unpack("II", tap.getsockopt(_PACKET_LEVEL, _PACKET_STATISTICS, 8))
        assert not dropped, f"the capture lacks {dropped} packets"


def _segment(frame: bytes) -> tuple[End, End, int, bytes] | None:
    """Sender, receiver, sequence number of the first byte, and bytes of a TCP packet; None for any other."""
    if frame[12:14] != _IPV4 or frame[23] != _TCP:
        return None
    length = int.from_bytes(frame[16:18])
    tcp = _ETHERNET_BYTES + (frame[14] & 0x0F) * 4
    source, target, sequence = struct.unpack_from("!HHI", frame, tcp)
    data = frame[tcp + (frame[tcp + 12] >> 4) * 4 : _ETHERNET_BYTES + length]
    if frame[tcp + 13] & _SYN:
        sequence += 1
    sender, receiver = socket.inet_ntoa(frame[26:30]), socket.inet_ntoa(frame[30:34])
    return (sender, source), (receiver, target), sequence, data


def _joined(segments: list[tuple[int, bytes]]) -> bytes:
    """The bytes of one direction in order, from the first packet that was recorded."""
    first, joined = segments[0][0], bytearray()
    for sequence, data in segments:
        offset = (sequence - first) % (1 << 32)
        if data and offset + len(data) <= _LARGEST_STREAM:
            joined.extend(bytes(max(0, offset - len(joined))))
            joined[offset : offset + len(data)] = data
    return bytes(joined)
