from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.deadlines import wait_until
from tests.faults.flow import Fault
from tests.faults.proxy import Injection, Proxy

WAIT_S = 60.0


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it receives."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
            except OSError:
                pass

    threading.Thread(target=serve, daemon=True).start()
    yield int(listener.getsockname()[1])
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.fixture
def proxy(echo: int) -> Iterator[Proxy]:
    with Proxy("echo", echo) as proxy:
        yield proxy


def exchange(proxy: Proxy, data: bytes) -> bytes:
    """What comes back for these bytes, to the end of the connection."""
    with socket.create_connection(("127.0.0.1", proxy.port), WAIT_S) as connection:
        connection.sendall(data)
        with suppress(OSError):  # it may have been reset; the first read says so
            connection.shutdown(socket.SHUT_WR)
        got = bytearray()
        while part := connection.recv(1 << 16):
            got += part
        return bytes(got)


def heal_after(proxy: Proxy, injection: Injection, seconds: float) -> None:
    wait_until(lambda: injection.spent, WAIT_S, "the fault")
    time.sleep(seconds)
    proxy.heal()


def test_without_a_fault_bytes_pass_unchanged(proxy: Proxy) -> None:
    data = bytes(range(256)) * 4096
    assert exchange(proxy, data) == data
    wait_until(lambda: proxy.connections == 0, WAIT_S, "the connection to be closed")


def test_a_refused_connection_is_refused_until_it_is_healed(proxy: Proxy) -> None:
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        exchange(proxy, b"x")
    proxy.heal()
    assert exchange(proxy, b"x") == b"x"


def test_a_reset_reaches_the_caller_as_a_reset(proxy: Proxy) -> None:
    proxy.inject(Injection(Fault("reset", at=2)))
    with pytest.raises(ConnectionResetError):
        exchange(proxy, b"12345")
    assert exchange(proxy, b"12345") == b"12345"  # it strikes once


def test_a_truncated_answer_ends_in_order_after_its_bytes(proxy: Proxy) -> None:
    proxy.inject(Injection(Fault("close", at=2)))
    assert exchange(proxy, b"12345") == b"12"


def test_a_stalled_answer_goes_on_once_it_is_healed(proxy: Proxy) -> None:
    injection = Injection(Fault("stall", at=2))
    proxy.inject(injection)
    healer = threading.Thread(target=heal_after, args=(proxy, injection, 0.1))
    healer.start()
    began = time.monotonic()
    assert exchange(proxy, b"12345") == b"12345"
    assert time.monotonic() - began > 0.1
    healer.join()


def test_a_corrupted_request_reaches_the_server_with_one_byte_changed(proxy: Proxy) -> None:
    proxy.inject(Injection(Fault("corrupt", "request", at=2)))
    assert exchange(proxy, b"12345") == b"12\xcc45"


def test_a_slow_answer_takes_its_time(proxy: Proxy) -> None:
    proxy.inject(Injection(Fault("slow", rate=1000.0)))
    began = time.monotonic()
    assert exchange(proxy, b"x" * 200) == b"x" * 200
    assert time.monotonic() - began > 0.1


def test_a_slow_flow_stays_slow_while_other_connections_are_struck(proxy: Proxy) -> None:
    proxy.inject(Injection(Fault("slow", rate=20_000.0, times=1000)))
    began = time.monotonic()
    assert exchange(proxy, b"x" * 10_000) == b"x" * 10_000
    assert time.monotonic() - began > 0.3


def test_a_fault_of_a_path_strikes_only_after_that_request(proxy: Proxy) -> None:
    called: list[str] = []
    proxy.inject(Injection(Fault("call", path="/decode", after=b"tokens"), called.append))
    exchange(proxy, b"GET /load HTTP/1.1 tokens")
    assert called == []
    exchange(proxy, b"POST /decode HTTP/1.1 tokens ...")
    assert called == ["echo"]


def test_a_fault_on_several_proxies_strikes_once(proxy: Proxy, echo: int) -> None:
    injection = Injection(Fault("close"))
    with Proxy("other", echo) as other:
        for each in (proxy, other):
            each.inject(injection)
        assert sorted((exchange(proxy, b"x"), exchange(other, b"x"))) == [b"", b"x"]
    assert [name for _, name in injection.struck] == ["echo"]


def test_a_connection_that_was_accepted_before_all_were_reset_is_reset_too(echo: int) -> None:
    with Proxy("echo", echo) as proxy, socket.create_server(("127.0.0.1", 0)) as listener:
        proxy.refuse()
        proxy.reset_all()
        with socket.create_connection(listener.getsockname(), WAIT_S) as caller:
            accepted, _ = listener.accept()
            proxy._connect(accepted)
            with pytest.raises(ConnectionResetError):
                caller.recv(1)
