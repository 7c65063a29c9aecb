"""A running receiver, checked after each test: no bytes held, no connection open, no thread left."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.deadlines import wait_until
from tests.kv.kv_parts import Receiver, start_receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = start_receiver()
    yield receiver
    receiver.server.close()
    assert receiver.tickets.outstanding == 0


@pytest.fixture(autouse=True)
def receivers_look_often_whether_they_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times as often: each test would wait 0.1 s for the end of its receiver."""
    monkeypatch.setattr("disagg.kv.receive.server.SWEEP_S", 0.01)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_until(lambda: not {t for t in threading.enumerate() if t.name.startswith("kv-")} - before)
