"""The gateway: several requests at once, their answers as typed values, retries while hosts are away."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import openai
from pydantic import BaseModel, ConfigDict, ValidationError

from grader.errors import ModelError
from grader.prompts import ANSWER_TOKENS

RETRIED: Final = (408, 409, 429, 500, 502, 503, 504)
MAX_WAIT_S: Final = 10.0
CHECK_S: Final = 10.0
MAX_ROOM: Final = 24_000
LEAST_TOKENS: Final = 50
"""Whose computation makes a speed: fewer cost more for the start than for themselves."""
OVERHEAD_TOKENS: Final = 2500
"""Of the instructions, the rubric and the chat template."""

Answer = TypeVar("Answer", bound=BaseModel)


class ModelRun(BaseModel):
    """One request. Times in seconds, speeds in tokens per second; None if the gateway did not state it."""

    model_config = ConfigDict(frozen=True)

    role: str
    model: str
    seconds: float
    method: str = ""
    prefill_server: str | None = None
    decode_server: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft: float | None = None
    prefill_speed: float | None = None
    decode_speed: float | None = None
    simulated: bool = False
    fallback: str = ""
    retries: int = 0
    error: str = ""

    @property
    def hosts(self) -> str:
        """Without a hand-off there is one."""
        return " and ".join(name for name in (self.prefill_server, self.decode_server) if name)

    @property
    def speed(self) -> str:
        """As far as the gateway stated it, to follow the hosts."""
        stated = (
            ("TTFT {:.2f} s", self.ttft),
            ("prefill {:.0f} tokens/s", self.prefill_speed),
            ("decode {:.0f} tokens/s", self.decode_speed),
        )
        return "".join(f", {text.format(value)}" for text, value in stated if value is not None)


@dataclass(frozen=True, slots=True)
class Reply:
    """content: None if the model's answer cannot be used; run.error says why."""

    content: str | None
    run: ModelRun


@dataclass(frozen=True, slots=True)
class Replies:
    """efficiency: sum of the answers' times / (longest x number), as the gateway states it; None if one was retried."""

    replies: tuple[Reply, ...]
    wall: float
    efficiency: float | None


class Gateway:
    """url: with /v1. deadline: seconds for one set of requests, with all retries. waits_for: why the last request is
    repeated, for people who look on; "" once one is answered."""

    def __init__(self, url: str, key: str = "unused", *, deadline: float = 300.0) -> None:
        self._client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=deadline)
        self._deadline = deadline
        self._contexts: dict[str, int] = {}
        self.waits_for = ""

    async def close(self) -> None:
        await self._client.close()

    async def check(self) -> None:
        """Raises ModelError if no gateway answers at this address now, or if it refuses the key: later, while a batch
        runs, both may pass, and are waited for."""
        answer, reason = await self._get_models(CHECK_S)
        if not answer:
            raise ModelError(f"{reason}; start `disagg serve`, or name another gateway with --gateway")

    async def rooms(self, models: Sequence[str]) -> dict[str, int]:
        """By model, characters of a student's text that fit its context: a token may be as short as one.

        Raises ModelError if the gateway does not serve one of them, or does not answer before the deadline.
        """
        began, attempts = time.monotonic(), itertools.count()
        while missing := set(models) - self._contexts.keys():
            answer, reason = await self._get_models()
            self._contexts |= contexts(answer)
            if answer and (unknown := missing - self._contexts.keys()):
                raise ModelError(f"the gateway does not serve {', '.join(sorted(unknown))}")
            if not answer:
                await self._wait(next(attempts), began, reason)
        return {model: room(self._contexts[model]) for model in models}

    async def ask(self, requests: Sequence[Mapping[str, Any]]) -> Replies:
        """All at once. Raises ModelError if one has no answer before the deadline."""
        began = time.monotonic()
        found: dict[int, Reply] = {}
        efficiency: float | None = None
        for attempt in itertools.count():
            left = [index for index in range(len(requests)) if index not in found]
            answer, reason = await self._send([requests[index] for index in left], began)
            for result in answer.get("results", []):
                index = left[result["index"]]
                if result["status"] not in RETRIED:
                    found[index] = reply(requests[index], result, attempt)
                reason = str(result["body"].get("error", {}).get("message", reason))
            if attempt == 0 and len(found) == len(requests):
                efficiency = answer["disagg"]["efficiency"]
            if len(found) == len(requests):
                break
            await self._wait(attempt, began, reason)
        ordered = tuple(found[index] for index in range(len(requests)))
        return Replies(ordered, time.monotonic() - began, efficiency)

    async def _send(self, requests: Sequence[Mapping[str, Any]], began: float) -> tuple[dict[str, Any], str]:
        """The answer, or nothing and why it is worth another try."""
        left = max(1.0, self._deadline - (time.monotonic() - began))
        body = {"requests": list(requests)}
        return await self._answer(self._client.with_options(timeout=left).post("/parallel", cast_to=object, body=body))

    async def _get_models(self, seconds: float = 30) -> tuple[dict[str, Any], str]:
        """The same."""
        return await self._answer(self._client.with_options(timeout=seconds).get("/models", cast_to=object))

    async def _answer(self, request: Awaitable[object]) -> tuple[dict[str, Any], str]:
        try:
            answer = dict(await request)  # type: ignore[call-overload,unused-ignore]  # JSON; if openai is installed
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                raise ModelError(f"the gateway refuses the key: set $GRADER_KEY ({error.message})") from error
            if error.status_code not in RETRIED:
                raise ModelError(f"the gateway refused the request: {error.message}") from error
            self.waits_for = error.message
            await asyncio.sleep(retry_after(error.response.headers.get("retry-after")))
            return {}, error.message
        except openai.APIConnectionError as error:
            self.waits_for = f"no answer from the gateway at {self._client.base_url}: {error}"
            return {}, self.waits_for
        self.waits_for = ""
        return answer, ""

    async def _wait(self, attempt: int, began: float, reason: str) -> None:
        if time.monotonic() - began > self._deadline:
            raise ModelError(f"no answer after {self._deadline:.0f} s: {reason}")
        await asyncio.sleep(min(MAX_WAIT_S, 0.5 * 2 ** min(attempt, 10)))


def contexts(listed: Mapping[str, Any]) -> dict[str, int]:
    """Tokens of the longest request by name and alias, of GET /models."""
    models = listed.get("data", [])
    return {
        name: int(model.get("max_model_len") or 0)
        for model in models
        for name in (model["id"], *model.get("aliases", []))
    }


def reply(request: Mapping[str, Any], result: Mapping[str, Any], retries: int) -> Reply:
    """One result of /v1/parallel. Pure."""
    run = {"role": request["id"], "model": request["model"], "seconds": result["seconds"], "retries": retries}
    if result["status"] != 200:
        return Reply(None, ModelRun(**run, error=str(result["body"]["error"]["message"])[:300]))
    choice = result["body"]["choices"][0]
    facts, usage = choice.get("disagg") or {}, result["body"].get("usage") or {}
    cut = choice["finish_reason"] == "length"
    return Reply(
        None if cut else choice["message"]["content"],
        ModelRun(
            **run,
            **{name: facts[name] for name in _STATED if facts.get(name) is not None},
            **speeds(facts, usage),
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens", 0),
            fallback="; ".join(map(str, facts.get("warnings") or []))[:300],
            error=f"the answer is longer than {ANSWER_TOKENS} tokens" if cut else "",
        ),
    )


_STATED = ("method", "prefill_server", "decode_server", "ttft", "simulated")


def speeds(facts: Mapping[str, Any], usage: Mapping[str, Any]) -> dict[str, float]:
    """Tokens per second, as far as the gateway stated the times: of prompt tokens whose KV was not held, if they are
    some, and of those of the answer after the first."""
    held = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    computed, prefill = usage.get("prompt_tokens", 0) - held, (facts.get("ttft_parts") or {}).get("prefill") or 0.0
    if computed < LEAST_TOKENS:
        computed = 0
    generated, decode = (
        usage.get("completion_tokens", 0) - 1,
        (facts.get("total_time") or 0.0) - (facts.get("ttft") or 0.0),
    )
    found = {"prefill_speed": (computed, prefill), "decode_speed": (generated, decode)}
    return {name: tokens / seconds for name, (tokens, seconds) in found.items() if tokens > 0 and seconds > 0}


def typed(given: Reply, kind: type[Answer]) -> tuple[Answer | None, ModelRun]:
    """The answer as `kind`, or None and a run with the error."""
    if given.content is None:
        return None, given.run
    try:
        return kind.model_validate_json(given.content), given.run
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        return None, given.run.model_copy(
            update={"error": f"the answer does not fit its schema: {where}: {fault['msg']}"}
        )


def retry_after(header: str | None) -> float:
    """Seconds to wait, at most MAX_WAIT_S."""
    try:
        return min(MAX_WAIT_S, max(0.0, float(header or 0)))
    except ValueError:
        return 0.0


def room(context: int) -> int:
    """Characters of a student's text in a prompt of this context."""
    return max(1000, min(MAX_ROOM, context - ANSWER_TOKENS - OVERHEAD_TOKENS))
