from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from disagg.bench.handoff import channel
from disagg.errors import PeerLost

KEY = "0123456789abcdef"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def connected(listener: socket.socket, key: str) -> socket.socket:
    return channel.connect_with_key("127.0.0.1", port(listener), key)


def test_a_client_with_the_key_is_accepted_and_nothing_is_read_beyond_the_key(listener: socket.socket) -> None:
    with connected(listener, KEY) as here:
        here.sendall(b"and on")
        with channel.accept_with_key(listener, KEY, 5.0) as there:
            assert there.recv(100) == b"and on"


@pytest.mark.parametrize("sent", ["x" * len(KEY), KEY[:-1], "", "nonsense\n" * 1000])
def test_a_client_without_the_key_is_closed_and_the_next_with_the_key_accepted(
    listener: socket.socket, sent: Any
) -> None:
    with connected(listener, sent) as other:
        other.shutdown(socket.SHUT_WR)
        with connected(listener, KEY) as here, channel.accept_with_key(listener, KEY, 5.0) as there:
            assert there.getpeername() == here.getsockname()


def test_a_silent_or_slow_client_without_the_key_blocks_for_a_bounded_time(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_KEY_TIMEOUT_S", 0.3)
    stop = threading.Event()

    def drip(client: socket.socket) -> None:
        while not stop.wait(0.1):
            try:
                client.sendall(b"0")
            except OSError:
                return

    with connected(listener, "") as silent, connected(listener, "") as dripping, connected(listener, KEY) as here:
        dripper = threading.Thread(target=drip, args=(dripping,))
        dripper.start()
        with channel.accept_with_key(listener, KEY, 5.0) as there:
            assert there.getpeername() == here.getsockname()
        stop.set()
        dripper.join()
        assert silent.fileno() >= 0


def test_without_a_client_with_the_key_it_ends(listener: socket.socket) -> None:
    with connected(listener, "wrong"), pytest.raises(PeerLost, match=r"key connected within 0\.2 s"):
        channel.accept_with_key(listener, KEY, 0.2)


def test_a_port_without_a_listener_is_a_lost_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = port(listener)
    with pytest.raises(PeerLost, match="cannot connect"):
        channel.connect_with_key("127.0.0.1", closed, KEY)
