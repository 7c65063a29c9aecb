"""Performs an attempt on a whole-request host: OpenAI's API in, events of ours out."""

from __future__ import annotations

from contextlib import aclosing

from disagg.inference.attempts.answer import ArrivingAnswer, AttemptOutcome
from disagg.inference.http import whole
from disagg.inference.http.connections import Connections
from disagg.whole.stream import Answer


async def perform(http: Connections, asked: whole.Asked, answer: ArrivingAnswer) -> AttemptOutcome:
    """The whole answer. Raises the host's error."""
    arriving = Answer(asked.host.name)
    async with whole.pieces(http, asked) as pieces:
        answer.trace.requested = asked.written
        answer.enter("prefill")
        async with aclosing(pieces):
            async for piece in pieces:
                if (event := arriving.take(piece)) is not None:
                    asked.begun = True
                    answer.take(event)
    done = arriving.done()
    answer.take(done)
    return AttemptOutcome(done, warnings=tuple(arriving.warnings))
