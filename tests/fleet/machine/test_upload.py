"""Uploads that go on where they broke off, on a real file system; their pace as a line."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from threading import Event

import pytest

from disagg.errors import Cancelled, CommandFailed, FleetError
from disagg.fleet.machine import upload
from disagg.fleet.machine.interruption import interrupted_by
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import Invocation, Payload
from disagg.fleet.machine.upload import LargeFile, MovedBytes, UploadPace, arrived, line, put_tree


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big.whl"
    path.write_bytes(os.urandom(upload.RESUMED_FROM + 12_345))
    path.chmod(0o755)
    return path


def put(files: dict[str, bytes | Path]) -> tuple[int, list[tuple[int, int]]]:
    """Bytes sent, and what was reported."""
    moved: list[tuple[int, int]] = []
    sent = put_tree(
        LocalMachine("spark"),
        files,
        "~/tree",
        parts="~/parts",
        on_moved=lambda so_far, total, sent: moved.append((so_far, total)),
    )
    return sent, moved


def test_a_large_file_arrives_beside_the_small_ones_and_its_bytes_are_reported(home: Path, big: Path) -> None:
    sent, moved = put({"a.txt": b"small", "deep/er/big.whl": big})
    arrived = home / "tree/deep/er/big.whl"
    assert arrived.read_bytes() == big.read_bytes() and arrived.stat().st_mode & 0o777 == 0o755
    assert (home / "tree/a.txt").read_bytes() == b"small"
    assert moved[-1] == (moved[-1][1], moved[-1][1]) and sent == moved[-1][1] > big.stat().st_size
    assert [so_far for so_far, _ in moved] == sorted(so_far for so_far, _ in moved)


def test_an_upload_that_broke_off_goes_on_where_it_stopped(home: Path, big: Path) -> None:
    stop = Event()
    with interrupted_by(stop), pytest.raises(Cancelled):
        put_tree(
            LocalMachine("spark"),
            {"big.whl": big, "a.txt": b"small"},
            "~/tree",
            parts="~/parts",
            on_moved=lambda moved, total, sent: stop.set(),
        )
    assert not (home / "tree").exists()
    part = home / "parts" / LargeFile.of("big.whl", big).part
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(big.read_bytes()[: 3 << 20])  # wherever it stopped
    sent, moved = put({"big.whl": big, "a.txt": b"small"})
    assert sent < big.stat().st_size - (2 << 20) and moved[0][0] == 3 << 20
    assert (home / "tree/big.whl").read_bytes() == big.read_bytes()


def test_a_part_that_is_not_of_this_file_is_not_taken_for_it(home: Path, big: Path) -> None:
    part = home / "parts" / LargeFile.of("big.whl", big).part
    part.parent.mkdir()
    part.write_bytes(b"x" * 4096)
    with pytest.raises(CommandFailed, match=r"big\.whl: what arrived is not what was sent"):
        put({"big.whl": big})
    assert not part.exists() and not (home / "tree").exists()
    put({"big.whl": big})
    assert (home / "tree/big.whl").read_bytes() == big.read_bytes()


def test_the_time_of_an_upload_begins_anew_with_every_piece_that_is_taken() -> None:
    payload = Payload(io.BytesIO(b"x"))
    upload, command = (Invocation(b"", 60.0, one) for one in (payload, None))
    payload.at = 500.0
    assert (upload.due(100.0), command.due(100.0)) == (560.0, 160.0)
    payload.read(1)
    assert upload.due(100.0) == payload.at + 60.0 != 560.0


def test_a_file_that_cannot_be_read_to_its_end_ends_the_upload_with_that_reason(
    home: Path, big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(io.BytesIO):
        """A file on a disk that fails after the first piece."""

        def read(self, count: int | None = -1, /) -> bytes:
            if self.tell():
                raise OSError(errno.EIO, "Input/output error")
            return super().read(count)

    with monkeypatch.context() as broken, pytest.raises(FleetError, match=f"cannot read {big}: Input/output error"):
        broken.setattr(upload, "Payload", lambda stream, on_read: Payload(Failing(stream.read()), on_read))
        put({"big.whl": big})
    assert not (home / "tree").exists()
    put({"big.whl": big})
    assert (home / "tree/big.whl").read_bytes() == big.read_bytes()


def test_a_report_that_fails_ends_the_upload_with_that_error(home: Path, big: Path) -> None:
    def report(moved: int, total: int, sent: int) -> None:
        raise RuntimeError("the terminal is gone")

    with pytest.raises(RuntimeError, match="the terminal is gone"):
        put_tree(LocalMachine("spark"), {"big.whl": big}, "~/tree", parts="~/parts", on_moved=report)
    assert not (home / "tree").exists()


def test_a_changed_file_has_another_part(big: Path) -> None:
    before = LargeFile.of("big.whl", big)
    assert LargeFile.of("big.whl", big) == before
    os.utime(big, ns=(1, 1))
    assert LargeFile.of("big.whl", big).part != before.part


@pytest.mark.parametrize(
    ("output", "size"), [("", 0), ("{part} 5", 5), ("{part} 99", 0), ("other 5", 0), ("{part} x", 0)]
)
def test_only_whole_lines_of_plausible_sizes_count(tmp_path: Path, output: str, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    file = LargeFile.of("file", path)
    assert arrived(output.format(part=file.part), [file]) == {file.part: size}


@pytest.mark.parametrize(
    ("moved", "rate", "shown"),
    [
        (12_000_000, 0.0, "12 of 242 MB"),
        (12_000_000, 1_150_000.0, "12 of 242 MB, 1.1 MB/s, 3 min left"),
        (200_000_000, 1_000_000.0, "200 of 242 MB, 1.0 MB/s, 42 s left"),
        (0, 10_000.0, "0 of 242 MB, 0.0 MB/s, 6.7 h left"),
    ],
)
def test_the_time_that_is_left_is_shown(moved: int, rate: float, shown: str) -> None:
    assert line(moved, 242_000_000, rate) == shown


def test_the_rate_is_that_of_the_last_seconds() -> None:
    lines, now = list[str](), [0.0]
    pace = UploadPace(lines.append, lambda: now[0])
    for second, moved in ((0.0, 0), (0.5, 10), (10.0, 50_000_000), (20.0, 60_000_000), (30.0, 70_000_000)):
        now[0] = second
        pace.moved(moved, 100_000_000, moved)
    assert lines[-1] == "70 of 100 MB, 1.0 MB/s, 30 s left" and len(lines) == 3


def test_bytes_that_were_there_already_do_not_count_for_the_rate() -> None:
    lines, now = list[str](), [0.0]
    pace = UploadPace(lines.append, lambda: now[0])
    moved = MovedBytes(100_000_000, pace.moved)
    moved.add(1)
    now[0] = 1.0
    moved.found(48_999_999)
    now[0] = 10.0
    moved.add(10_000_000)
    assert lines[-1] == "59 of 100 MB, 1.0 MB/s, 41 s left"
