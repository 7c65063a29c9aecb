"""Which release a crash starts, and which links a deployment moves: a table, and the script on a real folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.errors import FleetError
from disagg.fleet.changes.links import Move, move_links
from disagg.fleet.deploy.plan import service_moves, service_release, switch_moves
from disagg.fleet.facts.host import HostFacts, Release
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.machine.local import LocalMachine

A, B, C = "a" * 16, "b" * 16, "c" * 16


def facts(there: str = "ab", *, current: str = A, service: str = "", ran: str = "", alive: bool = False) -> HostFacts:
    """there: the first letters of the releases on the host."""
    releases = tuple(Release("spark", letter * 16, "e" * 16) for letter in there)
    pid = 7 if ran and alive else None
    return HostFacts("spark", releases=releases, current=current, service=service, release=ran, pid=pid)


@pytest.mark.parametrize(
    ("found", "release", "moves"),
    [
        (facts(service=A, ran=A, alive=True), A, ()),
        (facts(service=B, ran=B, alive=True), B, ()),  # A is deployed and pending
        (facts(ran=B, alive=True), B, (("running", B),)),  # an earlier disagg: there is no link
        (facts(service=A, ran=B, alive=True), B, (("running", B),)),  # an earlier disagg left it where it was
        (facts(service=C, ran=B, alive=True), B, (("running", B),)),  # and removed its release
        (facts(service=A, ran=C, alive=True), A, ()),  # what runs was removed
        (facts(service=A, ran=B), A, ()),  # nothing runs: as the last start chose
        (facts(ran=B), B, (("running", B),)),
        (facts(), A, (("running", A),)),  # deployed by an earlier disagg and never started
        (facts(current=""), "", ()),
        (HostFacts("spark"), "", ()),
    ],
)
def test_a_crash_starts_what_runs_whatever_is_deployed(found: HostFacts, release: str, moves: tuple[Move, ...]) -> None:
    assert (service_release(found), service_moves(found)) == (release, moves)


@pytest.mark.parametrize(
    ("found", "moves"),
    [
        (facts("", current=""), (("running", C), ("current", C))),
        (facts(service=A), (("running", C), ("previous", A), ("current", C))),  # A never ran
        (facts(service=A, ran=A, alive=True), (("previous", A), ("current", C))),
        (facts(current=B, service=A, ran=A), (("previous", A), ("current", C))),  # B was never started
        (facts(current=B, service=C, ran=C), (("previous", B), ("current", C))),
        (facts(current=C, service=A, ran=A), ()),
        (facts(current="d" * 16, service=A, ran="d" * 16), (("current", C),)),  # its files are gone
    ],
)
def test_a_switch_keeps_what_ran_for_rollback(found: HostFacts, moves: tuple[Move, ...]) -> None:
    assert switch_moves(found, C) == moves


def test_links_are_moved_in_order_up_to_the_first_release_that_is_incomplete(tmp_path: Path) -> None:
    paths = HostPaths(str(tmp_path), "spark")
    own = Path(paths.folder)
    for release in (A, B):
        (own / "releases" / release).mkdir(parents=True)
    (own / "releases" / A / "run").touch()
    machine = LocalMachine("spark")
    move_links(machine, paths, [("running", A), ("current", A)])
    before = (own / "current").lstat().st_ino, (own / "current").lstat().st_ctime_ns
    move_links(machine, paths, [("current", A)])
    after = (own / "current").lstat().st_ino, (own / "current").lstat().st_ctime_ns
    assert after == before, "a link that is right is not touched"  # but read, which changes its atime
    with pytest.raises(FleetError, match=f"release {B} is incomplete"):
        move_links(machine, paths, [("previous", A), ("current", B), ("running", B)])
    links = {name: (own / name).readlink() for name in ("current", "previous", "running")}
    assert set(links.values()) == {Path("releases", A)}
    (own / "releases" / B / "run").touch()
    move_links(machine, paths, [("current", B)])
    assert (own / "current").resolve().name == B and not list((own / "releases" / A).glob(".*"))
    assert sorted(path.name for path in own.iterdir()) == ["current", "previous", "releases", "running"]
