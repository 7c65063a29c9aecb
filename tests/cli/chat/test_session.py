"""Turns and commands of a conversation, with a client and a person made up by the test."""

from __future__ import annotations

import asyncio
import functools
import io
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from disagg.cli.chat.conversation import Conversation, Turn
from disagg.cli.chat.session import Session
from disagg.cli.chat.view import ChatView
from disagg.config import Fleet, Model
from disagg.errors import ContextLengthExceeded, ServerUnavailable
from disagg.inference.client import AsyncClient
from disagg.inference.stream import AsyncStream
from disagg.inference.types import Chunk, Completion
from tests.cli.answers import completion
from tests.cli.commandline import run, write_fleet
from tests.values import no_space

Step = str | Exception | Callable[[], None]
"""What an answer does next: text, an error, or something that the test does meanwhile."""


class Answers:
    """A client: each request is answered by the next of these answers, and noted."""

    def __init__(self, *answers: list[Step]) -> None:
        models = [Model("qwen", {}, 4096, ("q",)), Model("other", {}, 2048)]
        self.fleet = Fleet("test", Path("hosts.toml"), {model.name: model for model in models}, {})
        self._answers = list(answers)
        self.requests: list[dict[str, Any]] = []

    def stream(self, model: str, **options: Any) -> AsyncStream:
        self.requests.append({"model": model, **options})
        return AsyncStream(functools.partial(self._answer, self._answers.pop(0)))

    async def _answer(self, steps: list[Step], deliver: Callable[[Chunk], None]) -> Completion:
        texts = []
        for step in steps:
            await asyncio.sleep(0)
            if isinstance(step, Exception):
                raise step
            if isinstance(step, str):
                texts.append(step)
                deliver(Chunk(step, ()))
                await asyncio.sleep(0.01)
            else:
                step()
                await asyncio.sleep(60)
        return completion("qwen", text="".join(texts), held_tokens=5)


def reading(*typed: str | type[BaseException]) -> Callable[[], Awaitable[str]]:
    """A person who types these, and Ctrl-D."""
    left = iter([*typed, EOFError])

    async def read() -> str:
        one = next(left)
        if isinstance(one, str):
            return one
        raise one

    return read


async def talk(client: Answers, *typed: str | type[BaseException]) -> tuple[Session, str]:
    """The session after this, and what the terminal has."""
    console = Console(file=(file := io.StringIO()), width=100)
    view = ChatView(console, console, plain=False)
    session = Session(cast(AsyncClient, client), Conversation("qwen"), {"max_tokens": 9}, view)
    async with asyncio.timeout(30):
        await session.run(reading(*typed))
    return session, file.getvalue()


async def test_every_turn_sends_the_conversation_so_far() -> None:
    client = Answers(["Hi."], ["Yes."])
    session, screen = await talk(client, "hello", "", '"""are\nyou?"""')
    assert session.conversation.turns == (Turn("hello", "Hi."), Turn("are\nyou?", "Yes."))
    assert [message["content"] for message in client.requests[1]["messages"]] == ["hello", "Hi.", "are\nyou?"]
    assert client.requests[1]["max_tokens"] == 9
    assert "Hi." in screen and "7 prompt tokens, 5 held; TTFT" in screen


async def test_ctrl_c_stops_the_answer_and_not_the_conversation() -> None:
    interrupt = functools.partial(os.kill, os.getpid(), signal.SIGINT)
    client = Answers(["One, ", "two", interrupt], ["Three."])
    session, screen = await talk(client, "count", "go on")
    assert session.conversation.turns == (Turn("count", "One, two", cut=True), Turn("go on", "Three."))
    assert "not complete" in screen
    assert client.requests[1]["messages"][1] == {"role": "assistant", "content": "One, two"}


async def test_the_figures_of_an_answer_are_not_shown_for_the_one_that_was_stopped_after_it() -> None:
    interrupt = functools.partial(os.kill, os.getpid(), signal.SIGINT)
    _, screen = await talk(Answers(["Hi."], ["One, ", interrupt]), "hello", "count", "/stats")
    assert "2 turns; the last answer is not complete" in screen and "exposed transfer" not in screen


async def test_ctrl_c_at_the_prompt_says_how_to_leave() -> None:
    _, screen = await talk(Answers(["Hi."]), KeyboardInterrupt, "hello")
    assert "Ctrl-D leaves." in screen and "Hi." in screen


@pytest.mark.usefixtures("a_hangup_ends_programs")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_that_ends_programs_ends_the_conversation_in_an_answer_too(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    client = Answers(["One, ", functools.partial(os.kill, os.getpid(), number)])
    with pytest.raises(SystemExit) as ended:
        await talk(client, "count", "never sent")
    assert ended.value.code == 128 + number
    assert len(client.requests) == 1 and signal.getsignal(number) == before


async def test_an_error_is_a_line_and_the_message_can_be_sent_again() -> None:
    client = Answers([ServerUnavailable("no host is up", "disagg start")], ["cut", ServerUnavailable("lost")], ["Hi."])
    session, screen = await talk(client, "hello", "hello", "hello")
    assert session.conversation.turns == (Turn("hello", "cut", cut=True), Turn("hello", "Hi."))
    assert "error: no host is up (disagg start)" in screen and "error: lost" in screen


async def test_a_context_that_is_too_small_says_what_to_do() -> None:
    _, screen = await talk(Answers([ContextLengthExceeded("5000 tokens are over 4096", "shorten the prompt")]), "hello")
    assert "/clear begins a new conversation" in screen and "shorten the prompt" not in screen


async def test_a_command_changes_what_is_sent() -> None:
    client = Answers(["a"], ["b"])
    session, _ = await talk(
        client, "/system Be brief.", "/model other", "hello", "/clear", "/system -", "/model q", "x"
    )
    assert client.requests[0]["model"] == "other"
    assert client.requests[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert client.requests[1]["model"] == "qwen"
    assert client.requests[1]["messages"] == [{"role": "user", "content": "x"}]
    assert len(session.conversation.turns) == 1


async def test_commands_show_the_list_the_models_and_the_figures() -> None:
    _, screen = await talk(Answers(["Hi."]), "/help", "/stats", "/model", "/system", "hello", "/stats", "/nosuch")
    assert "/save FILE" in screen and "qwen, q  answers" in screen and "No system message." in screen
    assert "0 turns" in screen and "1 turn\n" in screen and "exposed transfer" in screen
    assert "there is no command /nosuch" in screen


async def test_exit_leaves() -> None:
    client = Answers()
    await talk(client, "/exit", "never sent")
    assert not client.requests


async def test_a_conversation_is_saved_privately_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    await talk(Answers(["Hi."]), "hello", f"/save {path}")
    assert path.stat().st_mode & 0o777 == 0o600
    client = Answers(["Yes."])
    session, screen = await talk(client, f"/load {path}", "again")
    assert [turn.message for turn in session.conversation.turns] == ["hello", "again"]
    assert "1 turn with qwen" in screen


async def test_a_save_that_fails_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "talk.json"
    path.write_text("earlier")
    path.chmod(0o644)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        _, screen = await talk(Answers(), f"/save {path}")
    assert "No space left" in " ".join(screen.split()) and path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]
    await talk(Answers(), f"/save {path}")
    assert '"qwen"' in path.read_text() and path.stat().st_mode & 0o777 == 0o600


async def test_what_is_no_regular_file_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    _, screen = await talk(Answers(), f"/save {path}", f"/load {path}")
    assert " ".join(screen.split()).count("not a regular file") == 2 and path.is_fifo()


async def test_a_file_that_is_no_conversation_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("{}")
    (tmp_path / "gone").write_text('{"model": "gone"}')
    wrong = [f"/load {tmp_path}/{name}" for name in ("none", "bad", "gone")]
    session, screen = await talk(Answers(), *wrong, f"/save {tmp_path}/no/x", "/save ~nobody-here/x")
    assert session.conversation == Conversation("qwen")
    flat = "".join(screen.split())  # the paths are long, so a line may break in any place
    assert all(text in flat for text in ("cannotread", "isnoconversation", "gone", "cannotwrite", "nohomefolder"))


def test_a_pipe_is_one_message_and_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from disagg.inference import client
    from tests.cli.answers import TEXT, FakeClient

    class Fleeted(FakeClient):
        def __init__(self, fleet: Any, *, token: Any = None) -> None:
            super().__init__(fleet, token=token)
            self.fleet = fleet

    FakeClient.requests.clear()
    monkeypatch.setattr(client, "AsyncClient", Fleeted)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    assert run("--config", write_fleet(tmp_path), "chat", "--system", "s", "--top-k", "4", "--max-tokens", "7") == 0
    out, err = capsys.readouterr()
    assert out == TEXT and "7 prompt tokens; TTFT" in err
    (request,) = FakeClient.requests
    assert request["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "hello\n"}]
    assert (request["top_k"], request["max_tokens"], request["fit_context"]) == (4, 7, True)


def test_the_hint_for_an_empty_pipe_is_a_command_of_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert run("--config", write_fleet(tmp_path), "chat", "-m", "tiny") == 2
    assert "disagg chat -m tiny" in capsys.readouterr().err
