from __future__ import annotations

import os
import secrets
import socket
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.config import Fleet
from disagg.errors import ConfigError, FleetError
from disagg.fleet.lifecycle.state import ProcessRecord, State, started_elsewhere
from disagg.fleet.machine import process as local
from disagg.token import TOKEN_FILE_VARIABLE
from tests.fleet.yards import make_fleet
from tests.values import no_space


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return make_fleet(tmp_path)


def test_the_folder_is_private_and_the_token_is_made_once(fleet: Fleet, tmp_path: Path) -> None:
    state = State.of(fleet, tmp_path / "state")
    state.prepare(fleet)
    token = state.tokens.current
    state.prepare(fleet)
    assert len(token) == 64 and state.tokens.current == token
    assert (mode(state.folder), mode(state.tokens.path)) == (0o700, 0o600)
    assert [path.name for path in state.folder.iterdir()] == ["path"]


def test_of_two_first_commands_at_once_both_have_the_token_that_was_made_first(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State.of(fleet, tmp_path / "state")

    def make_while_another_does(size: int) -> str:
        monkeypatch.undo()
        assert state.tokens.ensure()[0] == state.tokens.current
        return "f" * 2 * size

    monkeypatch.setattr(secrets, "token_hex", make_while_another_does)
    assert state.tokens.ensure()[0] == state.tokens.current != "f" * 64
    assert [path.name for path in state.tokens.path.parent.iterdir()] == ["token"]


def test_the_token_follows_the_fleets_name_and_not_the_path_of_its_file(fleet: Fleet, tmp_path: Path) -> None:
    state = State.of(fleet, tmp_path / "state")
    clone = State.of(replace(fleet, path=tmp_path / "clone/hosts.toml"), tmp_path / "state")
    assert clone.tokens.ensure()[0] == state.tokens.ensure()[0] and clone.folder != state.folder
    clone.tokens.adopt(("the-token-of-the-hosts",))
    assert state.tokens.current == "the-token-of-the-hosts" and mode(state.tokens.path) == 0o600
    other = State.of(replace(fleet, name="other"), tmp_path / "state")
    assert other.tokens.ensure()[0] != state.tokens.current


def test_a_token_that_an_earlier_version_made_is_used_on(fleet: Fleet, tmp_path: Path) -> None:
    earlier = State.of(fleet, tmp_path / "state").folder / "token"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("made-by-an-earlier-version\n")
    earlier.chmod(0o600)
    assert State.of(fleet, tmp_path / "state").tokens.ensure()[0] == "made-by-an-earlier-version"


def test_a_second_clone_takes_the_token_that_an_earlier_version_made_unless_there_are_several(
    fleet: Fleet, tmp_path: Path
) -> None:
    first = State.of(fleet, tmp_path / "state").folder
    clone = State.of(replace(fleet, path=tmp_path / "clone/hosts.toml"), tmp_path / "state")
    for folder in (first, first.with_name(f"{fleet.name}-2-{'b' * 8}")):  # the second is of another fleet
        folder.mkdir(parents=True)
        (folder / "token").write_text(f"made-by-an-earlier-version-in-{folder.name}\n")
        (folder / "token").chmod(0o600)
    assert (
        clone.tokens.ensure()[0] == f"made-by-an-earlier-version-in-{first.name}" and mode(clone.tokens.path) == 0o600
    )
    clone.tokens.path.unlink()
    first.with_name(f"{fleet.name}-2-{'b' * 8}").rename(first.with_name(f"{fleet.name}-{'b' * 8}"))
    assert "earlier" not in clone.tokens.ensure()[0]


@pytest.mark.parametrize("by", ["setting", "variable"])
def test_a_named_token_file_beside_the_made_ones_is_not_made_either(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    named = tmp_path / "disagg" / "shared" / "token"
    if by == "variable":
        monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(named))
    state = State.of(fleet if by == "variable" else replace(fleet, token_file=named))
    with pytest.raises(ConfigError, match="cannot read the fleet token"):
        state.tokens.ensure()[0]
    assert not named.exists()


def test_the_folder_follows_xdg_state_home_and_differs_per_file(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    one, two = State.of(fleet), State.of(replace(fleet, path=tmp_path / "other.toml"))
    assert one.folder.parent == tmp_path / "xdg" / "disagg"
    assert one.folder != two.folder and one.folder.name.startswith("test-")


def test_a_named_token_file_is_used_and_never_made(fleet: Fleet, tmp_path: Path) -> None:
    named = replace(fleet, token_file=tmp_path / "secret")
    state = State.of(named, tmp_path / "state")
    with pytest.raises(ConfigError, match=r"cannot read the fleet token from .*secret: No such file"):
        state.prepare(named)
    (tmp_path / "secret").write_text("s3cret-s3cret-s3cret-s3cret\n")
    (tmp_path / "secret").chmod(0o600)
    state.prepare(named)
    assert state.tokens.current == "s3cret-s3cret-s3cret-s3cret"


def test_a_token_that_others_can_read_or_that_is_too_short_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    named = replace(fleet, token_file=tmp_path / "secret")
    state = State.of(named, tmp_path / "state")
    (tmp_path / "secret").write_text("s3cret-s3cret-s3cret-s3cret\n")
    (tmp_path / "secret").chmod(0o644)
    with pytest.raises(ConfigError, match=r"other users have access to .*\(chmod 600 "):
        state.prepare(named)
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "secret").write_text("short\n")
    with pytest.raises(ConfigError, match="no usable token"):
        state.prepare(named)


def test_a_machine_without_a_token_has_begun_no_rotation(fleet: Fleet, tmp_path: Path) -> None:
    """Callers may have a token of their own, as benchmarks do: `status` works with it all the same."""
    state = State.of(fleet, tmp_path / "state")
    assert not state.tokens.rotating
    state.prepare(fleet)
    assert not state.tokens.rotating and state.tokens.ensure_next() and state.tokens.rotating


def test_records_survive_and_a_damaged_one_says_what_to_do(fleet: Fleet, tmp_path: Path) -> None:
    state = State.of(fleet, tmp_path / "state")
    state.prepare(fleet)
    record = ProcessRecord("a", 12, "boot:34", "digest")
    state.record(record)
    assert state.recorded("a") == record and state.recorded_hosts() == ["a"]
    (state.folder / "a.pid").write_text("{")
    with pytest.raises(FleetError, match=r"damaged.*rm "):
        state.recorded("a")
    state.drop_record("a")
    assert state.recorded("a") is None


def test_the_reason_of_a_servers_end_is_found_among_the_other_lines_of_its_log(fleet: Fleet, tmp_path: Path) -> None:
    state = State.of(fleet, tmp_path / "state")
    state.prepare(fleet)
    assert state.end_of_run("a") == ""
    lines = ['{"level": "error", "code": "PortInUse", "message": "first"}', '{"level": "error", "message": "second"}']
    state.log_file("a").write_text("\n".join(["warning: x", *lines, '{"level": "info", "message": "bye"}', "end"]))
    assert state.end_of_run("a") == "second"
    assert state.log_tail("a", 1) == ["end"]


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_no_part(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State.of(fleet, tmp_path / "state")
    state.prepare(fleet)
    before = sorted(state.folder.iterdir())
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(FleetError, match=r"cannot use .*/a\.pid: No space left on device \(free space"):
        state.record(ProcessRecord("a", 12, "boot:34", "digest"))
    assert sorted(state.folder.iterdir()) == before and state.recorded("a") is None


def test_the_lock_is_held_on_a_full_disk_too(fleet: Fleet, tmp_path: Path) -> None:
    state = State.of(fleet, tmp_path / "state")
    state.prepare(fleet)
    (state.folder / "lock").symlink_to("/dev/full")
    with state.locked("stop"):
        pass


def test_the_lock_is_given_back_though_a_child_that_was_just_forked_has_its_file_too(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while another thread starts a server, and an interruption stops it under the same lock. A copy of the
    descriptor stands for the child's."""
    state, copies, opened = State.of(fleet, tmp_path / "state"), list[int](), os.open
    state.prepare(fleet)

    def forked(*arguments: Any) -> int:
        copies.append(os.dup(descriptor := opened(*arguments)))
        return descriptor

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", forked)
        with state.locked("start"):
            pass
    with state.locked("stop"):
        pass
    for copy in copies:
        os.close(copy)
    assert copies


@pytest.mark.parametrize(
    "use",
    [
        lambda state, fleet: state.prepare(fleet),
        lambda state, fleet: state.locked("start").__enter__(),
        lambda state, fleet: state.recorded("a"),
        lambda state, fleet: state.drop_record("a"),
        lambda state, fleet: state.log_tail("a"),
    ],
)
def test_a_state_folder_that_cannot_be_used_is_named_with_a_way_out(fleet: Fleet, tmp_path: Path, use: Any) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(FleetError, match=r"cannot use .*state/test-.*XDG_STATE_HOME"):
        use(State.of(fleet, tmp_path / "state"), fleet)


def test_a_damaged_record_hides_no_other_server(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path)
    host = next(iter(fleet.hosts.values()))
    others = [State.of(replace(fleet, path=tmp_path / name / "hosts.toml"), tmp_path / "state") for name in "ab"]
    for other in others:
        other.folder.mkdir(parents=True)
    damaged, running = sorted(others, key=lambda other: other.folder)
    (damaged.folder / "x.pid").write_text("{")
    (running.folder / "a.pid").write_text("{")
    running.record(ProcessRecord("z", os.getpid(), local.identity(os.getpid()) or "", ""))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = started_elsewhere(State.of(fleet, tmp_path / "state"), host, listener.getsockname()[1])
    assert found is not None and (found.hosts_file, found.host) == (running.shown, "z")
