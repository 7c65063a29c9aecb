"""disagg/servers/host/admission.py: a request that its caller does not name in time ends."""

from __future__ import annotations

from disagg.servers.host.admission import Leases


class Ended(list[str]):
    """Keys of requests whose lease has ended."""

    def take(self, leases: Leases, key: str, request_id: str, lease_s: float = 10.0) -> None:
        leases.take(key, request_id, lease_s, 0.0, lambda: self.append(key))


def test_a_lease_that_is_not_extended_ends_once() -> None:
    leases, ended = Leases(), Ended()
    ended.take(leases, "k", "r")
    for now in (9.0, 10.0, 11.0):
        leases.expire(now)
    assert ended == ["k"]


def test_an_extended_lease_begins_anew_with_its_own_length() -> None:
    leases, ended = Leases(), Ended()
    ended.take(leases, "k", "r", 10.0)
    ended.take(leases, "l", "s", 20.0)
    leases.extend(["r", "s"], now=9.0)
    leases.expire(18.9)
    assert ended == []
    leases.expire(19.0)
    assert ended == ["k"]


def test_two_requests_with_one_id_are_extended_together_and_dropped_apart() -> None:
    leases, ended = Leases(), Ended()
    ended.take(leases, "first", "r")
    ended.take(leases, "second", "r")
    leases.extend(["r", "unknown"], now=5.0)
    leases.drop("first")
    leases.drop("first")
    leases.expire(20.0)
    assert ended == ["second"]
