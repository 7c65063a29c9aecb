"""A command holds the locks of all its hosts or of none, and a command that has lost one changes nothing more there."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from disagg.config import EngineOptions, Host
from disagg.errors import Cancelled, HostLocked, HostUnreachable, LockLost
from disagg.fleet.changes.audit import Caller
from disagg.fleet.changes.locks import FleetLocks, kept, places
from disagg.fleet.machine.connect import Machines
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import CommandResult, Machine
from disagg.fleet.machine.upload import put_tree

HOSTS = [Host(name, "127.0.0.1", ("prefill",), "tiny", EngineOptions("transformers"), 8000) for name in "cab"]
ADA = Caller("ada", "desk", 7, "x", 1.0, "rollout")
BOB = replace(ADA, who="bob", why="stop --break-lock")


class Place:
    """Three hosts on this machine. taken: those whose locks were taken, in this order."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.taken: list[str] = []
        for host in HOSTS:
            self.own(host.name).mkdir(parents=True)

    def own(self, name: str) -> Path:
        return self.home / ".disagg/hosts" / name

    def lock(self, name: str) -> Path:
        return self.own(name) / "lock"

    def hold(self, name: str, holder: Caller = ADA) -> None:
        self.lock(name).mkdir(exist_ok=True)
        (self.lock(name) / "holder").write_text(json.dumps(asdict(holder)) + "\n")

    def locked(self) -> set[str]:
        return {host.name for host in HOSTS if self.lock(host.name).exists()}

    @contextmanager
    def kept(self, connect: Callable[[Host], Machine] | None = None, **options: Any) -> Iterator[FleetLocks]:
        with Machines(connect or (lambda host: Watched(host.name, self))) as machines:
            locks = FleetLocks(machines, "deploy", **options)
            with kept(locks, places(HOSTS)):
                yield locks


class Watched(LocalMachine):
    """before: called before a lock is taken."""

    def __init__(self, name: str, place: Place, before: Callable[[str], None] = lambda name: None) -> None:
        super().__init__(name)
        self._place, self._before = place, before

    def run(self, argv: Sequence[str], **options: Any) -> CommandResult:
        if not (taking := "mkdir -p" in options.get("script", "")):
            return super().run(argv, **options)
        self._before(self.name)
        done = super().run(argv, **options)
        if taking and done.ok:
            self._place.taken.append(self.name)
        return done


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """This machine with another HOME."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return Place(tmp_path)


def test_all_are_taken_in_order_of_names_and_held_until_the_end(place: Place) -> None:
    with place.kept() as locks:
        assert place.taken == ["a", "b", "c"] and place.locked() == {"a", "b", "c"}
        assert not locks.left_out
    assert place.locked() == set()


def test_a_command_that_one_host_refuses_takes_no_lock(place: Place) -> None:
    place.hold("c")
    said = "c is locked: ada@desk holds it for `disagg rollout` since 1970"
    with pytest.raises(HostLocked, match=said) as refused, place.kept():
        pytest.fail("it was taken")
    assert "nothing was changed" in refused.value.hint
    assert place.taken == [] and place.locked() == {"c"}
    assert not list(place.home.rglob("audit.log"))


def test_a_refusal_after_the_first_locks_gives_them_back(place: Place) -> None:
    def taken_meanwhile(name: str) -> None:
        if name == "b":
            place.hold("b")

    def connect(host: Host) -> Machine:
        return Watched(host.name, place, taken_meanwhile)

    with pytest.raises(HostLocked, match="b is locked: ada@desk"), place.kept(connect):
        pytest.fail("it was taken")
    assert place.taken == ["a"] and place.locked() == {"b"}


def test_of_two_commands_that_begin_together_one_has_all_locks_and_the_other_none(place: Place) -> None:
    results: list[str] = []
    together, end = threading.Barrier(2), threading.Event()

    def connect(host: Host) -> Machine:
        def wait(name: str) -> None:
            if name == "a":
                together.wait(20)

        return Watched(host.name, place, wait)

    def command() -> None:
        try:
            with place.kept(connect):
                assert place.locked() == {"a", "b", "c"}
                results.append("all")
                assert end.wait(20)
        except HostLocked:
            results.append("none")
            end.set()

    threads = [threading.Thread(target=command) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["all", "none"] and place.taken == ["a", "b", "c"]


def test_a_host_that_cannot_be_reached_is_left_out_with_the_reason(place: Place) -> None:
    def connect(host: Host) -> Machine:
        if host.name == "b":
            raise HostUnreachable("b: no route", "ping b")
        return Watched(host.name, place)

    with place.kept(connect) as locks:
        assert place.locked() == {"a", "c"} and list(locks.left_out) == ["b"]
        with pytest.raises(HostUnreachable, match="b: no route"):
            locks.machine(next(host for host in HOSTS if host.name == "b"))


def test_a_host_that_nothing_was_deployed_to_gets_no_folder(place: Place) -> None:
    place.own("b").rmdir()
    with place.kept() as locks:
        assert place.locked() == {"a", "c"} and not locks.left_out
    assert not place.own("b").exists()


def test_an_interruption_while_they_are_taken_leaves_none(place: Place) -> None:
    class Late(Watched):
        def run(self, argv: Sequence[str], **options: Any) -> CommandResult:
            done = super().run(argv, **options)
            if self.name == "b" and "b" in place.taken and place.locked() == {"a", "b"}:
                raise Cancelled("interrupted before it was known that the lock is taken")
            return done

    with pytest.raises(Cancelled), place.kept(lambda host: Late(host.name, place)):
        pytest.fail("it went on")
    assert place.locked() == set()


def change(machine: Machine, path: Path) -> None:
    machine.run([str(path)], script='touch "$1"')


def write(machine: Machine, path: Path) -> None:
    machine.write(str(path), b"x")


def put(machine: Machine, path: Path) -> None:
    put_tree(machine, {"file": b"x"}, str(path))


def put_large(machine: Machine, path: Path) -> None:
    (path.parent / "large").write_bytes(bytes(5 << 20))
    put_tree(machine, {"file": path.parent / "large"}, str(path), parts=f"{path}.parts")


@pytest.mark.parametrize("step", [change, write, put, put_large])
def test_whom_a_lock_was_taken_from_changes_nothing_more_there_and_is_told_by_whom(
    place: Place, step: Callable[[Machine, Path], None]
) -> None:
    host, path = HOSTS[1], place.home / "changed"
    said = "a: this command has lost its lock: bob@desk holds it for `disagg stop --break-lock`"
    with pytest.raises(LockLost, match=said), place.kept() as locks:
        place.hold("a", BOB)
        step(locks.machine(host), path)
    assert not list(place.home.glob("changed*"))
    assert place.locked() == {"a"} and json.loads((place.lock("a") / "holder").read_text())["who"] == "bob"
    assert '"error": "LockLost"' in (place.own("a") / "logs/audit.log").read_text()


def test_a_lock_that_was_taken_and_given_back_is_lost_too(place: Place) -> None:
    with pytest.raises(LockLost, match="another command has taken it, and has ended"), place.kept() as locks:
        (place.lock("a") / "holder").unlink()
        place.lock("a").rmdir()
        change(locks.machine(HOSTS[1]), place.home / "changed")
    assert not (place.home / "changed").exists()


def test_with_break_lock_all_are_taken_and_the_holder_is_left_with_none(place: Place) -> None:
    for name in "abc":
        place.hold(name)
    with place.kept(break_lock=True):
        assert place.locked() == {"a", "b", "c"}
        assert {json.loads((place.lock(name) / "holder").read_text())["why"] for name in "abc"} == {"deploy"}
    assert place.locked() == set()


def test_the_machine_is_free_again_afterwards(place: Place) -> None:
    with Machines(lambda host: Watched(host.name, place)) as machines:
        with kept(FleetLocks(machines, "deploy"), places(HOSTS)):
            pass
        place.hold("a")
        change(machines[HOSTS[1]], place.home / "changed")
    assert (place.home / "changed").exists()
