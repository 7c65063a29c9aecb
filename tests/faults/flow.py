"""Where in a stream of bytes a fault strikes, and what it does there. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

Kind = Literal["reset", "close", "stall", "call", "corrupt", "duplicate", "reorder", "slow"]
Direction = Literal["request", "answer"]
Action = Literal["reset", "close", "stall", "call"]

ACTIONS: Final[tuple[Action, ...]] = ("reset", "close", "stall", "call")
"""What the proxy does to a connection. The other kinds change its bytes."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a connection, and at which byte.

    direction: of the bytes concerned; "request" is from the side that connected. path: only after a "POST path" has
    passed; "" for connections that are not HTTP. after, nth: only after this text has passed so often, in `direction`.
    at: bytes after that. size: how many bytes are doubled, or how long each of two swapped blocks is. rate: bytes/s of
    "slow". times: how many connections it strikes.

    reset: TCP reset to both sides. close: end of file to both. stall: no byte more. call: a function is called, then
    the bytes go on.
    """

    kind: Kind
    direction: Direction = "answer"
    path: str = ""
    after: bytes = b""
    nth: int = 1
    at: int = 0
    size: int = 64
    rate: float = 0.0
    times: int = 1


@dataclass(slots=True)
class Needle:
    """Finds the n-th occurrence of a text in a stream, also if it is split between two pieces."""

    text: bytes
    nth: int = 1
    _tail: bytes = b""

    def find(self, data: bytes) -> int | None:
        """The offset in `data` just after the n-th occurrence, once."""
        if self.nth <= 0:
            return None
        if not self.text:
            self.nth = 0
            return 0
        joined, start = self._tail + data, 0
        while (at := joined.find(self.text, start)) >= 0:
            start = at + len(self.text)
            self.nth -= 1
            if self.nth == 0:
                return start - len(self._tail)
        self._tail = joined[max(start, len(joined) - len(self.text) + 1) :]
        return None


@dataclass(slots=True)
class Flow:
    """Applies a fault to the bytes of one direction of one connection. armed: its request has passed."""

    fault: Fault
    armed: bool = False
    struck: bool = False
    _needle: Needle = field(init=False)
    _left: int | None = None  # bytes before the fault strikes, once its text has passed
    _held: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self._needle = Needle(self.fault.after, self.fault.nth)

    def feed(self, data: bytes) -> tuple[bytes, Action | None, bytes]:
        """What leaves before the fault, what the proxy does, and what leaves after it, of the bytes that came."""
        if not self.armed or (self.struck and not self._held):
            return data, None, b""
        if self.struck:
            return self._changed(data), None, b""
        offset = 0
        if self._left is None:
            found = self._needle.find(data)
            if found is None:
                return data, None, b""
            offset, self._left = found, self.fault.at
        if offset + self._left >= len(data):
            self._left -= len(data) - offset
            return data, None, b""
        cut = offset + self._left
        self.struck = True
        if self.fault.kind in ACTIONS:
            return data[:cut], self.fault.kind, data[cut:]
        return data[:cut] + self._changed(data[cut:]), None, b""

    def end(self) -> bytes:
        """What is still held when the stream ends."""
        held = bytes(self._held)
        self._held.clear()
        return held

    def _changed(self, data: bytes) -> bytes:
        """The bytes from the fault on; holds them until there are enough to double or to swap."""
        size = self.fault.size
        match self.fault.kind:
            case "corrupt":
                return bytes([data[0] ^ 0xFF]) + data[1:]
            case "duplicate" | "reorder":
                self._held += data
                needed = size if self.fault.kind == "duplicate" else 2 * size
                if len(self._held) < needed:
                    return b""
                held = self.end()
                if self.fault.kind == "duplicate":
                    return held[:size] + held
                return held[size : 2 * size] + held[:size] + held[2 * size :]
            case _:
                return data
