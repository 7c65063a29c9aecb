"""Performs an attempt on a whole-request host: OpenAI's API in, events of ours out."""

from __future__ import annotations

from contextlib import aclosing

from disagg.inference.attempts.answer import ArrivingAnswer, AttemptOutcome
from disagg.inference.http import whole
from disagg.inference.http.connections import Connections
from disagg.whole.stream import WholeAnswer


async def perform(http: Connections, call: whole.WholeCall, answer: ArrivingAnswer) -> AttemptOutcome:
    """The whole answer. Raises the host's error."""
    arriving = WholeAnswer(call.host.name)
    async with whole.pieces(http, call) as pieces:
        answer.trace.requested = call.written
        answer.enter("prefill")
        async with aclosing(pieces):
            async for piece in pieces:
                if (event := arriving.take(piece)) is not None:
                    call.begun = True
                    answer.take(event)
    done = arriving.done()
    answer.take(done)
    return AttemptOutcome(done, warnings=tuple(arriving.warnings))
