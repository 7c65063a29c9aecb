"""Keys as a terminal sends them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from disagg.cli.chat import editor
from disagg.cli.chat.editor import Editor, Recall


async def typed(keys: str, history: InMemoryHistory | None = None) -> str:
    """What the editor returns for these keys."""
    with create_pipe_input() as pipe:
        editor = Editor(history or InMemoryHistory(), lambda: ("qwen",), pipe, DummyOutput())
        pipe.send_text(keys)
        async with asyncio.timeout(30):
            return await editor.read()


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("hello\r", "hello"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ('"""one\rtwo\rthree"""\r', '"""one\ntwo\nthree"""'),
        ("\x1b[200~one\ntwo\x1b[201~\r", "one\ntwo"),
    ],
)
async def test_enter_sends_and_other_lines_are_begun_by_alt_enter_quotes_or_a_paste(keys: str, text: str) -> None:
    assert await typed(keys) == text


async def test_ctrl_c_and_ctrl_d_leave_the_line() -> None:
    with pytest.raises(KeyboardInterrupt):
        await typed("begun\x03")
    with pytest.raises(EOFError):
        await typed("\x04")


async def test_the_last_line_is_one_key_away() -> None:
    history = InMemoryHistory()
    history.append_string("earlier")
    assert await typed("\x1b[A\r", history) == "earlier"


def lines(path: Path) -> list[str]:
    return list(Recall(path).load_history_strings())


def test_lines_are_kept_in_a_private_file_the_newest_first(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history"
    Recall(path).store_string("one")
    Recall(path).store_string('two\nlines "quoted"')
    assert lines(path) == ['two\nlines "quoted"', "one"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(editor, "KEPT", 3)
    path = tmp_path / "history"
    kept = Recall(path)
    for number in range(7):
        kept.store_string(str(number))
    kept.store_string("x" * (editor.MAX_LINE + 1))
    assert lines(path) == ["6", "5", "4"]
    assert len(path.read_text().splitlines()) == 3


def test_a_file_that_cannot_be_used_keeps_nothing_and_fails_nothing(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_bytes(b'not json\n"good"\n\xff\n7\n')
    assert lines(path) == ["good"]
    folder = tmp_path / "folder"
    folder.mkdir()
    Recall(folder).store_string("x")
    assert lines(folder) == [] and not list(folder.iterdir())
