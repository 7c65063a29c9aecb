"""Runs one request: its answers come from AsyncClient, all at the same time, and leave as one sequence of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from disagg.api.requests import MAX_SCORES
from disagg.errors import CapabilityMissing, DisaggError, RequestError, ServerUnavailable, Unauthorized
from disagg.gateway.dialects.base import (
    AnswerEvent,
    AnswerPiece,
    CountedPrompt,
    Finished,
    GatewayRequest,
    ScoredPrompt,
    Scoring,
)
from disagg.gateway.watch.request import ObservedRequest
from disagg.inference.client import AsyncClient
from disagg.inference.several import together
from disagg.inference.stream import AsyncStream
from disagg.inference.types import Chunk, Completion, PromptScores, Stage

MAX_ID = 47  # of the 64 characters of an id on a host: an attempt's own id follows
COUNT_S = 30.0
"""How long counting the tokens of a prompt may take."""


async def run(client: AsyncClient, observed: ObservedRequest) -> AsyncGenerator[AnswerEvent, None]:
    """The events of all answers. Raises a DisaggError if one fails; closing the generator cancels all.

    observed: gets the events, and has recorded each answer before its end is yielded.
    """
    head, request = observed.head, observed.head.request
    request_id, context = head.request_id[:MAX_ID], client.fleet.model(request.model).context

    with _own_token():
        async with AsyncExitStack() as stack:

            async def opened(choice: int) -> AsyncStream:
                arguments = request.arguments(choice)
                watch = partial(observed.entered, choice)
                stream = client.stream(**arguments, watch=watch, request_id=request_id, via=head.via)
                return await stack.enter_async_context(stream)

            asking = _Asking(opened, _Scores(client, observed, request_id).of, observed, context)
            begun = [_BegunPrompt() for _ in request.prompts]
            answers = [
                _answer(choice, asking, begun[choice // request.n], first=choice % request.n == 0)
                for choice in range(request.choices)
            ]
            async with aclosing(answers[0] if len(answers) == 1 else together(answers)) as events:
                async for event in events:
                    yield event


async def unless(
    given_up: asyncio.Future[DisaggError], events: AsyncGenerator[AnswerEvent, None]
) -> AsyncGenerator[AnswerEvent, None]:
    """The events. Before the first of them, `given_up` may have an error to raise instead."""
    async with aclosing(events):
        first = asyncio.ensure_future(anext(events, None))
        try:
            await asyncio.wait((first, given_up), return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                raise given_up.result()
        finally:
            first.cancel()
            await asyncio.wait((first,))
        event = first.result()
        while event is not None:
            yield event
            event = await anext(events, None)


async def counted(client: AsyncClient, request: GatewayRequest, *, lists_tokens: bool) -> CountedPrompt:
    """The tokens of the request's first prompt. Raises a DisaggError."""
    arguments, context = request.arguments(0) | {"timeout": COUNT_S}, client.fleet.model(request.model).context
    with _own_token():
        if not lists_tokens:
            return CountedPrompt(request, await client.count_tokens(**arguments), (), context)
        tokens = await client.tokenize(**arguments)
        return CountedPrompt(request, len(tokens), tokens, context)


@contextmanager
def _own_token() -> Iterator[None]:
    """A host refuses the gateway's own token: that is no fault of the caller's key."""
    try:
        yield
    except Unauthorized as error:
        raise ServerUnavailable(error.message, error.hint) from error


@dataclass(frozen=True, slots=True)
class _Asking:
    """How one request is carried out. opened, scored: ask for an answer, and for the scores of its prompt. context: of
    the model, in tokens."""

    opened: Callable[[int], Awaitable[AsyncStream]]
    scored: Callable[[int, Scoring], Awaitable[PromptScores]]
    observed: ObservedRequest
    context: int


@dataclass(slots=True)
class _Scores:
    """The scores of a request's prompts. listed: log-probabilities that its answers list so far."""

    client: AsyncClient
    observed: ObservedRequest
    request_id: str
    listed: int = 0

    async def of(self, choice: int, scoring: Scoring) -> PromptScores:
        """Those of the prompt of this answer. Raises a DisaggError."""
        arguments, watch = self.observed.head.request.arguments(choice), partial(self.observed.entered, choice)
        try:
            scores = await self.client.score(**arguments, top=scoring.top or 0, watch=watch, request_id=self.request_id)
        except CapabilityMissing as error:
            raise CapabilityMissing(f"{scoring.field}: {error.message}", error.hint) from error
        except RequestError as error:
            if not error.message.startswith("top: "):
                raise
            message = error.message.replace("top: ", f"{scoring.field_of_top}: ", 1)
            raise RequestError(message, error.hint) from error
        self.listed += scoring.listed_of(len(scores.tokens))
        if self.listed > MAX_SCORES:
            raise RequestError(
                f"{scoring.field_of_top}: over {MAX_SCORES} log-probabilities of prompts",
                "lower it, shorten the prompts, or ask for fewer answers",
            )
        return scores


@dataclass(slots=True)
class _BegunPrompt:
    """A prompt. begun: is set once its first answer has begun. scores: if the caller wants them, before that."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    scores: PromptScores | None = None


async def _answer(
    choice: int, asking: _Asking, prompt: _BegunPrompt, *, first: bool
) -> AsyncGenerator[AnswerEvent, None]:
    """The events of one answer. first: of its prompt. The others are asked for once that one has begun, and go on
    from the prompt's KV, which the decode host then has."""
    observed, scoring, begun = asking.observed, asking.observed.head.request.scoring, prompt.begun
    if not first:
        await begun.wait()
    elif scoring is not None and scoring.top is not None:
        prompt.scores = await asking.scored(choice, scoring)
    if scoring is not None:
        yield ScoredPrompt(choice, prompt.scores.tokens if prompt.scores is not None else ())
    if scoring is not None and scoring.alone:
        assert prompt.scores is not None, "there is nothing else"
        completion = Completion("", (), "length", prompt.scores.metrics)
    else:
        stream = await asking.opened(choice)
        async for chunk in stream:
            begun.set()
            for piece in pieces(choice, [chunk, *stream.waiting()], observed.answers[choice].stage):
                observed.generated(choice, len(piece.tokens))
                yield piece
        completion = warned(stream.completion, observed.head.request, asking.context)
    begun.set()
    observed.completed(choice, completion)
    await observed.settle()
    yield Finished(choice, completion)


def warned(completion: Completion, request: GatewayRequest, context: int) -> Completion:
    """The answer with what its caller should know about the request, before what the hosts had to note. context: of
    the model, in tokens."""
    lowered, left = [], context - completion.metrics.prompt_tokens
    if request.longest is not None and request.options.get("fit_context") and request.longest > left:
        lowered.append(f"max_tokens: {request.longest} was lowered to {left}, which the context of {context} leaves")
    return replace(completion, warnings=(*request.left_out, *lowered, *completion.warnings))


def pieces(choice: int, chunks: Sequence[Chunk], stage: Stage | None) -> list[AnswerPiece]:
    """Chunks that arrived together, in as few pieces as keep their order: a gateway that is behind writes fewer events.
    Notes are left out: they are among the completion's warnings, too."""
    found: list[AnswerPiece] = []
    for chunk in chunks:
        if chunk.note:
            continue
        piece = AnswerPiece(choice, chunk.text, chunk.tokens, chunk.reasoning, chunk.tool_calls, stage)
        joined = found[-1].joined(piece) if found else None
        if joined is None:
            found.append(piece)
        else:
            found[-1] = joined
    return found
