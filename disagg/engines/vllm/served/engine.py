"""A SendingEngine on a `vllm serve`, which is another process, and may be somebody else's.

Prompts and answers go to it by HTTP; its workers send the KV and report to this process. Nothing of what they do is
polled: every answer, token and step arrives as a message, and a step of this engine takes the messages that have come.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy
import numpy.typing

from disagg.api.delivery import KVOrder, KVProgress
from disagg.api.requests import KVAddress
from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import EngineInfo, PrefillRun, SendingEngine, SendingRun, Token
from disagg.engines.model import checkpoint
from disagg.engines.model.constraint import Constraint
from disagg.engines.model.text import HFTokenizer
from disagg.engines.vllm.reports import Reports
from disagg.engines.vllm.rows import StepShare
from disagg.engines.vllm.runs import AnswerRun, Run, SentByItself
from disagg.engines.vllm.sampling import fields
from disagg.engines.vllm.served import check
from disagg.engines.vllm.served.calls import Call, Server
from disagg.engines.vllm.served.forms import COMPLETIONS, answer_body, output, prompt_body
from disagg.engines.vllm.served.prompt import ServedPrompt
from disagg.errors import DisaggError, ModelError
from disagg.kv.wire.frames import Header

POLL_S: Final = 0.02  # that a new prompt waits for a step without messages
MAX_MESSAGES: Final = 4096


class ServedEngine(SendingEngine):
    """A SendingEngine."""

    together = True

    def __init__(self, source: str | Path, context: int, options: EngineOptions) -> None:
        """Meet the server at options.url, which has the model of `source` loaded to serve `context` tokens. ModelError
        if it cannot be ordered anything, PreflightRefused if it does not compute what the checkpoint describes."""
        assert options.url is not None
        path = checkpoint.resolve(source)
        self.tokenizer = HFTokenizer.load(path)
        reference = checkpoint.reference_profile(path, context, self.tokenizer)
        layout, fingerprint = checkpoint.layout(reference, options.dtype), checkpoint.fingerprint(reference)
        self._server = Server(options.url)
        self._model, found = check.meet(self._server, options.model)
        check.require(found, options.url, layout, fingerprint, context)
        self._messages: queue.Queue[Callable[[], None]] = queue.Queue(MAX_MESSAGES)
        self._calls: dict[str, Call] = {}
        self._alive = True
        self._reports = Reports(self._reporting_address())
        self.info = EngineInfo(
            backend=f"vllm-server/{found.device}",
            versions={"vllm": found.vllm, "torch": found.torch},
            profile=reference,
            layout=layout,
            fingerprint=fingerprint,
            preflight=found.preflight,
            memory_bytes=found.memory_bytes,
            eos_ids=reference.eos_ids,
        )

    @property
    def alive(self) -> bool:
        """See PromptEngine. Not once nothing listens there: whatever is started instead is met anew, by a new
        process."""
        return self._alive

    def warm_up(self) -> None:
        """See PromptEngine."""
        for _ in self.generate([0] * min(64, self.info.profile.context - 2), Sampling(max_tokens=2, ignore_eos=True)):
            pass

    def send(
        self, tokens: Sequence[int], to: tuple[str, int], header: Header, *, deadline: float, next_token: int, salt: str
    ) -> SendingRun:
        """See SendingEngine."""
        if header.start >= len(tokens):
            return SentByItself(to, header, deadline)
        run: ServedPrompt

        def stepped(progress: KVProgress) -> None:
            with contextlib.suppress(queue.Full):  # the next one says the same
                self._messages.put_nowait(partial(run.begin_step, progress, time.monotonic()))

        awaited = self._reports.expect(secrets.token_urlsafe(24), stepped)
        order = KVOrder(
            id=awaited.id,
            report=self._reports.address,
            deliver=KVAddress(*to),
            ticket=header.ticket,
            request_id=header.request_id,
            next_token=next_token,
            start=header.start,
            wire=header.wire,
            deadline_s=max(0.001, deadline - time.monotonic()),
            progress=True,
        )
        run = ServedPrompt(self, len(tokens), awaited, self._reports, deadline)
        body = prompt_body(self._model, tokens, salt, order.to_json())
        self._call(run, body, deadline, lambda ended: run.take_end(ended, time.monotonic()))
        return run

    def start_answer(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        emit: Callable[[Token], None],
        *,
        answered: int = 0,
        salt: str = "",
        constraint: Constraint | None = None,
    ) -> PrefillRun:
        """See PromptEngine. As of the engine `vllm`."""
        run = AnswerRun(self, len(tokens), emit, sampling)
        wanted = fields(sampling, answered=answered, eos_ids=self.info.eos_ids, constraint=constraint)
        body = answer_body(self._model, tokens, salt, wanted)
        began = time.monotonic()

        def line(text: bytes) -> None:
            self._messages.put(partial(_take_line, run, len(tokens), text, began, time.monotonic()))

        self._call(run, body, began + ANSWER_S, lambda ended: _end_answer(run, ended), line)
        return run

    def logits(
        self, tokens: Sequence[int], last: int, *, chunk_tokens: int | None = None
    ) -> numpy.typing.NDArray[numpy.float32]:
        """See PromptEngine."""
        raise ModelError("vllm serve gives no logits", "verify with the engine vllm: disagg verify --engine vllm")

    def step(self) -> None:
        """Wait a moment for messages about any run, and take all that are there."""
        with contextlib.suppress(queue.Empty):
            take = self._messages.get(timeout=POLL_S)
            while True:
                take()
                take = self._messages.get_nowait()

    def drop(self, run: Run) -> None:
        """End the run's request, which vLLM aborts if it has not finished."""
        if (call := self._calls.pop(run.name, None)) is not None:
            call.close()

    def close(self) -> None:
        """See PromptEngine."""
        for call in list(self._calls.values()):
            call.close()
        self._reports.close()

    def _call(
        self,
        run: Run,
        body: bytes,
        deadline: float,
        take_end: Callable[[bytes | DisaggError], None],
        on_line: Callable[[bytes], None] | None = None,
    ) -> None:
        def ended(result: bytes | DisaggError) -> None:
            if isinstance(result, ModelError) and not self._server.listens():
                self._alive = False
            self._messages.put(partial(take_end, result))

        self._calls[run.name] = Call(self._server, COMPLETIONS, body, deadline=deadline, on_end=ended, on_line=on_line)

    def _reporting_address(self) -> str:
        """The address of this machine that the server's workers reach: the one that reaches the server."""
        try:
            with contextlib.closing(self._server.connect()) as connection:
                return str(connection.sock.getsockname()[0])
        except OSError as error:
            raise ModelError(f"no vllm serve answers at {self._server.url}: {error}", "start it") from error


ANSWER_S: Final = 24 * 3600.0
"""For an answer, whose own deadline is its request's."""


def _take_line(run: AnswerRun, tokens: int, text: bytes, began: float, now: float) -> None:
    """A line of a streamed answer. The prompt counts as computed when its first token is there."""
    try:
        if (new := output(text)) is None:
            return
    except DisaggError as error:
        run.fail(error)
        return
    if run.remaining:
        run.note(began, now, StepShare(0, tokens, 1.0))
    run.take(new, now, now)


def _end_answer(run: AnswerRun, ended: bytes | DisaggError) -> None:
    if isinstance(ended, DisaggError):
        run.fail(ended)
    elif not run.finished:
        run.fail(ModelError("vllm serve ended before the answer was complete", "see its log"))
