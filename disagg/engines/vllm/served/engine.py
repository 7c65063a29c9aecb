"""A SendingEngine on a `vllm serve`, which is another process, and may be somebody else's.

Prompts and answers go to it by HTTP; its workers send the KV and report to this process. Nothing of what they do is
polled: every answer, token and step arrives as a message, and a step of this engine takes the messages that have come.
"""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from disagg.api.delivery import KVProgress
from disagg.config import EngineOptions
from disagg.config.key import key_of
from disagg.engines.base import AnswerRequest, Logits, PrefillRun, SendingEngine, SendingRun, Token
from disagg.engines.model.reference import Reference
from disagg.engines.sending.reports import Awaited, Reports
from disagg.engines.sending.runs import AnswerRun, Engine, NothingToCompute, Run, SentPromptRun, refusal
from disagg.engines.vllm.sampling import fields
from disagg.engines.vllm.served import description
from disagg.engines.vllm.served.calls import Call, VLLMServer
from disagg.engines.vllm.served.forms import (
    COMPLETIONS,
    START_COMMAND,
    answer_body,
    finish_reason,
    order_answer,
    output,
    prompt_body,
)
from disagg.engines.vllm.served.watch import BEGIN_S, HEALTH, SLOWEST_TOKENS_S, Pulse, Request
from disagg.errors import DisaggError, ModelError
from disagg.kv.frames import Header

POLL_S: Final = 0.02  # that a new prompt waits for a step without messages
MAX_MESSAGES: Final = 4096
ANSWER_S: Final = 24 * 3600.0
"""The bound on an HTTP request for an answer. The answer's own deadline is that of its request, whose end closes it."""


class _Message(NamedTuple):
    """About a run. progress: a step or a token, and not an end, which a server that computes nothing may send, too."""

    run: Run
    take: Callable[[], None]
    progress: bool


class ServedEngine(SendingEngine):
    """A SendingEngine. It is not alive any more once nothing answers at its URL, or another server does: a new process
    checks then what is there."""

    together = True
    test_limit_s = description.PATIENCE_S

    def __init__(self, source: str | Path, context: int, options: EngineOptions) -> None:
        """Check the server at options.url, which has the model of `source` loaded to serve `context` tokens. ModelError
        if it cannot be ordered anything, PreflightRefused if it does not compute what the checkpoint describes."""
        assert options.url is not None
        reference = Reference.open(source, context)
        self.tokenizer = reference.tokenizer
        self._server = VLLMServer(options.url, partial(key_of, options, f"the vllm serve at {options.url}"))
        layout = reference.layout(options.dtype)
        self._describe = partial(
            description.describe,
            self._server,
            token=self.tokenizer.encode("a")[-1],
            states=any(layer.states for layer in layout.layers),
        )
        self._model, self._found = self._describe(options.model)
        found = self._found
        description.require(found, options.url, layout, reference.fingerprint, context)
        reference.require_for_vllm(found.device, found.ranks)
        self._messages: queue.Queue[_Message] = queue.Queue(MAX_MESSAGES)
        self._requests: dict[str, Request] = {}
        self._latest = -math.inf  # when the newest step or token of any request came
        self._reports = Reports(self._reporting_address())
        self._pulse = Pulse(partial(self._server.lives, HEALTH), self._hangs)
        self.info = reference.info(
            reference.profile,
            found.preflight,
            options.dtype,
            backend=f"vllm-server/{found.device}",
            versions={"vllm": found.vllm, "torch": found.torch},
            memory_bytes=found.memory_bytes,
            kv_bytes=found.kv_bytes,
        )

    def warm_up(self) -> None:
        """Nothing: it has computed a token to describe itself."""

    def send(
        self, tokens: Sequence[int], to: tuple[str, int], header: Header, *, deadline: float, next_token: int, salt: str
    ) -> SendingRun:
        if header.start >= len(tokens):
            return NothingToCompute(to, header, deadline)
        run: ServedPrompt

        def stepped(progress: KVProgress) -> None:
            with contextlib.suppress(queue.Full):  # the next one says the same
                self._messages.put_nowait(_Message(run, partial(run.begin_step, progress, time.monotonic()), True))

        with self._reports.expecting(stepped) as awaited:
            order = self._reports.order(awaited, to, header, deadline=deadline, next_token=next_token, progress=True)
            run = ServedPrompt(self, len(tokens), awaited, self._reports, deadline)
            body = prompt_body(self._model, tokens, salt, order.to_json())
            make = partial(Call, self._server, COMPLETIONS, body, deadline=deadline)
            self._begin(run, BEGIN_S, make, lambda ended: run.take_end(ended, time.monotonic()))
        return run

    def start_answer(self, request: AnswerRequest, emit: Callable[[Token], None]) -> PrefillRun:
        """A run of a whole request. The server describes itself first: unlike a prompt's KV, whose header the decode
        host checks, tokens do not show which weights they are from."""
        tokens = request.tokens
        run = AnswerRun(self, len(tokens), emit, request.sampling)
        body = answer_body(self._model, tokens, request.salt, fields(request, self.info.eos_ids))
        began = time.monotonic()

        def line(text: bytes) -> None:
            take = partial(_take_line, run, len(tokens), text, began, time.monotonic())
            self._messages.put(_Message(run, take, True))

        make = partial(
            Call,
            self._server,
            COMPLETIONS,
            body,
            deadline=began + ANSWER_S,
            on_line=line,
            first=self._require_same,
        )
        self._begin(run, BEGIN_S + len(tokens) / SLOWEST_TOKENS_S, make, lambda ended: _end_answer(run, ended))
        return run

    def logits(self, tokens: Sequence[int], last: int, *, chunk_tokens: int | None = None) -> Logits:
        raise ModelError("vllm serve gives no logits", "verify with the engine vllm: disagg verify --engine vllm")

    def step(self) -> None:
        """Wait a moment for messages about any run, and take all that are there. A run without one for too long
        fails."""
        with contextlib.suppress(queue.Empty):
            message = self._messages.get(timeout=POLL_S)
            while True:
                message.take()
                if (request := self._requests.get(message.run.name)) is not None:
                    request.note(time.monotonic())
                    self._latest = request.latest_at if message.progress else self._latest
                message = self._messages.get_nowait()
        now = time.monotonic()
        for request in self._requests.values():
            request.judge(now, self._latest)

    def drop(self, run: Run) -> None:
        """End the run's request, which vLLM aborts if it has not finished."""
        if (request := self._requests.pop(run.name, None)) is not None:
            request.call.close()

    def close(self) -> None:
        self._pulse.close()
        for request in list(self._requests.values()):
            request.call.close()
        self._reports.close()

    def _begin(
        self, run: Run, begin_s: float, make: Callable[..., Call], take_end: Callable[[bytes | DisaggError], None]
    ) -> None:
        """Send the run's request. begin_s: so long may its first message take."""
        if self._failure is not None:
            raise self._failure

        def ended(result: bytes | DisaggError) -> None:
            if isinstance(result, ModelError) and not self._server.listens():
                self._failure = self._failure or result
            self._messages.put(_Message(run, partial(take_end, result), False))

        self._requests[run.name] = Request(run, make(on_end=ended), time.monotonic(), begin_s)

    def _hangs(self, error: DisaggError) -> None:
        self._failure = self._failure or ModelError(error.message, error.hint)

    def _require_same(self) -> None:
        """Raise ModelError, and end this engine, if the server is not what it was at the start."""
        if self._describe(self._model)[1] != self._found:
            message = f"the vllm serve at {self._server.url} has been replaced by a different one"
            self._failure = ModelError(message, "the server restarts itself, and checks it")
            raise self._failure

    def _reporting_address(self) -> str:
        """The address of this machine that the server's workers reach: the one that reaches the server."""
        try:
            with contextlib.closing(self._server.connect()) as connection:
                return str(connection.sock.getsockname()[0])
        except OSError as error:
            raise ModelError(f"no vllm serve answers at {self._server.url}: {error}", "start it") from error


class ServedPrompt(SentPromptRun):
    """A SentPromptRun whose steps are known from the workers' reports. A step lasts until the next one of the same
    prompt begins, or until the answer comes: the GPU may still compute when the worker has launched all of a step."""

    def __init__(self, engine: Engine, tokens: int, awaited: Awaited, reports: Reports, deadline: float) -> None:
        super().__init__(engine, tokens, awaited, reports, deadline)
        self._running: tuple[KVProgress, float] | None = None  # the newest step, and when it began

    def begin_step(self, progress: KVProgress, now: float) -> None:
        """A worker has begun a step. Those of several ranks are one."""
        if self.finished:
            return
        if self._running is None or progress.before >= self._running[0].after:
            self._end_step(now)
            self._running = progress, now

    def take_end(self, ended: bytes | DisaggError, now: float) -> None:
        """vLLM has answered: the prompt is computed, or will not be."""
        try:
            if isinstance(ended, DisaggError):
                raise ended
            if (answer := order_answer(ended)) is None:
                raise ModelError("this vllm serve has no connector of disagg", f"start it as in {START_COMMAND}")
            if answer.error is not None:
                raise DisaggError.from_json(answer.error)
            if (error := refusal(finish_reason(ended))) is not None:
                raise error
        except DisaggError as failure:
            self.fail(failure)
            return
        if self._running is None:  # no report has come before the answer
            self._running = KVProgress(0, self._tokens, 1.0), self._started
        self._end_step(now)
        self._computed = self._tokens
        self.finished = True

    def _end_step(self, now: float) -> None:
        if self._running is not None:
            step, began = self._running
            self.note(began, now, step)


def _take_line(run: AnswerRun, tokens: int, text: bytes, began: float, now: float) -> None:
    """A line of a streamed answer. The prompt counts as computed when its first token is there."""
    try:
        if (new := output(text)) is None:
            return
    except DisaggError as error:
        run.fail(error)
        return
    if run.remaining:
        run.note(began, now, KVProgress(0, tokens, 1.0))
    run.take(new, now, now)


def _end_answer(run: AnswerRun, ended: bytes | DisaggError) -> None:
    if run.finished:  # the end of its connection does not matter
        return
    if isinstance(ended, DisaggError):
        run.fail(ended)
    else:
        run.fail(ModelError("vllm serve ended before the answer was complete", "see its log"))
