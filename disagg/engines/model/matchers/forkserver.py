"""The program that forks a process for each form that answers must have, and ends it for its time or its memory.

    python -m disagg.engines.model.matchers.forkserver CONTROL_FD SETTINGS_FD

It has one thread, so that it may fork, and does nothing that takes long. It ends with the server: at the end of its
control connection it ends all processes and itself.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NoReturn

import psutil

from disagg.engines.model.matchers import wire
from disagg.engines.model.matchers.limits import FormLimits, Reason
from disagg.engines.model.matchers.process import OUT_OF_MEMORY, FormProcess, State, Vocabulary, run_limited
from disagg.engines.model.matchers.wire import Attach, Reply, anonymous_file, receive_notes

MAX_REFUSED: Final = 256
"""Forms of which it is remembered that they were too much."""
_FILES: Final = 4096


def write_settings(tokenizer: str, vocab_size: int, eos_ids: list[int], limits: FormLimits) -> int:
    """A file of what a fork server begins with."""
    head = json.dumps({"vocab_size": vocab_size, "eos_ids": eos_ids, "limits": asdict(limits)})
    fd = anonymous_file("disagg-tokenizer")
    with open(os.dup(fd), "wb") as file:  # noqa: PTH123 - a descriptor, not a path
        file.write(f"{head}\n{tokenizer}".encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


@dataclass(slots=True, eq=False)
class WaitingAnswer:
    """An answer that is attached, or is to be. sock: the process's end of its socket, to say why it is not served."""

    attach: Attach
    sock: socket.socket
    region: int

    def refuse(self, reason: Reason) -> None:
        Reply(wire.FAILED, reason).send(self.sock)
        self.close()

    def close(self) -> None:
        self.sock.close()
        if self.region >= 0:
            os.close(self.region)
        self.region = -1


@dataclass(slots=True, eq=False)
class Form:
    """A process and its answers. base: bytes of memory that it shares with the fork server. ended_for: why it was
    ended by this program."""

    digest: bytes
    owner: bytes
    pid: int
    control: socket.socket
    state: State
    base: int
    compiling: bool = True
    answers: dict[int, WaitingAnswer] = field(default_factory=dict)
    ended_for: Reason = Reason.NONE
    looked_at: int = -1
    grown: int = 0

    def end(self, reason: Reason = Reason.LOST) -> None:
        """Its end is noticed when its control connection ends."""
        self.ended_for = self.ended_for or reason
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def look(self) -> None:
        """Measure its memory if it has worked since the last time."""
        if self.compiling or self.state.number or self.state.done != self.looked_at:
            self.looked_at = self.state.done
            with suppress(psutil.Error):
                self.grown = max(0, psutil.Process(self.pid).memory_info().rss - self.base)


class ForkServer:
    """The processes of one tokenizer's forms."""

    def __init__(self, control: socket.socket, vocabulary: Vocabulary, limits: FormLimits) -> None:
        self._control = control
        self._vocabulary = vocabulary
        self._limits = limits
        self._forms: OrderedDict[bytes, Form] = OrderedDict()  # the least recently used first
        self._waiting: deque[WaitingAnswer] = deque()
        self._refused: OrderedDict[bytes, tuple[Reason, float]] = OrderedDict()
        self._number = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._attach_next)

    def run(self) -> None:
        """Serve until the server has left."""
        while True:
            busy = any(form.answers or form.compiling for form in self._forms.values())
            for key, _ in self._selector.select(self._limits.watch_s if busy else None):
                if self._current(key):
                    key.data()
            self._watch_memory()
            self._start_next()

    def _current(self, key: selectors.SelectorKey) -> bool:
        """Whether no event before this one has removed or closed what it is about."""
        with suppress(KeyError, ValueError):
            return self._selector.get_key(key.fileobj) is key
        return False

    # Answers that come and go.

    def _attach_next(self) -> None:
        received = Attach.receive(self._control)
        if received is None:  # the server has ended
            for one in self._forms.values():
                one.end()
            os._exit(0)
        attach, (sock, region) = received
        self._number = self._number % 0xFFFFFFFF + 1
        answer = WaitingAnswer(attach._replace(number=self._number), socket.socket(fileno=sock), region)
        reason, until = self._refused.get(attach.digest, (Reason.NONE, 0.0))
        if until > time.monotonic():
            answer.refuse(reason)
        elif (form := self._form(attach.digest)) is not None:
            self._add(form, answer)
        elif len(self._waiting) >= self._limits.waiting:
            answer.refuse(Reason.BUSY)
        else:
            self._waiting.append(answer)
            self._watch_caller(answer, None)

    def _add(self, form: Form, answer: WaitingAnswer) -> None:
        """An answer of a form that has its process."""
        form.answers[answer.attach.number] = answer
        self._forms.move_to_end(form.digest)
        if form.compiling:
            self._watch_caller(answer, form)
        else:
            self._hand_on(form, answer)

    def _hand_on(self, form: Form, answer: WaitingAnswer) -> None:
        """Let the process serve the answer. Its socket stays open here, for the case that the process ends."""
        try:
            answer.attach.send(form.control, [answer.sock.fileno(), answer.region])
        except OSError:  # it has ended, or is stuck, which its limits end
            del form.answers[answer.attach.number]
            answer.refuse(Reason.LOST)
            return
        os.close(answer.region)
        answer.region = -1

    def _watch_caller(self, answer: WaitingAnswer, form: Form | None) -> None:
        """Notice the end of the caller's socket, on which it sends nothing until the form is compiled."""
        self._forget_caller(answer)
        self._selector.register(answer.sock, selectors.EVENT_READ, lambda: self._left(answer, form))

    def _forget_caller(self, answer: WaitingAnswer) -> None:
        with suppress(KeyError):
            self._selector.unregister(answer.sock)

    def _left(self, answer: WaitingAnswer, form: Form | None) -> None:
        """The caller has left before the form was compiled: nobody may need it."""
        with suppress(OSError):
            if answer.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return  # it is compiled, which is not known here yet
        self._forget_caller(answer)
        answer.close()
        if form is None:
            self._waiting.remove(answer)
        elif form.answers.pop(answer.attach.number, None) is not None and not form.answers:
            form.end()

    # Processes that come and go.

    def _start_next(self) -> None:
        """Compile forms that wait, first those of owners with the fewest in work."""
        while self._waiting:
            in_work = [form.owner for form in self._forms.values() if form.compiling]
            if len(in_work) >= self._limits.compiling:
                return
            answer = min(self._waiting, key=lambda one: in_work.count(one.attach.owner))
            self._waiting.remove(answer)
            self._forget_caller(answer)
            self._add(self._form(answer.attach.digest) or self._fork(answer), answer)

    def _form(self, digest: bytes) -> Form | None:
        """The form if it has a process that is not about to end."""
        form = self._forms.get(digest)
        return form if form is not None and not form.ended_for else None

    def _fork(self, first: WaitingAnswer) -> Form:
        ours, theirs = socket.socketpair()
        state, parent = State.shared(), os.getpid()
        base = psutil.Process().memory_info().rss
        pid = os.fork()
        if pid == 0:

            def serve() -> NoReturn:
                fds = (os.dup(first.sock.fileno()), os.dup(first.region))
                ours.close()
                self._close_all(first)
                FormProcess(theirs, state, self._vocabulary, self._limits).run(first.attach, fds)

            run_limited(serve, self._limits, parent)
        theirs.close()
        os.close(first.region)
        first.region = -1
        ours.setblocking(False)
        form = Form(first.attach.digest, first.attach.owner, pid, ours, state, base)
        self._forms[form.digest] = form
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._noted(form))
        return form

    def _close_all(self, first: WaitingAnswer) -> None:
        """Close the sockets of all other processes in a new one: their ends would not be noticed otherwise."""
        with suppress(OSError):  # a kqueue does not survive a fork
            self._selector.close()
        self._control.close()
        first.close()
        for answer in self._waiting:
            answer.close()
        for form in self._forms.values():
            form.control.close()
            for answer in form.answers.values():
                answer.close()

    def _noted(self, form: Form) -> None:
        """What a process says."""
        with suppress(BlockingIOError):
            notes = self._read_notes(form)
            if notes is None:
                self._ended(form)
                return
            for kind, number in notes:
                if kind == wire.READY:
                    self._compiled(form)
                elif answer := form.answers.pop(number, None):
                    answer.close()
        if not form.answers and not form.compiling:
            self._make_idle(form)

    @staticmethod
    def _read_notes(form: Form) -> list[tuple[int, int]] | None:
        try:
            return receive_notes(form.control)
        except ConnectionError:
            return None

    def _compiled(self, form: Form) -> None:
        form.compiling = False
        for answer in list(form.answers.values()):
            self._forget_caller(answer)
            if answer.region >= 0:  # it came while the form was compiled
                self._hand_on(form, answer)

    def _make_idle(self, form: Form) -> None:
        """Keep the process of a form without an answer for the next one, within the bounds."""
        form.looked_at = -1
        form.look()
        if form.grown > self._limits.idle_bytes:
            form.end()
        idle = [one for one in self._forms.values() if not one.answers and not one.compiling and not one.ended_for]
        for oldest in idle[: max(0, len(idle) - self._limits.idle)]:
            oldest.end()

    def _ended(self, form: Form) -> None:
        """A process has ended: say why to its answers."""
        _, status = os.waitpid(form.pid, 0)
        self._selector.unregister(form.control)
        form.control.close()
        if self._forms.get(form.digest) is form:
            del self._forms[form.digest]
        reason, working_for = form.ended_for or _reason(status, form.compiling), form.state.number
        if form.compiling and reason is not Reason.LOST:
            self._refuse_again(form.digest, reason)
        for number, answer in form.answers.items():
            self._forget_caller(answer)
            answer.refuse(reason if form.compiling or number == working_for else Reason.LOST)

    def _refuse_again(self, digest: bytes, reason: Reason) -> None:
        """Each try of a form that is too much costs all that it may take."""
        self._refused[digest] = (reason, time.monotonic() + self._limits.refused_s)
        self._refused.move_to_end(digest)
        while len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)

    def _watch_memory(self) -> None:
        for form in self._forms.values():
            form.look()
            if form.grown > self._limits.process_bytes:
                form.end(Reason.MEMORY)
        for form in self._largest_first():
            form.end(Reason.MEMORY)

    def _largest_first(self) -> Iterator[Form]:
        """What must end so that the others are within their bound: idle processes first."""
        total = sum(form.grown for form in self._forms.values() if not form.ended_for)
        for form in sorted(self._forms.values(), key=lambda one: (bool(one.answers), -one.grown)):
            if total <= self._limits.all_bytes:
                return
            if not form.ended_for:
                total -= form.grown
                yield form


def _reason(status: int, compiling: bool) -> Reason:
    """Why a process has ended by itself."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGPROF:
            return Reason.TIME if compiling else Reason.STEP
        if number == signal.SIGABRT:  # Rust's answer to memory that it does not get
            return Reason.MEMORY
        return Reason.LOST if number in (signal.SIGKILL, signal.SIGTERM) else Reason.CRASH
    code = os.WEXITSTATUS(status)
    return {0: Reason.LOST, OUT_OF_MEMORY: Reason.MEMORY}.get(code, Reason.CRASH)


def main(control_fd: int, settings_fd: int) -> None:
    """Load the tokenizer, then serve."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it ends with its server, which may drain
        signal.signal(ignored, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    with open(settings_fd, "rb") as file:
        settings, tokenizer = json.loads(file.readline()), file.read().decode()
    vocabulary, limits = _vocabulary(settings, tokenizer), FormLimits(**settings["limits"])
    del tokenizer
    gc.collect()
    gc.freeze()
    ForkServer(socket.socket(fileno=control_fd), vocabulary, limits).run()


def _vocabulary(settings: Mapping[str, Any], tokenizer: str) -> Vocabulary:
    from llguidance import LLParserLimits, LLTokenizer

    made = LLTokenizer(tokenizer, n_vocab=settings["vocab_size"], eos_token=settings["eos_ids"])
    parser = LLParserLimits(**settings["limits"]["parser"])
    return Vocabulary(made, settings["vocab_size"], settings["eos_ids"], parser)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
