"""The interfaces of engines that compute prompts: EmittingEngine passes each layer's KV to its caller, SendingEngine
sends it. Both also run requests alone, prompt and answer. Below them: what their runs have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

import numpy
import numpy.typing

from disagg.api.names import AS_IS, WireForm
from disagg.api.sampling import Sampling
from disagg.api.status import Evidence
from disagg.engines.base.decode import Token
from disagg.engines.base.scores import ChunkScores
from disagg.engines.model.constraint import Constraint
from disagg.engines.model.evidence import gather
from disagg.engines.model.reference import EngineInfo
from disagg.engines.model.text import PromptTokenizer
from disagg.errors import Cancelled, CapabilityMissing, DisaggError, ModelError
from disagg.kv.blocks import Block
from disagg.kv.frames import Header
from disagg.kv.sent import ComputeStep, SentKV


@dataclass(frozen=True, slots=True)
class PrefillTiming:
    """started: time.monotonic() on the prefill host before the compute. tokens: computed, in `steps`, between which
    the engine computed others, or waited."""

    started: float
    tokens: int
    steps: tuple[ComputeStep, ...] = ()

    @property
    def ended(self) -> float:
        """time.monotonic() after the compute."""
        return self.steps[-1].ended if self.steps else self.started

    @property
    def compute_s(self) -> float:
        """Seconds spent on this prompt."""
        return sum(step.seconds for step in self.steps)

    def plus(self, began: float, ended: float) -> PrefillTiming:
        """This timing with one more token, computed between these two times."""
        return PrefillTiming(self.started, self.tokens + 1, (*self.steps, ComputeStep(began, ended)))


class PrefillRun(Protocol):
    """One prompt that an EmittingEngine computes piece by piece. All calls come from the engine's thread."""

    @property
    def remaining(self) -> int:
        """Prompt tokens that are still to be computed."""
        ...

    @property
    def done(self) -> bool:
        """Whether nothing is left to do. `step` must not be called any more."""
        ...

    @property
    def held(self) -> int:
        """Tokens whose KV was there already, from earlier prompts."""
        ...

    @property
    def timing(self) -> PrefillTiming: ...

    def step(self, max_tokens: int | None = None) -> None:
        """Compute the next tokens of the prompt, at most `max_tokens` and one chunk, or generate one token after it.
        An exception ends the run: only `close` may be called after it."""
        ...

    def close(self) -> None:
        """Let go of the KV, unless the engine keeps it for later prompts. May be called twice."""
        ...


def _never() -> bool:
    return False


def _ignore() -> None:
    pass


ONE_TOKEN = Sampling(max_tokens=1)
"""The sampling of a request that only computes a prompt: it needs room for the prompt and one token."""


Logits = numpy.typing.NDArray[numpy.float32]
"""[tokens, vocab]."""


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A whole request to a prefill engine. answered: how many of `tokens`, the last ones, belong to the answer. salt:
    only requests with the same salt share held KV. constraint: the form that the rest of the answer must have.
    bad_words: token sequences that it must not have."""

    tokens: Sequence[int]
    sampling: Sampling
    answered: int = 0
    salt: str = ""
    constraint: Constraint | None = None
    bad_words: Sequence[Sequence[int]] = ()


def no_scores(backend: str) -> CapabilityMissing:
    """The error of an engine that scores no prompts."""
    return CapabilityMissing(
        f"the engine {backend} scores no prompts",
        "give the model a prefill host on transformers, or a decode host on mlx",
    )


class PrefillEngine(ABC):
    """What every engine of a prefill host can do. Calls come from one thread at a time; several runs may be open at
    once."""

    info: EngineInfo
    tokenizer: PromptTokenizer
    on_beat: Callable[[], None] = staticmethod(_ignore)
    """Called whenever a piece of work is finished: each layer of each chunk, as far as layers are computed in this
    process."""
    together: bool = False
    """Whether a step of one run is a step of all that are open."""
    test_limit_s: float | None = None
    """Seconds that a self-test may take; None: as many as of any engine."""
    _failure: DisaggError | None = None
    """Why no run can be computed any more."""

    @property
    def alive(self) -> bool:
        """False once no run can be computed any more. Readable from any thread."""
        return self._failure is None

    @property
    def failure(self) -> str:
        """Why no run can be computed any more; empty if nothing is known. Readable from any thread."""
        return self._failure.message if self._failure else ""

    @abstractmethod
    def start_answer(self, request: AnswerRequest, emit: Callable[[Token], None]) -> PrefillRun:
        """A run of a whole request on this engine alone: `emit` gets one token per step after the prompt. Stop strings
        are not applied: the caller closes the run at one."""

    def require_layers(self, layers: int | None = None) -> None:
        """ModelError if this engine does not compute the model's first `layers` layers, None for all of them."""
        if refusal := self.info.cannot_compute(layers):
            raise ModelError(refusal, "see docs/split-prefill.md")

    def generate(
        self, tokens: Sequence[int], sampling: Sampling, *, answered: int = 0, cancelled: Callable[[], bool] = _never
    ) -> Iterator[Token]:
        """The tokens of `start_answer`. Raises Cancelled between them."""
        made: list[Token] = []
        with closing(self.start_answer(AnswerRequest(tokens, sampling, answered), made.append)) as run:
            while not run.done:
                if cancelled():
                    raise Cancelled(
                        f"the request was cancelled while it was {'computed' if run.remaining else 'decoded'}"
                    )
                run.step()
                yield from made
                made.clear()

    def start_scores(self, tokens: Sequence[int], top: int, emit: Callable[[ChunkScores], None]) -> PrefillRun:
        """A run that scores all tokens but the first, on KV of its own: `emit` gets those of each chunk. top: how many
        alternatives each has. CapabilityMissing if the engine cannot."""
        raise no_scores(self.info.backend)

    @property
    def held_bytes(self) -> int:
        """Bytes of KV of finished prompts, kept for prompts that begin alike. Readable from any thread."""
        return 0

    @abstractmethod
    def warm_up(self) -> None:
        """Run a few tokens, so that the framework's one-time work does not delay the first request."""

    @abstractmethod
    def logits(self, tokens: Sequence[int], last: int, *, chunk_tokens: int | None = None) -> Logits:
        """Logits [last, vocab] after each of the last `last` tokens, which are given, not generated. For `verify`.
        chunk_tokens: the tokens before them in pieces of so many."""

    def likeliest(self, tokens: Sequence[int], last: int) -> Sequence[int]:
        """The likeliest next token after each of the last `last` tokens."""
        return [int(token) for token in self.logits(tokens, last).argmax(-1)]

    def evidence(self) -> Evidence:
        return gather(self.tokenizer, self.info.layout, self.info.profile.context, self.likeliest)

    def probe(self) -> PrefillRun:
        """A run of two tokens, which shows that the engine computes."""
        return self.start_answer(AnswerRequest([0, 0], ONE_TOKEN), lambda token: None)

    def close(self) -> None:  # noqa: B027 - most engines have nothing to end
        """End what the engine runs beside its caller's thread. No run may be used after it."""


class EmittingEngine(PrefillEngine):
    """Computes KV and passes it to its caller."""

    @abstractmethod
    def start(
        self,
        tokens: Sequence[int],
        emit: Callable[[Block], None],
        *,
        start: int = 0,
        wire: WireForm = AS_IS,
        salt: str = "",
        chunk_tokens: int | None = None,
        layers: int | None = None,
    ) -> PrefillRun:
        """A run that computes the KV of tokens and emits each layer's new rows as soon as they are computed. `emit` is
        called from inside the computation, and here for rows that are held; an exception in it ends the run.

        tokens: the prompt without its last token; may be empty. Only rows from `start` on that the layout keeps for
        len(tokens) tokens are emitted, in the form `wire`. salt: only prompts with the same salt share held KV.

        layers: only the model's first so many layers are computed, and the prompt is emitted in chunks that can be used
        one by one: of each chunk the rows that the layout keeps at its end, then the hidden states after the last of
        these layers, unless they are all, then a ChunkEnd. States come with the last chunk. KV that
        is held of other layers is not used, nor are hidden states held: a head computes all tokens from `start` on.
        """

    def prefill(
        self,
        tokens: Sequence[int],
        emit: Callable[[Block], None],
        *,
        cancelled: Callable[[], bool] = _never,
        chunk_tokens: int | None = None,
        wire: WireForm = AS_IS,
        layers: int | None = None,
    ) -> PrefillTiming:
        """`start`, computed to its end. Raises Cancelled between chunks."""
        with closing(self.start(tokens, emit, wire=wire, chunk_tokens=chunk_tokens, layers=layers)) as run:
            while not run.done:
                if cancelled():
                    computed = len(tokens) - run.remaining
                    raise Cancelled(f"the request was cancelled after {computed} of {len(tokens)} prompt tokens")
                run.step()
            return run.timing

    def warm_up(self) -> None:
        """A prompt of the layers that are loaded; with all of them, an answer, and the engine's evidence."""
        tokens = [0] * min(64, self.info.profile.context - 2)
        if self.info.loaded is not None:
            self.prefill(tokens, lambda block: None, layers=self.info.loaded)
            return
        for _ in self.generate(tokens, Sampling(max_tokens=2, ignore_eos=True)):
            pass
        self.info = replace(self.info, evidence=self.evidence())

    def probe(self) -> PrefillRun:
        """A run of two tokens without an answer, for engines that compute none."""
        return self.start([0, 0], lambda block: None, layers=self.info.loaded)


class SendingRun(PrefillRun, Protocol):
    """A PrefillRun whose KV the engine sends."""

    def sent(self) -> SentKV:
        """What the transfer took, once the decode host has acknowledged all of it. Waits until then, on any thread;
        raises what ended the transfer."""
        ...


class SendingEngine(PrefillEngine):
    """Computes KV and sends it: one whose workers may be other processes, each with a part of the KV."""

    @abstractmethod
    def send(
        self, tokens: Sequence[int], to: tuple[str, int], header: Header, *, deadline: float, next_token: int, salt: str
    ) -> SendingRun:
        """A run that computes the KV of tokens and sends it to the decode host at `to`. header: that of the whole
        transfer. Its `start`, `wire` and ticket apply, each worker states its own part. next_token: follows `tokens` in
        the prompt. Closing the run before its end gives the transfer up."""


class PromptRun(ABC):
    """A PrefillRun of a prompt of `tokens` tokens, whose first ones are held. chunk_tokens: the most per step."""

    def __init__(self, tokens: int, held: int, chunk_tokens: int) -> None:
        self._tokens, self._chunk_tokens = tokens, chunk_tokens
        self.held = held
        self.remaining = tokens - held
        self._started = time.monotonic()
        self._steps: list[ComputeStep] = []

    @property
    def done(self) -> bool:
        return self.remaining == 0

    @property
    def timing(self) -> PrefillTiming:
        return PrefillTiming(self._started, self._tokens - self.remaining - self.held, tuple(self._steps))

    def step(self, max_tokens: int | None = None) -> None:
        began, first = time.monotonic(), self._tokens - self.remaining
        end = min(self._tokens, first + min(max_tokens or self._chunk_tokens, self._chunk_tokens))
        self._compute(first, end)
        self.remaining = self._tokens - end
        self._steps.append(ComputeStep(began, time.monotonic()))
        if self.done:
            self._end()

    def close(self) -> None:  # noqa: B027 - a run need not hold anything
        """Let go of what the run holds."""

    @abstractmethod
    def _compute(self, first: int, end: int) -> None:
        """Compute tokens [first, end), and wait for the end of it."""

    def _end(self) -> None:  # noqa: B027 - as above
        """All tokens are computed."""


class PromptAndAnswer(ABC):
    """A PrefillRun. prompt: computes what comes before the first token of the answer. emit: gets each token."""

    def __init__(self, prompt: PrefillRun, emit: Callable[[Token], None]) -> None:
        self._prompt = prompt
        self._emit = emit
        self.held = prompt.held
        self._timing = prompt.timing
        self._begun = False

    @property
    def remaining(self) -> int:
        return self._prompt.remaining

    @property
    @abstractmethod
    def done(self) -> bool:
        pass

    @property
    def timing(self) -> PrefillTiming:
        """The prompt's timing, with the first token of the answer as its last step."""
        return self._timing

    def step(self, max_tokens: int | None = None) -> None:
        if self._prompt.remaining:
            self._prompt.step(max_tokens)
            self._timing = self._prompt.timing
            return
        began = time.monotonic()
        token = self._next()
        if not self._begun:
            self._begun, self._timing = True, self._timing.plus(began, time.monotonic())
        self._emit(token)

    def close(self) -> None:
        self._prompt.close()

    @abstractmethod
    def _next(self) -> Token:
        """Compute the next token of the answer."""
