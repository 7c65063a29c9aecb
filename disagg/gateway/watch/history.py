"""The file of finished requests: one SQLite table, in write-ahead mode, so that it can be read while it is written."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from disagg.api.base import InvalidValue
from disagg.api.gateway import MAX_ENTRIES, EntryState, HistoryEntry
from disagg.config import Fleet
from disagg.errors import DisaggError
from disagg.token import gateway_folder

VERSION: Final = 1
BUSY_S: Final = 2.0  # for another gateway or a reader of the same file

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS answers (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    time REAL NOT NULL,
    model TEXT NOT NULL,
    state TEXT NOT NULL,
    entry TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS answers_by_time ON answers (time);
"""
_KEY_ID: Final = "CASE WHEN json_valid(entry) THEN json_extract(entry, '$.key_id') END"
_INDEX: Final = f"CREATE INDEX IF NOT EXISTS answers_by_key ON answers ({_KEY_ID})"
"""So that a key with few entries does not make the gateway read those of all others."""


CACHE_KIB: Final = 256
"""The pages of the file in memory. The writer only appends and removes the oldest: SQLite's own 2,000 KiB would fill up
in the first 1,300 requests for nothing."""


@dataclass(frozen=True, slots=True)
class HistoryBounds:
    """How much is kept: entries of at most this age in seconds, at most so many of them, and in so many bytes."""

    age_s: float = 30 * 86400.0
    rows: int = 100_000
    size: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Filter:
    """Which entries to read, newest first. models: None for all. since: seconds since 1970. before: an id. key_id: of
    this key only; None for all."""

    models: tuple[str, ...] | None = None
    state: EntryState | None = None
    since: float | None = None
    before: int | None = None
    limit: int = 100
    key_id: str | None = None


def history_path(fleet: Fleet) -> Path:
    """The file of this fleet's history on this machine."""
    return gateway_folder(fleet) / "history.db"


class Store:
    """The writer's side. Use it from one thread. Its methods raise sqlite3.Error and OSError."""

    def __init__(self, path: Path, bounds: HistoryBounds) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite's own files take its mode
        self._bounds = bounds
        self._connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        try:
            self._prepare()
        except BaseException:  # nobody gets this store, to close it
            self._connection.close()
            raise

    def _prepare(self) -> None:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise sqlite3.DatabaseError(f"it was written by another version of disagg (format {version})")
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        self._connection.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing
        self._connection.executescript(_TABLE)
        self._connection.execute(_INDEX)
        self._connection.execute(f"PRAGMA user_version = {VERSION}")

    def append(self, entries: Sequence[HistoryEntry]) -> None:
        """Write these entries; when this returns, they survive the end of the process."""
        rows = [(one.time, one.model, one.state, one.to_bytes().decode()) for one in entries]
        with self._transaction() as connection:
            connection.executemany("INSERT INTO answers (time, model, state, entry) VALUES (?, ?, ?, ?)", rows)

    def prune(self, now: float) -> None:
        """Remove what is too old or too much. now: seconds since 1970."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM answers WHERE time < ?", (now - self._bounds.age_s,))
            connection.execute(
                "DELETE FROM answers WHERE id <= (SELECT id FROM answers ORDER BY id DESC LIMIT 1 OFFSET ?)",
                (self._bounds.rows,),
            )
            while self._size(connection) > self._bounds.size:
                removed = connection.execute(
                    "DELETE FROM answers WHERE id IN (SELECT id FROM answers ORDER BY id LIMIT "
                    "(SELECT 1 + count(*) / 20 FROM answers))"
                )
                if not removed.rowcount:
                    return

    def close(self) -> None:
        self._connection.close()

    @staticmethod
    def _size(connection: sqlite3.Connection) -> int:
        """Bytes of the pages in use: the file itself never shrinks, it uses free pages again."""
        pages, free, page = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        return int(page * (pages - free))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:  # also an interruption: the next one must find no open transaction
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise


def read(
    path: Path,
    wanted: Filter,
    shown: Callable[[HistoryEntry], HistoryEntry] = lambda entry: entry,
    size: int | None = None,
) -> tuple[HistoryEntry, ...]:
    """The entries as `shown` makes them, newest first; none if there is no file. Raises DisaggError if it cannot be
    read. size: no further entry is read once these have so many bytes."""
    if not path.exists():
        return ()
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)) as connection:
            entries: list[HistoryEntry] = []
            for number, text in connection.execute(*_query(wanted)):
                entries.append(shown(_entry(number, text)))
                if size is not None and (size := size - len(entries[-1].to_bytes())) <= 0:
                    break
        return tuple(entries)
    except (sqlite3.Error, InvalidValue) as error:
        raise DisaggError(
            f"cannot read the history in {path}: {error}", "remove the file to begin a new one"
        ) from error


def _query(wanted: Filter) -> tuple[str, list[object]]:
    conditions: list[str] = []
    values: list[object] = []
    for condition, value in (
        ("state = ?", wanted.state),
        ("time >= ?", wanted.since),
        ("id < ?", wanted.before),
        (f"{_KEY_ID} = ?", wanted.key_id),
    ):
        if value is not None:
            conditions.append(condition)
            values.append(value)
    if wanted.models is not None:
        conditions.append(f"model IN ({', '.join('?' for _ in wanted.models)})")
        values.extend(wanted.models)
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    values.append(min(wanted.limit, MAX_ENTRIES))
    return f"SELECT id, entry FROM answers{where} ORDER BY id DESC LIMIT ?", values


def _entry(number: int, text: str) -> HistoryEntry:
    return msgspec.structs.replace(HistoryEntry.from_bytes(text.encode()), id=number)
