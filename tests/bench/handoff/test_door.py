from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from disagg.bench.handoff import door
from disagg.errors import PeerLost

KEY = "0123456789abcdef"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def knock(listener: socket.socket, key: str) -> socket.socket:
    return door.knock("127.0.0.1", port(listener), key)


def test_the_holder_of_the_key_gets_the_connection_with_nothing_read_beyond_the_key(listener: socket.socket) -> None:
    with knock(listener, KEY) as here:
        here.sendall(b"and on")
        with door.admit(listener, KEY, 5.0) as there:
            assert there.recv(100) == b"and on"


@pytest.mark.parametrize("said", ["x" * len(KEY), KEY[:-1], "", "nonsense\n" * 1000])
def test_a_stranger_in_front_is_turned_away_and_the_holder_of_the_key_gets_in(
    listener: socket.socket, said: Any
) -> None:
    with knock(listener, said) as stranger:
        stranger.shutdown(socket.SHUT_WR)
        with knock(listener, KEY) as here, door.admit(listener, KEY, 5.0) as there:
            assert there.getpeername() == here.getsockname()


def test_a_silent_or_dripping_stranger_costs_a_bounded_time(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_KNOCK_S", 0.3)
    stop = threading.Event()

    def drip(stranger: socket.socket) -> None:
        while not stop.wait(0.1):
            try:
                stranger.sendall(b"0")
            except OSError:
                return

    with knock(listener, "") as silent, knock(listener, "") as dripping, knock(listener, KEY) as here:
        dripper = threading.Thread(target=drip, args=(dripping,))
        dripper.start()
        with door.admit(listener, KEY, 5.0) as there:
            assert there.getpeername() == here.getsockname()
        stop.set()
        dripper.join()
        assert silent.fileno() >= 0


def test_where_nobody_has_the_key_it_ends(listener: socket.socket) -> None:
    with knock(listener, "wrong"), pytest.raises(PeerLost, match=r"key came within 0\.2 s"):
        door.admit(listener, KEY, 0.2)


def test_a_port_where_nobody_listens_is_a_lost_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = port(listener)
    with pytest.raises(PeerLost, match="cannot connect"):
        door.knock("127.0.0.1", closed, KEY)
