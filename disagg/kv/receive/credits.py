"""What the receiver replies while hidden states come: how many chunks it has checked, and how many may be sent. They
have memory that the engine frees by computing from them, so that a sender ahead of the engine has to wait."""

from __future__ import annotations

import threading
import time

from disagg.kv.channel import Channel
from disagg.kv.frames import encode_credit
from disagg.kv.receive.incoming import Incoming

REPEAT_S = 1.0  # a sender that waits hears so often that this end still runs


class Credits:
    """The credit of one connection, sent by the threads of the connection and of the engine. Nothing is sent before
    `open` and after `close`."""

    def __init__(self, channel: Channel, incoming: Incoming) -> None:
        self._channel, self._incoming = channel, incoming
        self._lock = threading.Lock()
        self._is_open = False
        self._sent = 0.0

    def open(self) -> None:
        """The header is accepted: its reply is the first credit."""
        self._is_open = True
        self.send()

    def send(self) -> None:
        """State what has come and what may. Does not wait."""
        with self._lock:
            if self._is_open:
                self._sent = time.monotonic()
                self._channel.reply(encode_credit(self._incoming.arriving.progress))

    def repeat(self) -> None:
        """State it again if that was some time ago: the sender waits."""
        if time.monotonic() >= self._sent + REPEAT_S:
            self.send()

    def used_up(self) -> bool:
        """Whether the sender may send no more until the engine has computed."""
        progress = self._incoming.arriving.progress
        return self._is_open and progress.checked == progress.allowed

    def close(self) -> None:
        """What follows is the last reply."""
        with self._lock:
            self._is_open = False
