"""What the hosts of one machine know of each other's memory."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from disagg.api.keeper import MemoryClaim
from disagg.config import EngineOptions, Host, Model
from disagg.ledger import MAX_NEED, Ledger, MachineRoom, needed
from tests.planning.test_checkpoint import LLAMA

CLAIM = MemoryClaim(host="h", model="m", nbytes=5)


def test_a_claim_is_seen_by_others_until_it_is_released(tmp_path: Path) -> None:
    mine, theirs = Ledger(tmp_path), Ledger(tmp_path)
    claimed = mine.claim(CLAIM)
    assert (mine.others(), theirs.others()) == ([], [CLAIM])
    longer = MemoryClaim(host="h", model="a longer name", nbytes=7)
    claimed.update(longer)
    assert theirs.others() == [longer]
    claimed.update(CLAIM)
    assert theirs.others() == [CLAIM]
    claimed.release()
    assert theirs.others() == []


def claim_in(folder: Path, connection: Connection) -> None:
    Ledger(folder).claim(CLAIM)
    connection.send(os.getpid())
    signal.pause()


def test_the_claim_of_a_process_that_was_killed_counts_no_more(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=claim_in, args=(tmp_path, theirs))
    process.start()
    ours.recv()
    ledger = Ledger(tmp_path)
    assert ledger.others() == [CLAIM]
    process.kill()
    process.join()
    assert ledger.others() == []
    assert [path.name for path in tmp_path.iterdir()] == []


def test_one_decides_at_a_time(tmp_path: Path) -> None:
    with Ledger(tmp_path).locked() as first:
        assert first
        with Ledger(tmp_path).locked() as second:
            assert not second
    with Ledger(tmp_path).locked() as again:
        assert again


def test_a_folder_that_cannot_be_used_is_reported_and_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    ledger = Ledger(tmp_path / "file" / "memory")
    with ledger.locked() as ours:
        assert ours
        ledger.claim(CLAIM).update(CLAIM)
    assert ledger.others() == []
    assert "memory_not_recorded" in caplog.text


def test_what_is_no_claim_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "1-2.json").write_text("")
    (tmp_path / "1-3.json").mkdir()
    assert Ledger(tmp_path).others() == []


def test_files_that_are_no_claims_count_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "text.json").write_text("no claim")
    with (tmp_path / "locked.json").open("w") as locked:
        locked.write("no claim")
        locked.flush()
        fcntl.flock(locked, fcntl.LOCK_EX)
        theirs = Ledger(tmp_path).claim(CLAIM)
        assert Ledger(tmp_path).others() == [CLAIM]
        theirs.release()


@pytest.mark.parametrize("vocabulary", [10**30, -(10**30)])
def test_a_config_that_states_what_no_machine_has_is_a_need_that_can_be_stated(tmp_path: Path, vocabulary: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": vocabulary}))
    host = Host("h", "127.0.0.1", ("decode",), "m", EngineOptions("mlx"), 9)
    need = needed(host, Model("m", {}, 4096), MachineRoom(1 << 40), tmp_path)
    assert need == (MAX_NEED if vocabulary > 0 else 0)
    assert MemoryClaim.from_bytes(MemoryClaim(host="h", nbytes=need).to_bytes()).nbytes == need
