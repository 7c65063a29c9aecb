"""Runs cells of the fault matrix on a fleet, and judges each: how it ended, when, and what it left behind."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from disagg.errors import DisaggError
from disagg.inference.client import AsyncClient
from disagg.inference.types import Completion, unwatched
from tests.faults import process
from tests.faults.cells import Cell, Ending, Lacking
from tests.faults.fleet import KV, MODEL, FaultFleet
from tests.faults.flow import Fault
from tests.faults.linked import JUMP_S, LinkedFleet, Moment
from tests.faults.proxy import Injection
from tests.hostile.schemas import POISONS

DEADLINE_S: Final = 40.0
ANSWER_TOKENS: Final = 160
MOST_LOST: Final = 2  # hosts, with one request
PROMPT_TOKENS: Final = 480
PROMPTS: Final = 5  # tried for one cell
NO_FAULT: Final = Fault("call", times=0)
LIMITS: Final[Mapping[Lacking, Callable[[int], AbstractContextManager[None]]]] = {
    "no descriptors": process.without_descriptors,
    "no memory": process.without_memory,
    "disk full": process.without_disk,
}
SAMPLINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "greedy": {"max_tokens": ANSWER_TOKENS, "ignore_eos": True},
    "sampled": {"max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0.8, "top_p": 0.95, "seed": 7},
}


@dataclass(slots=True)
class Result:
    """How one cell ended. seconds: from the fault, or from the beginning if it was there before, to the end of the
    request. next_token_s: from the fault to the next token, None if no token came after it. problems: what must not
    be; empty if the cell holds."""

    cell: Cell
    sampling: str
    ending: Ending
    detail: str
    seconds: float
    next_token_s: float | None
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """What a caller received: token ids with their times of arrival, then the completion or the error."""

    started: float = field(default_factory=time.monotonic)
    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    completion: Completion | None = None
    error: BaseException | None = None
    ended: float = 0.0


@dataclass(slots=True)
class Matrix:
    """The fleet, and how many prompts it has had. Each cell has one of its own: hosts refuse for minutes what has ended
    two of them."""

    fleet: FaultFleet
    prompts: int = 0

    def run(self, cell: Cell, sampling: str) -> Result:
        """One request through the cell's fault. Heals the fleet afterwards."""
        prompt, expected = self._prompt(sampling)
        before = self.fleet.held()
        try:
            run = _on_cables if isinstance(self.fleet, LinkedFleet) else _through_proxies
            answer, struck = run(self.fleet, cell, _options(cell, sampling, prompt))
        finally:
            lost = len(self.fleet.broken)
            self.fleet.heal()
        result = _result(cell, sampling, answer, answer.started if struck is None else struck)
        if lost > MOST_LOST:
            result.problems.append(f"{lost} hosts were lost")
        if struck is None and not (cell.lacking or cell.lie or cell.schema):
            result.problems.append("the fault did not strike")
        if answer.completion and answer.ids != expected:
            result.problems.append(f"wrong tokens: {_difference(answer.ids, expected)}")
        if not answer.completion and answer.ids != expected[: len(answer.ids)]:
            result.problems.append("wrong tokens before the error")
        result.problems += self.fleet.wait_idle(before)
        return result

    def _prompt(self, sampling: str) -> tuple[tuple[int, ...], list[int]]:
        """A new prompt and its answer, which each host alone gives too. One in about 2,000 tokens of sampled answers is
        another one there: the random number lies between two tokens to within rounding (disagg/engines/model/draw.py).
        """
        others: Sequence[Mapping[str, str]] = (
            () if sampling == "greedy" else ({"alone": "prefill"}, {"alone": "decode"})
        )
        for _ in range(PROMPTS):
            prompt = tuple(10 + (self.prompts + n) * 37 % 600 for n in range(PROMPT_TOKENS))
            self.prompts += 1
            expected = _undisturbed(self.fleet, sampling, prompt)
            if all(_undisturbed(self.fleet, sampling, prompt, **how) == expected for how in others):
                return prompt, expected
        raise AssertionError(f"{PROMPTS} prompts are answered otherwise by a host alone")


def broken(cell: Cell, sampling: str, error: Exception) -> Result:
    """The result of a cell after which the fleet did not heal."""
    return Result(cell, sampling, "error", repr(error), 0.0, None, ["the fleet did not heal"])


def _through_proxies(fleet: FaultFleet, cell: Cell, options: Mapping[str, Any]) -> tuple[Answer, float | None]:
    """The answer, and when the fault struck."""
    with _prepared(fleet, cell) as injection:
        answer = asyncio.run(_caller(fleet.client, options))
    return answer, injection.struck[0][0] if injection.struck else None


def _on_cables(fleet: FaultFleet, cell: Cell, options: Mapping[str, Any]) -> tuple[Answer, float | None]:
    """The answer, and when the fault struck."""
    assert isinstance(fleet, LinkedFleet)

    def strike(hosts: Mapping[str, str]) -> None:
        name = hosts[cell.side]
        match cell.process:
            case "link cut":
                fleet.cut_link(name)
            case "link cut for 2 s":
                fleet.cut_link(name, 2.0)
            case "clock an hour fast":
                fleet.clocks[name].jump(JUMP_S)
            case "clock an hour slow":
                fleet.clocks[name].jump(-JUMP_S)

    moment = Moment(fleet, cell.state, strike)
    answer = asyncio.run(_caller(fleet.client, options, moment))
    return answer, moment.struck[0] if moment.struck else None


def _undisturbed(fleet: FaultFleet, sampling: str, prompt: tuple[int, ...], **how: Any) -> list[int]:
    answer = asyncio.run(_caller(fleet.client, {**SAMPLINGS[sampling], "tokens": prompt, **how}))
    assert answer.error is None, answer.error
    return answer.ids


def _options(cell: Cell, sampling: str, prompt: tuple[int, ...]) -> Mapping[str, Any]:
    split = "off" if cell.split is None else cell.split
    options = {**SAMPLINGS[sampling], "tokens": prompt, "split": split}
    if cell.policy == "fail":
        options["on_kv_failure"] = "fail"
    if cell.schema is not None:
        options["json_schema"] = POISONS[cell.schema]
    return options


async def _caller(make: Callable[[], AsyncClient], options: Mapping[str, Any], moment: Moment | None = None) -> Answer:
    """One request. Fails if the client leaves a task behind."""
    watch = moment.stage if moment else unwatched
    answer = Answer()
    async with make() as client:
        try:
            async with asyncio.timeout(DEADLINE_S + 10):
                salt = secrets.token_hex(8)  # KV that a host holds of an earlier request would not be sent
                stream = client.stream(MODEL, timeout=DEADLINE_S, cache_salt=salt, watch=watch, **options)
                async with stream:
                    async for chunk in stream:
                        answer.ids += [token.id for token in chunk.tokens]
                        answer.times += [chunk.arrived] * len(chunk.tokens)
                        if moment:
                            moment.tokens(len(chunk.tokens))
            answer.completion = stream.completion
        except Exception as error:  # noqa: BLE001 - judged by the caller
            answer.error = error
        answer.ended = time.monotonic()
    await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    if left:
        answer.error = answer.error or AssertionError(f"tasks left: {left}")
    return answer


def _result(cell: Cell, sampling: str, answer: Answer, struck: float) -> Result:
    ending, detail, problems = _judged(cell, answer)
    seconds = answer.ended - struck
    later = [at - struck for at in answer.times if at > struck]
    if not cell.lacking and seconds > cell.within_s:
        problems.append(f"ended {seconds:.1f} s after the fault")
    return Result(cell, sampling, ending, detail, seconds, later[0] if later else None, problems)


def _judged(cell: Cell, answer: Answer) -> tuple[Ending, str, list[str]]:
    """The ending, what it says, and the problems with it."""
    problems = []
    if answer.completion is not None:
        notes = "; ".join(answer.completion.warnings)
        ending: Ending = "answer with a note" if notes else "answer"
        detail = f"{answer.completion.metrics.method}{': ' if notes else ''}{notes}"
    else:
        ending, detail = "error", f"{type(answer.error).__name__}: {answer.error}"
        if not isinstance(answer.error, DisaggError):
            problems.append("no DisaggError")
    if ending not in cell.endings:
        problems.append(f"{ending} instead of {' or '.join(sorted(cell.endings))}")
    return ending, detail, problems


def _difference(got: Sequence[int], expected: Sequence[int]) -> str:
    at = next((n for n, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), None)
    return f"{len(got)} of {len(expected)}" if at is None else f"the first at {at} of {len(expected)}"


@contextmanager
def _prepared(fleet: FaultFleet, cell: Cell) -> Iterator[Injection]:
    """The fault in effect, once for the block."""
    with ExitStack() as stack:
        if cell.policy == "one decode host":
            fleet.proxies["decode-2"].refuse()
        if cell.lacking:
            pid = fleet.pid(f"{cell.side}-1")
            stack.enter_context(LIMITS[cell.lacking](pid))
            fleet.broken.add(f"{cell.side}-1")
        if cell.lie is not None:
            fleet.tell(cell.lie)
        if cell.fault is None:
            yield Injection(NO_FAULT)
            return
        strikes = cell.process is not None or cell.policy == "no host left"
        on_call = (lambda name: _strike(fleet, cell, name.removesuffix(KV))) if strikes else None
        yield fleet.inject(cell.trigger, cell.fault, on_call)


def _strike(fleet: FaultFleet, cell: Cell, name: str) -> None:
    """What happens to the hosts when the fault strikes. name: of the host at whose port it does."""
    with fleet.no_host_left() if cell.policy == "no host left" else nullcontext():
        if cell.process is None:
            return
        victim = name if name in fleet.names(cell.side) else fleet.busy(cell.side)
        match cell.process:
            case "killed":
                fleet.kill(victim)
            case "frozen":
                fleet.freeze(victim)
            case "frozen for 5 s":
                process.freeze_for(fleet.pid(victim), 5.0)
            case "connections reset":
                fleet.reset(victim)
            case "engine's thread stopped":
                fleet.stop_engine(victim)
