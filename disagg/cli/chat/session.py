"""The loop of a conversation: what is typed is a command or a message, and a message's answer is streamed."""

from __future__ import annotations

import asyncio
import signal
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from disagg.api.base import InvalidValue
from disagg.cli.chat.commands import ChatCommand, message_of, parse
from disagg.cli.chat.conversation import Conversation
from disagg.config.addresses import expanded
from disagg.errors import ContextLengthExceeded, DisaggError, UsageError
from disagg.files import replace_file

if TYPE_CHECKING:
    from disagg.cli.chat.view import ChatView
    from disagg.inference.client import AsyncClient
    from disagg.inference.types import Completion

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
_TOO_LONG: Final = "/clear begins a new conversation; /save FILE keeps this one first"
MAX_FILE: Final = 64 << 20  # bytes of a conversation's file


class Session:
    """One conversation. options: those of every request."""

    def __init__(
        self, client: AsyncClient, conversation: Conversation, options: dict[str, Any], view: ChatView
    ) -> None:
        self.conversation = conversation
        self._client, self._options, self._view = client, options, view
        self._last: Completion | None = None

    async def run(self, read: Callable[[], Awaitable[str]]) -> None:
        """Talk until Ctrl-D or /exit. read: gives what is typed next; EOFError and KeyboardInterrupt as Ctrl-D and
        Ctrl-C. SIGTERM and a closed terminal end it with SystemExit."""
        self._view.begin(self.conversation.model)
        with _ended_by_signals() as received:
            try:
                while await self._step(read):
                    pass
            except asyncio.CancelledError:
                if not received:
                    raise
        if received:
            raise SystemExit(128 + received[0])

    async def _step(self, read: Callable[[], Awaitable[str]]) -> bool:
        """Read and do one thing; False to leave."""
        try:
            text = await read()
        except EOFError:
            return False
        except KeyboardInterrupt:
            self._view.note("Ctrl-D leaves.")
            return True
        try:
            command = parse(text)
            if command is not None:
                return self._perform(command)
            if message := message_of(text):
                await self._interruptible(self.answer(message))
        except DisaggError as error:
            self._view.failed(error, _TOO_LONG if isinstance(error, ContextLengthExceeded) else error.hint)
        return True

    async def answer(self, message: str) -> None:
        """One turn: show the answer and keep it. A cancelled one is kept as far as it came. Raises a DisaggError."""
        conversation, complete = self.conversation, False
        stream = self._client.stream(conversation.model, messages=conversation.messages(message), **self._options)
        try:
            with self._view.answering() as shown:
                async with stream:
                    async for chunk in stream:
                        shown.add(chunk)
            complete = True
        finally:
            self.conversation = conversation.with_turn(message, stream.text, cut=not complete)
            if stream.text and not complete:
                self._last = None
                self._view.cut()
        self._last = stream.completion
        self._view.figures(stream.completion, self._client.fleet.model(conversation.model).context)

    async def _interruptible(self, turn: Any) -> None:
        """Run one turn, which Ctrl-C ends."""
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(turn)
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            await asyncio.wait((task,))
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            task.cancel()
            await asyncio.wait((task,))
        if not task.cancelled():
            task.result()

    def _perform(self, command: ChatCommand) -> bool:
        """Do what a command says; False to leave."""
        argument = command.argument
        match command.name:
            case "exit":
                return False
            case "help":
                self._view.help()
            case "model":
                self._model(argument)
            case "system":
                self._system(argument)
            case "stats":
                self._view.stats(self._last, self.conversation)
            case "clear":
                self.conversation = replace(self.conversation, turns=())
                self._view.note("A new conversation.")
            case "save":
                _write(expanded(argument), self.conversation)
                self._view.note(f"Saved to {argument}.")
            case "load":
                self._load(expanded(argument))
        return True

    def _model(self, name: str) -> None:
        if name:
            self.conversation = replace(self.conversation, model=self._client.fleet.model(name).name)
        self._view.models(self._client.fleet.models.values(), self.conversation.model)

    def _system(self, text: str) -> None:
        if text:
            self.conversation = replace(self.conversation, system="" if text == "-" else text)
        self._view.note(f"system: {self.conversation.system}" if self.conversation.system else "No system message.")

    def _load(self, path: Path) -> None:
        loaded = _read(path)
        self._client.fleet.model(loaded.model)
        self.conversation, self._last = loaded, None
        self._view.loaded(loaded)


@contextmanager
def _ended_by_signals() -> Iterator[list[int]]:
    """Within the block, SIGTERM and SIGHUP cancel this task; their numbers are in the list. One that is ignored, as
    SIGHUP under nohup, stays ignored."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        task.cancel()

    before = {number: signal.getsignal(number) for number in _ENDING}
    handled = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in handled:
        loop.add_signal_handler(number, end, number)
    try:
        yield received
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


def _write(path: Path, conversation: Conversation) -> None:
    """Raises UsageError if the file cannot be written."""
    text = msgspec.json.format(conversation.to_bytes(), indent=2)
    try:
        replace_file(path, text + b"\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _read(path: Path) -> Conversation:
    """Raises UsageError if the file cannot be read or is no conversation."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{path} is not a regular file")
        if found.st_size > MAX_FILE:
            raise UsageError(f"{path} is over {MAX_FILE >> 20} MiB")
        return Conversation.from_bytes(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except InvalidValue as error:
        raise UsageError(f"{path} is no conversation of /save: {error}") from error
