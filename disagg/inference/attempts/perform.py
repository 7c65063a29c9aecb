"""Performs one attempt: a hand-off between two hosts, or the whole request on one."""

from __future__ import annotations

from contextlib import ExitStack

from disagg.api.requests import DecodeBody, GenerateBody
from disagg.inference.attempt import Attempt
from disagg.inference.attempts.answer import ArrivingAnswer, AttemptOutcome
from disagg.inference.attempts.caller import HostCaller, new_id
from disagg.inference.attempts.handoff import hand_off
from disagg.inference.http import host_calls
from disagg.inference.http.connections import Connections
from disagg.whole.answers import WholeAnswer


async def perform(
    caller: HostCaller, attempt: Attempt, body: GenerateBody | DecodeBody, answer: ArrivingAnswer
) -> AttemptOutcome:
    """The rest of the answer; a hand-off has a DecodeBody. Raises PrefillFailed, or the DisaggError of the answering
    host."""
    with ExitStack() as leases:
        if attempt.prefill and isinstance(body, DecodeBody):
            return await hand_off(caller, attempt, body, answer, leases)
        call = caller.call(
            attempt.answering,
            "/generate",
            body,
            leases,
            request_id=new_id(answer),
            reported=answer.reported,
        )
        async with host_calls.events(caller.http, call) as events:
            answer.trace.requested = call.written
            return AttemptOutcome(await events.to_end(answer.take))


async def perform_whole(http: Connections, call: host_calls.WholeCall, answer: ArrivingAnswer) -> AttemptOutcome:
    """The whole answer of a whole-request host. Raises the host's error."""
    arriving = WholeAnswer(call.host.name, one_call=call.request.body.get("parallel_tool_calls") is False)
    begun = False

    def opened() -> None:
        answer.trace.requested = call.written
        answer.enter("prefill")

    def take(piece: bytes) -> bool:
        nonlocal begun
        if (event := arriving.take(piece)) is not None:
            begun = True
            answer.take(event)
        return begun

    await host_calls.whole_answer(http, call, opened, take)
    done = arriving.done()
    answer.take(done)
    return AttemptOutcome(done, warnings=tuple(arriving.warnings))
