from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from disagg.config import Host
from disagg.errors import HostUnreachable
from disagg.fleet.lifecycle.logs import LogLine, follow, read
from disagg.fleet.lifecycle.state import State
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import CommandResult
from tests.deadlines import wait_until
from tests.fleet.yards import make_fleet


class Place:
    """Two local hosts and their logs."""

    def __init__(self, folder: Path) -> None:
        self.fleet = make_fleet(folder, ("a", "b"))
        self.state = State.of(self.fleet, folder / "state")
        self.state.folder.mkdir(parents=True)
        self.hosts = list(self.fleet.hosts.values())

    def log(self, host: str) -> Path:
        return self.state.log_file(host)

    def write(self, host: str, *lines: str) -> None:
        with self.log(host).open("a") as log:
            log.write("".join(f"{line}\n" for line in lines))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def said(second: float, event: str) -> str:
    stamp = f"2026-01-01T00:00:{second:06.3f}Z"
    return json.dumps({"time": stamp, "level": "info", "event": event})


def texts(lines: list[LogLine]) -> list[str]:
    return [f"{line.host} {line.fields['event'] if line.fields else line.text}" for line in lines]


def test_hosts_are_merged_by_time_and_lines_without_one_keep_their_place(place: Place) -> None:
    place.write("a", said(1, "one"), "Traceback", "  boom", said(4, "four"))
    place.write("b", "greeting", said(2, "two"), said(3, "three"))
    lines, errors = read(place.hosts, place.state, 100)
    assert texts(lines) == ["b greeting", "a one", "a Traceback", "a   boom", "b two", "b three", "a four"]
    assert errors == []


def test_a_clock_that_goes_back_within_a_host_moves_no_line(place: Place) -> None:
    place.write("a", said(5, "first"), said(1, "second"))
    place.write("b", said(3, "other"))
    lines, _ = read(place.hosts, place.state, 100)
    assert texts(lines) == ["b other", "a first", "a second"]
    assert lines[1].time == lines[2].time, "else what follows in time would come before it"


def test_no_more_than_the_asked_lines_of_each_host_are_held(place: Place) -> None:
    place.write("a", *(said(n / 10, f"e{n}") for n in range(500)))
    place.write("b", said(1, "b"))
    lines, _ = read(place.hosts, place.state, 3)
    assert texts(lines) == ["b b", "a e497", "a e498", "a e499"]


def test_since_leaves_out_what_is_older_with_the_lines_that_belong_to_it(place: Place) -> None:
    place.write("a", said(1, "old"), "of old", said(9, "new"), "of new")
    since = LogLine("", 0, "").time + 1767225605  # 00:00:05
    assert texts(read(place.hosts[:1], place.state, 100, since)[0]) == ["a new", "a of new"]


def test_the_log_that_was_put_aside_is_read_where_the_new_one_is_short(place: Place) -> None:
    place.write("a", said(1, "before"))
    place.log("a").rename(place.log("a").with_name("a.log.1"))
    place.write("a", said(2, "after"))
    assert texts(read(place.hosts[:1], place.state, 100)[0]) == ["a before", "a after"]
    assert texts(read(place.hosts[:1], place.state, 1)[0]) == ["a after"]


def test_a_host_without_a_log_says_so_and_hides_no_other(place: Place) -> None:
    place.write("a", said(1, "one"))
    lines, (error,) = read(place.hosts, place.state, 100)
    assert texts(lines) == ["a one"] and error.message == "b has no log yet"
    assert error.hint == "disagg start --host b"


def test_a_model_that_was_never_loaded_has_no_log_and_says_how_to_load_it(place: Place) -> None:
    of_model = replace(place.hosts[1], name="b/qwen", keeper="b", model="qwen")
    _, (error,) = read([of_model], place.state, 100)
    assert (error.message, error.hint) == ("b/qwen has no log yet", "disagg models load qwen --host b")


class Following:
    """follow(), on a thread."""

    def __init__(self, place: Place, **options: Any) -> None:
        self.lines: list[LogLine] = []
        self.stop = threading.Event()
        self.follow = follow(place.hosts, place.state, options.pop("lines", 10), **options)
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with closing(self.follow) as lines:
            for line in lines:
                self.lines.append(line)
                if line.fields and line.fields["event"] == "end of test":
                    return

    def __enter__(self) -> Following:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.thread.join(20)
        assert not self.thread.is_alive()

    def saw(self, text: str) -> None:
        wait_until(lambda: text in texts(self.lines), 30)


def test_following_goes_on_through_rotation_and_a_log_that_comes_late(place: Place) -> None:
    place.write("a", said(1, "before"))
    with Following(place) as following:
        following.saw("a before")
        following.saw("b it has no log yet; waiting for one")
        place.log("a").rename(place.log("a").with_name("a.log.1"))
        place.write("a", said(2, "after"))
        following.saw("a after")
        place.write("b", said(3, "late"))
        following.saw("b late")
        place.write("a", said(9, "end of test"))
    assert texts([line for line in following.lines if not line.notice]) == [
        "a before",
        "a after",
        "b late",
        "a end of test",
    ]


def test_lines_that_come_together_are_put_in_order(place: Place) -> None:
    place.write("a", said(1, "one"), said(4, "four"))
    place.write("b", said(2, "two"), said(3, "three"))
    with Following(place) as following:
        following.saw("a four")
        place.write("a", said(9, "end of test"))
    assert texts(following.lines)[:4] == ["a one", "b two", "b three", "a four"]


class Breaking(LocalMachine):
    """A machine whose first connection is lost after some lines."""

    broken: ClassVar[set[str]] = set()

    def run(self, argv: Sequence[str], *, on_line: Any = None, **options: Any) -> CommandResult:
        if self.name in self.broken:
            return super().run(argv, on_line=on_line, **options)
        self.broken.add(self.name)
        for text in Path(argv[0]).read_text().splitlines()[:2]:
            on_line(text)
        raise HostUnreachable(f"{self.name}: connection lost")


def test_a_lost_connection_is_reported_and_no_line_is_lost_or_doubled(place: Place) -> None:
    Breaking.broken = set()
    place.write("a", said(1, "one"), said(2, "two"), said(2, "also two"), said(3, "three"))
    with Following(replace_hosts(place, "a"), connect=lambda host: Breaking(host.name)) as following:
        following.saw("a three")
        place.write("a", said(9, "end of test"))
    shown = texts(following.lines)
    assert shown == ["a one", "a two", "a a: connection lost; trying again", "a also two", "a three", "a end of test"]


def test_what_was_written_while_the_link_was_down_is_not_lost_either(place: Place) -> None:
    Breaking.broken = set()
    place.write("a", *(said(number, f"e{number}") for number in range(1, 9)))
    with Following(replace_hosts(place, "a"), connect=lambda host: Breaking(host.name), lines=2) as following:
        following.saw("a e8")
        place.write("a", said(9, "end of test"))
    numbered = [text for text in texts(following.lines) if text.startswith("a e")]
    assert numbered == [*(f"a e{number}" for number in range(1, 9)), "a end of test"]


def replace_hosts(place: Place, *names: str) -> Place:
    place.hosts = [host for host in place.hosts if host.name in names]
    return place


def test_closing_ends_what_follows(place: Place) -> None:
    place.write("a", said(1, "one"))
    place.write("b", said(2, "two"))
    lines = follow(place.hosts, place.state, 10)
    assert texts([next(lines)]) == ["a one"]
    lines.close()
    log = str(place.log("a"))

    def tails() -> bool:
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    found.append((folder / "cmdline").read_bytes().decode())
                except (FileNotFoundError, ProcessLookupError):
                    continue
        return any("tail" in line and log in line for line in found)

    wait_until(lambda: not tails())


def test_a_deployed_hosts_log_is_where_deploying_puts_it(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    far: Host = replace(place.hosts[0], connector="ssh")
    log = tmp_path / ".disagg/hosts/a/logs/server.log"
    log.parent.mkdir(parents=True)
    log.write_text(said(1, "there") + "\n")
    lines, _ = read([far], place.state, 5, connect=lambda host: LocalMachine(host.name))
    assert texts(lines) == ["a there"]
    assert time.time() > lines[0].time > 0 and os.environ["HOME"] == str(tmp_path)


def test_the_log_of_one_model_is_that_of_its_process(place: Place) -> None:
    served = replace(place.hosts[0], name="a/org/m", model="org/m", keeper="a")
    log = place.state.folder / "a" / "logs" / "models" / "org%2Fm.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"{said(1, 'loading')}\n")
    lines, errors = read([served], place.state, 100)
    assert (texts(lines), errors) == (["a/org/m loading"], [])
