"""What the hosts of one machine know of each other's memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from disagg.api.keeper import MemoryClaim
from disagg.ledger import Ledger

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
