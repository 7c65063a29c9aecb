"""From an engine's decode steps to the `tokens` and `done` events of one answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from disagg.api.events import FinishReason, TokenLogprob, TokensEvent
from disagg.api.requests import GenerateBody, ToolCall
from disagg.api.sampling import Sampling
from disagg.engines.base import DecodeTiming, PrefillEngine, Token
from disagg.engines.decoding import DecodeEngine
from disagg.engines.model.bans import ends_of
from disagg.engines.model.constraint import Constraint
from disagg.engines.model.text import PromptTokenizer
from disagg.errors import ModelError
from disagg.servers.host.feed import StepTokens, TokenFeed
from disagg.servers.host.request import ActiveRequest, SendNow
from disagg.servers.host.work import RequestWork
from disagg.servers.output.choose import output_of, thinking
from disagg.servers.output.grammar import grammar_of
from disagg.servers.output.part import Kind, Output, OutputPart

LEAST_LOGPROB = -9999.0
"""Sent for a token of probability 0: JSON has no infinity."""
RESUMED_AT_ONCE: Final = 64
"""Tokens of another host's answer that are read in one turn of the event loop."""


@dataclass(slots=True)
class GrowingAnswer:
    """One answer as it grows. one_call: it ends after its first tool call. silent: tokens that end it without their
    text. answered: tokens that it began with.
    completion_tokens: those included. called: whether it has a tool call. stop: the stop string that has ended it.
    name: the bytes of a token, if alternatives are reported. first_at, last_at: time.monotonic() when the engine had
    its first and last token."""

    output: Output
    one_call: bool = False
    silent: frozenset[int] = frozenset()
    answered: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    called: bool = False
    name: Callable[[int], bytes] | None = None
    finish_reason: FinishReason | None = None
    stop: str = ""
    timing: DecodeTiming = field(default_factory=DecodeTiming)
    first_at: float = 0.0
    last_at: float = 0.0

    async def resume(self, given: Sequence[int], sampling: Sampling, eos_ids: Collection[int]) -> None:
        """Begin with the tokens `given`, which another host has sent with their text. The answer is finished if they
        are all of it. The event loop has a turn after some of them: not on a thread, where a parser of tool calls
        could not be interrupted (`output.calls`)."""
        self.answered = self.completion_tokens = len(given)
        for number, token in enumerate(given, 1):
            self._note(self._pushed(token))
            self.reasoning_tokens += self.output.reasoning
            if number % RESUMED_AT_ONCE == 0:
                await asyncio.sleep(0)
        if self._complete or (given and given[-1] in ends_of(sampling, eos_ids)):
            self._finish("stop")
        elif len(given) >= sampling.max_tokens:
            self._finish("length")

    @property
    def generated_tokens(self) -> int:
        """Tokens that this host has generated."""
        return self.completion_tokens - self.answered

    @property
    def decode_s(self) -> float:
        return self.last_at - self.first_at

    def add(self, steps: Sequence[StepTokens]) -> Sequence[TokensEvent]:
        """Events for these steps, at least one; several if the parts of one would change their order. A token and its
        parts are in one event: another host that goes on after the token does not send them again. Sets `finish_reason`
        at the last token or a stop string; later tokens are dropped. Raises ModelError if a probability is NaN."""
        pieces = [_Piece()]
        for step in steps:
            self.timing, self.last_at = step.timing, step.at
            self.first_at = self.first_at or step.at
            for token in step.tokens:
                found = self._parts(token)
                if found and pieces[-1].tokens and pieces[-1].rank > min(_RANK[part.kind] for part in found):
                    pieces.append(_Piece())
                pieces[-1].add(_logprob(token, self.name), found)
                self.completion_tokens += 1
                if self.finish_reason:
                    break
            if self.finish_reason:
                break
        return [piece.event() for piece in pieces]

    def _parts(self, token: Token) -> Sequence[OutputPart]:
        """What became certain with this token."""
        found = self._note(self._pushed(token.id))
        self.reasoning_tokens += self.output.reasoning
        if self._complete or token.finish:
            found = [*found, *self._finish(token.finish or "stop")]
        return found

    def _pushed(self, token: int) -> Sequence[OutputPart]:
        return () if token in self.silent else self.output.push(token)

    @property
    def _complete(self) -> bool:
        """Whether the answer ends here, whatever the model would go on with."""
        return bool(self.output.stopped) or (self.one_call and self.called)

    def _note(self, found: Sequence[OutputPart]) -> Sequence[OutputPart]:
        """These parts, without those after the only call."""
        if self.one_call:
            first = next((at for at, part in enumerate(found, 1) if part.call), len(found))
            found = () if self.called else found[:first]
        self.called = self.called or any(part.call for part in found)
        return found

    def _finish(self, reason: FinishReason) -> Sequence[OutputPart]:
        """What the output held back. Text that it held may be a stop string, too."""
        found = self._note(self.output.finish())
        self.stop = self.output.stopped
        reason = "stop" if self._complete else reason
        self.finish_reason = "tool_calls" if self.called and reason == "stop" else reason
        return found


_RANK: Final[Mapping[Kind, int]] = {"reasoning": 0, "text": 1, "call": 2}
"""The order of a TokensEvent's fields."""


@dataclass(slots=True)
class _Piece:
    """A TokensEvent to be. rank: of the last part that it has."""

    tokens: list[TokenLogprob] = field(default_factory=list)
    reasoning: str = ""
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    rank: int = 0

    def add(self, token: TokenLogprob, found: Sequence[OutputPart]) -> None:
        self.tokens.append(token)
        for kind, text, call in found:
            self.rank = max(self.rank, _RANK[kind])
            if call is not None:
                self.calls.append(call)
            elif kind == "text":
                self.text += text
            else:
                self.reasoning += text

    def event(self) -> TokensEvent:
        return TokensEvent(self.text, tuple(self.tokens), self.reasoning, tuple(self.calls))


async def rest_of(
    answer: GrowingAnswer,
    feed: TokenFeed,
    events: Callable[[Sequence[StepTokens]], Sequence[TokensEvent]],
    send_now: SendNow,
) -> AsyncGenerator[TokensEvent, None]:
    """The events of an answer from its second step on, which are sent as the steps arrive. What cannot be sent then,
    because the caller is slow, is yielded. events: those of some steps."""

    def take(steps: Sequence[StepTokens]) -> bool:
        if answer.finish_reason is None and not send_now(lambda: events(steps)):
            return False
        if answer.finish_reason is not None:
            feed.wake()
        return True

    feed.take = take
    while answer.finish_reason is None:
        if steps := await feed.steps():
            for event in events(steps):
                yield event


async def begin_answer(
    request: ActiveRequest, engine: PrefillEngine | DecodeEngine, body: GenerateBody, work: RequestWork
) -> GrowingAnswer:
    """The answer to a request, with the tokens that another host has sent. Sets the request's constraint and
    hold_prompt. Long work is done in pieces, on a thread of `work`, or in the processes of forms."""
    output = output_of(body, request.tokens[: request.prompt_tokens], engine.tokenizer)
    sampling = request.sampling
    silent = () if sampling.include_stop_str_in_output else sampling.stop_token_ids
    answer = GrowingAnswer(output, one_call=not body.parallel_tool_calls, silent=frozenset(silent))
    request.hold_prompt = body.hold_prompt
    if request.sampling.logprobs is not None:
        answer.name = engine.tokenizer.token_bytes
    given = request.tokens[request.prompt_tokens :]
    if given:
        await answer.resume(given, request.sampling, engine.info.eos_ids)
    if answer.finish_reason is None:
        request.constraint = await constraint_of(request, engine.tokenizer, body, work)
    return answer


async def constraint_of(
    request: ActiveRequest, tokenizer: PromptTokenizer, body: GenerateBody, work: RequestWork
) -> Constraint | None:
    """The form that the rest of the answer must have, after what was given of it; None if it may have any."""
    form = tokenizer.format
    if body.form is None and not body.must_call:
        return None
    read = work.run(body.share, partial(grammar_of, body, form))
    grammar = await request.within_deadline(read, "the form of the answer was not read")
    assert grammar is not None
    prompt, given = request.tokens[: request.prompt_tokens], request.tokens[request.prompt_tokens :]
    after = form.think[1] if form.think and body.messages is not None and thinking(prompt, tokenizer, form) else ""
    field = body.form[0] if body.form is not None else "json_schema"
    compiled = tokenizer.constrain(grammar, given, after, body.cache_salt, field)
    constraint = await request.within_deadline(compiled, "the form of the answer was not compiled")
    request.cleanup.callback(constraint.close)
    return constraint


def _logprob(token: Token, name: Callable[[int], bytes] | None) -> TokenLogprob:
    top = tuple((id, finite(logprob)) for id, logprob in token.top) if token.top else ()
    if name is None:
        return TokenLogprob(token.id, finite(token.logprob), top)
    return TokenLogprob(token.id, finite(token.logprob), top, name(token.id), tuple(name(id) for id, _ in top))


def finite(logprob: float) -> float:
    """The number as JSON can hold it. Raises ModelError if it is NaN, which callers would read as a broken event."""
    if math.isnan(logprob):
        raise ModelError(
            "the model computed a NaN probability: its weights or its dtype are wrong",
            "use another dtype, or check the weights with `disagg verify`",
        )
    return max(logprob, LEAST_LOGPROB)
