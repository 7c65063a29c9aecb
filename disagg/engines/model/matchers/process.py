"""The process of one form: compiles it, then has a matcher for each answer that must have it.

It may end at any moment, by its limits, by the fork server or by a crash. What it works on is in `State`, which the
fork server reads after its end.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

from disagg.engines.model.matchers import wire
from disagg.engines.model.matchers.limits import FormLimits, Reason
from disagg.engines.model.matchers.notation import NOT_READ, in_lark
from disagg.engines.model.matchers.wire import Attach, Region, Reply, send_note

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

OUT_OF_MEMORY: Final = 3
"""The exit code of a process without memory."""
_PARENT_ENDS: Final = 1  # PR_SET_PDEATHSIG


class State(ctypes.Structure):
    """What a process works on. number: the answer for which it works now, 0 if none. done: how much work it has
    ended."""

    _fields_ = (("number", ctypes.c_uint32), ("done", ctypes.c_uint32))
    number: int
    done: int

    @classmethod
    def shared(cls) -> Self:
        """In memory that a fork shares, which is freed with the last of both processes' values."""
        return cls.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as llguidance has it. size: bits of a mask. eos_ids: tokens that end an answer."""

    tokenizer: LLTokenizer
    size: int
    eos_ids: Sequence[int]
    parser: LLParserLimits

    @property
    def mask_bytes(self) -> int:
        return mask_bytes(self.size)

    @property
    def end_mask(self) -> bytes:
        """The mask that allows only the end."""
        mask = bytearray(self.mask_bytes)
        for token in self.eos_ids:
            mask[token // 8] |= 1 << (token % 8)
        return bytes(mask)


def mask_bytes(vocab_size: int) -> int:
    """The bytes of a mask: a bit for each token, in words of 32 bits."""
    return (vocab_size + 31) // 32 * 4


@dataclass(slots=True)
class Answer:
    """An answer that must have the form. sock: to the server. accepted: tokens since its beginning here."""

    number: int
    sock: socket.socket
    region: Region
    matcher: LLMatcher
    vocabulary: Vocabulary
    accepted: int = 0
    ended: bool = False
    error: Reason = Reason.NONE
    rest: bytes = b""
    mask: Any = field(init=False)

    def __post_init__(self) -> None:
        self.mask = (ctypes.c_char * self.vocabulary.mask_bytes).from_buffer(self.region.memory)

    def accept(self, token: int) -> None:
        self.accepted += 1
        self.ended = self.ended or (token in self.vocabulary.eos_ids and self.matcher.is_accepting())
        if not self.ended and not self.error and (self.matcher.is_stopped() or not self.matcher.consume_token(token)):
            self.error = self._reason(Reason.TOKEN)

    def next(self) -> Reply:
        """Writes the next mask if there is one, and says so."""
        if not self.error and not self.ended:
            if self.matcher.is_stopped():  # nothing can follow but the end
                self.mask.raw = self.vocabulary.end_mask
            else:
                self.matcher.unsafe_compute_mask_ptr(ctypes.addressof(self.mask), self.vocabulary.mask_bytes)
                if self.matcher.is_error():
                    self.error = self._reason(Reason.PARSER)
        if self.error:
            return Reply(wire.FAILED, self.error, self.accepted)
        return Reply(wire.FREE if self.ended else wire.MASK, count=self.accepted)

    def close(self) -> None:
        self.sock.close()
        self.mask = None
        self.region.close()

    def _reason(self, otherwise: Reason) -> Reason:
        return Reason.PARSER if self.matcher.stop_reason().endswith("TooComplex") else otherwise


class FormProcess:
    """Serves one form until its fork server, or a limit, ends it."""

    def __init__(self, control: socket.socket, state: State, vocabulary: Vocabulary, limits: FormLimits) -> None:
        self._control = control
        self._state = state
        self._vocabulary = vocabulary
        self._limits = limits
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._attach_next)
        self._compiled: LLMatcher

    def run(self, attach: Attach, fds: tuple[int, int]) -> NoReturn:
        """Compile the form of this answer, then serve it and those that follow."""
        sock, region = socket.socket(fileno=fds[0]), Region(fds[1])
        text, tokens = region.read(attach)
        with _cpu_limit(self._limits.compile_cpu_s):
            self._compile(text, sock, region)
        send_note(self._control, wire.READY, 0)
        self._begin(attach.number, sock, region, tokens)
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _compile(self, text: str, sock: socket.socket, region: Region) -> None:
        from llguidance import LLMatcher

        grammar = in_lark(text)
        if grammar is None:
            self._refuse(NOT_READ, sock, region)
        matcher = LLMatcher(self._vocabulary.tokenizer, grammar, log_level=0, limits=self._vocabulary.parser)
        if matcher.is_error():
            self._refuse(matcher.get_error(), sock, region)
        self._compiled = matcher

    @staticmethod
    def _refuse(error: str, sock: socket.socket, region: Region) -> NoReturn:
        reason = error.encode()[: len(region.memory)]
        region.memory[: len(reason)] = reason
        Reply(wire.FAILED, Reason.REFUSED, len(reason)).send(sock)
        os._exit(0)

    def _attach_next(self) -> None:
        received = Attach.receive(self._control)
        if received is None:  # the fork server has ended
            os._exit(0)
        attach, fds = received
        sock, region = socket.socket(fileno=fds[0]), Region(fds[1])
        self._begin(attach.number, sock, region, region.read(attach)[1])

    def _begin(self, number: int, sock: socket.socket, region: Region, tokens: Sequence[int]) -> None:
        """Serve one more answer, after its first tokens."""
        answer = Answer(number, sock, region, self._compiled.deep_copy(), self._vocabulary)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._serve(answer))
        with self._work(number):
            for token in tokens:
                answer.accept(token)
            answer.accepted = 0
        Reply(wire.COMPILED, answer.error).send(sock)
        self._answer(answer, answer.next)

    def _serve(self, answer: Answer) -> None:
        """Take the tokens that have arrived, and compute the mask after them."""
        try:
            data = answer.sock.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(answer.sock)
            answer.close()
            send_note(self._control, wire.LEFT, answer.number)
            return
        data = answer.rest + data
        whole = len(data) // wire.TOKEN.size * wire.TOKEN.size
        answer.rest = data[whole:]

        def follow() -> Reply:
            for (token,) in wire.TOKEN.iter_unpack(data[:whole]):
                answer.accept(token)
            return answer.next()

        self._answer(answer, follow)

    def _answer(self, answer: Answer, compute: Callable[[], Reply]) -> None:
        with self._work(answer.number):
            reply = compute()
        reply.send(answer.sock)

    @contextmanager
    def _work(self, number: int) -> Iterator[None]:
        self._state.number = number
        with _cpu_limit(self._limits.step_cpu_s):
            yield
        self._state.done += 1
        self._state.number = 0


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """End this process by SIGPROF if the block takes more CPU time, also in native code that holds Python's lock."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def run_limited(serve: Callable[[], NoReturn], limits: FormLimits, parent: int) -> NoReturn:
    """Serve a form in this process, which `parent` has just forked, and end it whatever happens."""
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for output in (1, 2):  # what a parser prints before it aborts may quote a schema
            os.dup2(nothing, output)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        gc.disable()  # its cycles are few; a collection would copy the fork server's pages
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if sys.platform == "linux":
            _limit_on_linux(limits, parent)
        serve()
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException:  # noqa: BLE001 - the top of the process; its answers are told by the fork server
        code = 1
    finally:
        os._exit(code)


def _limit_on_linux(limits: FormLimits, parent: int) -> None:
    """End with the fork server, however that ends; let the kernel choose this process first if memory runs out; and
    have no more address space than the limit. Elsewhere the fork server alone watches the memory."""
    ctypes.CDLL(None).prctl(_PARENT_ENDS, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound = pages * mmap.PAGESIZE + limits.process_bytes
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
