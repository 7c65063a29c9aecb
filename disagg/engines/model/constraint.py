"""Which tokens may come next in an answer that must have a form, such as JSON that fits a schema.

llguidance decides, in the processes of `matchers`; it is an optional package. These start with the first such request.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from disagg.engines.model.matchers import wire
from disagg.engines.model.matchers.forkserver import write_settings
from disagg.engines.model.matchers.limits import (
    COMPILED_S,
    PATIENCE_S,
    PATIENCE_TOKEN_S,
    REBUILDS,
    STEP_S,
    FormLimits,
    Reason,
    refusal,
    too_complex,
)
from disagg.engines.model.matchers.link import ForkServerProcess, Link
from disagg.engines.model.matchers.process import mask_bytes
from disagg.engines.model.matchers.wire import Attach, Region, Reply
from disagg.errors import (
    Cancelled,
    CapabilityMissing,
    DisaggError,
    Overloaded,
    RequestError,
    SchemaTooComplex,
    ServerUnavailable,
)
from disagg.extras import install

_LEAST_WAIT_S: Final = 0.02  # also when the token was long ago: this process may have been stopped meanwhile
_FREE_WAIT_S: Final = 0.001  # a wait that counts as none: the process was woken by the token
_SIMPLIFY: Final = "simplify the JSON schema"


class Constraint:
    """The form of one answer. `close` may be called from any thread, the rest from one at a time.

    `accept` sends a token to the form's process, which computes the next mask meanwhile; `allowed` waits for it.
    """

    def __init__(self, form: _Form, after: int | None = None) -> None:
        """after: the token, such as the end of the reasoning, before which the answer is free."""
        self._form = form
        self._after = after
        self._link: Link | None = None
        self._tokens: list[int] = []  # that the form has, for a process that takes over
        self._free = False
        self._sent_at = 0.0
        self._patience_s = PATIENCE_S
        self._rebuilds = REBUILDS
        self._lock = threading.Lock()
        self._closed = False
        self.error: DisaggError | None = None
        """Why the answer cannot go on; `allowed` then allows everything, and its caller ends the request."""

    @property
    def pending(self) -> bool:
        """Whether `allowed` may wait for a mask."""
        return self._after is None and not self._free and self.error is None

    def accept(self, token: int) -> None:
        """The next token of the answer. Does not wait."""
        if self._after is not None:
            self._after = None if token == self._after else self._after
            return
        if self._free or self.error is not None:
            return
        self._tokens.append(token)
        self._patience_s = min(PATIENCE_S, self._patience_s + PATIENCE_TOKEN_S)
        self._sent_at = time.monotonic()
        with self._lock:
            if self._link is not None and not self._closed:
                self._link.send(token)

    def allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """Which tokens of the vocabulary may come next, [vocab]; None if all may, as after the end of sequence. Returns
        within STEP_S of the last token."""
        if not self.pending:
            return None
        vocab_size = self._form.source.vocab_size
        with self._lock:
            if self._closed or self._link is None:
                self.error = Cancelled("the answer has ended", "send the request again")
                return None
            reply = self._next_reply()
            if reply.kind == wire.MASK:
                bits = np.frombuffer(self._link.memory, dtype=np.uint8, count=mask_bytes(vocab_size))
                return np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)
        self._free = reply.kind == wire.FREE
        if not self._free:
            self.error = self._error(reply)
        return None

    def close(self) -> None:
        """Let the process drop the answer. Also ends the compiling of a form that no other answer waits for."""
        self._closed = True
        if (link := self._link) is not None:
            link.hang_up()  # ends the wait of a thread that has the lock
        with self._lock:
            self._drop_link()

    async def start(self, answer: Sequence[int]) -> None:
        """Compile the form, and take the first tokens of the answer. Raises RequestError if the form is not valid or
        the answer does not fit, SchemaTooComplex if it takes more than it may; what else may be raised says that the
        processes cannot serve now."""
        for token in answer:
            if self._after is None:
                self._tokens.append(token)
            elif token == self._after:
                self._after = None
        ends = time.monotonic() + COMPILED_S
        while (reply := await self._compiled(ends)).reason is Reason.LOST and self._rebuilds:
            self._rebuilds -= 1
        if reply.reason is Reason.TOKEN:
            raise RequestError("answer_tokens: they do not have the form that the answer must have")
        if reply.kind != wire.COMPILED or reply.reason:
            raise self._error(reply)

    async def _compiled(self, ends: float) -> Reply:
        """The first reply about the form."""
        self._drop_link()
        await self._form.source.ready()
        try:
            link = self._link = self._form.attach(self._tokens)
        except ServerUnavailable:
            return Reply(wire.FAILED, Reason.LOST)
        while (reply := link.receive()) is None:
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + ends - time.monotonic()):
                    await link.readable()
            except TimeoutError:
                raise ServerUnavailable("the processes that compile forms of answers are stuck", "try again") from None
        self._sent_at = time.monotonic()
        return reply

    def _next_reply(self) -> Reply:
        """The reply to the last token. With the lock held."""
        began, late = time.monotonic(), Reason.STEP
        deadline = max(self._sent_at + min(STEP_S, self._patience_s), began + _LEAST_WAIT_S)
        while True:
            assert self._link is not None
            reply = self._link.reply(deadline)
            waited = time.monotonic() - began
            if waited > _FREE_WAIT_S:
                self._patience_s -= waited
            if reply is None:
                return Reply(wire.FAILED, late)
            if reply.reason is not Reason.LOST or not self._rebuilds or self._closed:
                return reply
            self._rebuilds -= 1
            late = Reason.LOST  # it has to be compiled first, which says nothing of its steps
            try:
                self._drop_link()
                self._link = self._form.attach(self._tokens)
            except (DisaggError, OSError):
                return reply

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _error(self, reply: Reply) -> DisaggError:
        if reply.reason is Reason.REFUSED:
            assert self._link is not None
            return refusal(self._link.memory[: reply.count].decode(errors="replace"), self._form.field)
        hint = _SIMPLIFY if self._form.field == "json_schema" else f"simplify {self._form.field}"
        if reply.reason is Reason.TOKEN:
            return RequestError("the answer left its form: the token is not allowed", hint)
        if reply.reason is Reason.BUSY:
            return Overloaded("too many forms of answers wait to be compiled", "try again in a moment")
        if reply.reason in (Reason.LOST, Reason.NONE):
            return _ended()
        return SchemaTooComplex(f"{self._form.field}: {too_complex(reply.reason, self._form.source.limits)}", hint)


class Constraints:
    """Makes constraints for one tokenizer. Callable from any thread."""

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        vocab_size: int,
        eos_ids: frozenset[int],
        limits: FormLimits | None = None,
    ) -> None:
        """tokenizer_json: the text of tokenizer.json."""
        self._json = tokenizer_json
        self.vocab_size = vocab_size
        self.limits = limits or FormLimits(compiling=max(2, min(8, (os.cpu_count() or 2) // 2)))
        self._eos_ids = sorted(eos_ids)
        self._available = False
        self._server: ForkServerProcess | None = None
        self._lock = threading.Lock()  # of the fork server and its connection
        self._starter = ThreadPoolExecutor(1, "form-processes")

    async def make(
        self,
        grammar: str,
        answer: Sequence[int] = (),
        after: int | None = None,
        owner: str = "",
        field: str = "json_schema",
    ) -> Constraint:
        """A constraint after the first tokens of an answer. grammar: as llguidance reads it. after: see Constraint.
        owner: whose request it is; what is compiled is not shared between owners. field: of the request, that gives the
        form, for errors. Raises what `Constraint.start`
        raises, and CapabilityMissing if this host has no llguidance. Close it."""
        self._available = self._available or importlib.util.find_spec("llguidance") is not None
        if not self._available:
            raise CapabilityMissing("llguidance is not installed on this host", install("structured"))
        constraint = Constraint(_Form(self, grammar, owner, field), after)
        try:
            await constraint.start(answer)
        except BaseException:
            constraint.close()
            raise
        return constraint

    async def ready(self) -> None:
        """Start the fork server if it does not run."""
        if self._server is None or not self._server.alive:
            await asyncio.get_running_loop().run_in_executor(self._starter, self._start)

    def attach(self, attach: Attach, fds: tuple[int, int]) -> None:
        """Raises ServerUnavailable if the fork server does not run, Overloaded if it does not read."""
        with self._lock:
            if self._server is None:
                raise _ended()
            try:
                self._server.attach(attach, fds)
            except BlockingIOError:
                raise Overloaded("too many forms of answers wait to be compiled", "try again in a moment") from None
            except OSError:
                raise _ended() from None

    @property
    def pid(self) -> int | None:
        """The process id of the fork server; None if it does not run."""
        with self._lock:
            return self._server.process.pid if self._server is not None else None

    def close(self) -> None:
        """End the processes, which end with this one anyway."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.end()

    def _start(self) -> None:
        if self._server is not None and self._server.alive:
            return
        if not self._eos_ids:
            raise RequestError("json_schema: this model has no end-of-sequence token", "ask for text instead")
        self.close()
        server = ForkServerProcess(write_settings(self._json(), self.vocab_size, self._eos_ids, self.limits))
        with self._lock:
            self._server = server


class _Form:
    """A form, and how an answer gets a process that follows it."""

    def __init__(self, source: Constraints, grammar: str, owner: str, field: str) -> None:
        self.source = source
        self.field = field
        self._text = grammar.encode()
        self._owner = hashlib.blake2b(owner.encode(), digest_size=8).digest()
        self._digest = hashlib.blake2b(self._text, digest_size=16, key=self._owner).digest()

    def attach(self, tokens: Sequence[int]) -> Link:
        """A link to the process of the form for an answer that begins with these tokens. Raises what
        `Constraints.attach` raises."""
        region, fd = Region.make(self._text, tokens, mask_bytes(self.source.vocab_size))
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                attach = Attach(self._digest, self._owner, 0, len(self._text), len(tokens))
                self.source.attach(attach, (theirs.fileno(), fd))
        except BaseException:
            ours.close()
            region.close()
            raise
        finally:
            os.close(fd)
        return Link(ours, region)


def _ended() -> ServerUnavailable:
    return ServerUnavailable("the processes that follow forms of answers ended", "try again")


def fitted(allowed: np.ndarray[Any, np.dtype[np.bool_]], size: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """What is allowed, for logits of this size: some models have more of them than tokens, or fewer."""
    return np.pad(allowed[:size], (0, max(0, size - len(allowed))))
