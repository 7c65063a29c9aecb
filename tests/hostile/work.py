"""The work that a request makes a host do beside its engine, and the most that it takes. `test_work` puts every row
under hostile input; a new parser or option of requests has a row here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Place = Literal["event loop", "thread", "process"]
CONTEXT: Final = 16_384
"""Tokens of the model for which the figures are: its requests have 1 MiB at most. They grow with the context."""
_BODY: Final = "disagg.http.requests:body_bounds"
_THREADS: Final = "disagg.servers.host.work:BOUNDS"
_CALL: Final = "disagg.servers.output.tool_calls:MAX_CALL_CHARS"


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of work. place: the event loop, for which everybody waits; a thread of `work.RequestWork`; a process
    that is ended. seconds: of the CPU, for one request, or for one token of its answer. mib: of memory meanwhile.
    bounds: the values that it follows from, module:name."""

    name: str
    place: Place
    seconds: float
    mib: float
    bounds: tuple[str, ...]
    per: Literal["request", "token"] = "request"


WORK: Final = (
    Work("JSON of a body", "event loop", 0.15, 16, (_BODY,)),
    Work("chat template", "thread", 0.5, 48, (_BODY, "disagg.api.requests:MAX_MESSAGES", _THREADS)),
    Work("text to tokens", "thread", 0.6, 256, (_BODY, "disagg.engines.model.text:CHARS_PER_TOKEN", _THREADS)),
    Work("ids of a prompt", "thread", 0.1, 32, (_BODY, "disagg.api.sampling:MAX_TOKENS", _THREADS)),
    Work("logit_bias", "event loop", 0.001, 1, ("disagg.api.sampling:MAX_BIASES",)),
    Work("bad words", "thread", 0.1, 16, ("disagg.api.sampling:MAX_BAD_WORDS", _THREADS)),
    Work("bans", "event loop", 0.0001, 2, ("disagg.api.sampling:MAX_BAD_WORDS",), per="token"),
    Work("text of a form, before it is compiled", "thread", 0.1, 8, ("disagg.api.requests:MAX_SCHEMA_BYTES", _THREADS)),
    Work("stop strings", "event loop", 0.00005, 4, ("disagg.api.sampling:Sampling",), per="token"),
    Work("log-probabilities", "event loop", 0.00005, 1, ("disagg.api.sampling:Sampling",), per="token"),
    Work(
        "schema, before it is compiled", "thread", 0.1, 16, ("disagg.engines.model.matchers.limits:MAX_PARTS", _THREADS)
    ),
    Work(
        "form of an answer, with its patterns",
        "process",
        3.0,
        256,
        ("disagg.engines.model.matchers.limits:FormLimits",),
    ),
    Work(
        "parts of an answer", "event loop", 0.00002, 2, ("disagg.servers.output.marked:MAX_BLANKS", _CALL), per="token"
    ),
    Work("calls of tools", "event loop", 0.3, 32, ("disagg.servers.output.tool_calls:PARSE_S", _CALL)),
    Work("tokens of an answer that goes on", "event loop", 0.02, 2, ("disagg.servers.output.answer:RESUMED_AT_ONCE",)),
    Work("images", "event loop", 0.001, 1, ("disagg.api.requests:ChatMessage",)),
)
"""Tokens of an answer that goes on: for one turn of the event loop. Bans: on the engine's thread, for which all answers
wait. Images are refused."""
