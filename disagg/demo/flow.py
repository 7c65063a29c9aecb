"""The flow of `disagg demo`: start local servers, run their models at the same time, then one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import disagg
from disagg.config import Fleet, load
from disagg.fleet.lifecycle.one_server import OnProgress
from disagg.fleet.lifecycle.status.ask import poll
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.fleet.lifecycle.temporary import RunningFleet, temporary_fleet
from disagg.inference import client as inference
from disagg.inference.several import ModelAnswer, ask

HOSTS_FILE = Path(disagg.__file__).parent / "demo" / "hosts.toml"
"""The demo fleet: four servers on this machine and two small models, which come with the package."""
PROMPT_FILE: Final = Path(__file__).with_name("prompt.txt")
PROMPT: Final = PROMPT_FILE.read_text(encoding="utf-8")
ROUNDS: Final = 3
"""One alone says little on a machine that does something else meanwhile."""
MAX_TOKENS: Final = 128
# Both models close the method. What follows would be another method, or one more class attribute.
STOP: Final = ("\n\n", "\n    __")
METHOD_TOKENS: Final = 26  # of the method, for a request without stop strings


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The answers of all models at the same time, those of each model by itself, and the servers' health afterwards."""

    prompt: str
    together: Sequence[ModelAnswer]
    by_itself: Sequence[ModelAnswer]
    comparison: Comparison
    health: Sequence[HostStatus]

    def to_json(self) -> dict[str, Any]:
        """What `disagg demo --json` prints."""
        return {
            "prompt": self.prompt,
            "together": [answer.to_json() for answer in self.together],
            "by_itself": [answer.to_json() for answer in self.by_itself],
            "comparison": self.comparison.to_json(),
            "health": [status.to_json() for status in self.health],
        }


def demo_fleet(
    config: Path | None,
    *,
    timeout_s: float,
    report: OnProgress,
    note: Callable[[str], None],
    ending: Callable[[], AbstractContextManager[None]],
) -> AbstractContextManager[RunningFleet]:
    """Run the servers of `config` on their own ports, or those of the demo fleet on free ports; stop them at the end.

    Raises the first host's error if not all servers are healthy within `timeout_s`.
    """
    return temporary_fleet(
        load(HOSTS_FILE if config is None else config),
        move="taken" if config is None else "none",
        timeout_s=timeout_s,
        slow_hint=f"wait longer: disagg demo --timeout {max(180, 2 * timeout_s):g}",
        report=report,
        note=note,
        ending=ending,
    )


async def compare(
    running: RunningFleet,
    prompt: str,
    max_tokens: int,
    shown: Callable[[Sequence[ModelAnswer]], AbstractContextManager[object]],
    note: Callable[[str], None],
) -> DemoResult:
    """Run all models at the same time, within `shown(answers)`, then each by itself, and both ROUNDS times: the times
    that are compared are medians. Raises the first error.

    No run uses KV that an earlier one has left on the hosts.
    """
    fleet, state = running
    request = {"prompt": prompt, "max_tokens": max_tokens, "stop": STOP}
    together, by_itself = _answers(fleet), _answers(fleet)
    async with inference.AsyncClient(fleet, token=state.tokens.current) as client:
        # The first request of a connection and of a server costs more than the others: one token that is not shown.
        await ask(client.stream, first := _answers(fleet), {**request, "max_tokens": 1, "cache_salt": "warm-up"})
        _raise_first(first)
        with shown(together):
            walls = [await ask(client.stream, together, {**request, "cache_salt": "together"})]
        _raise_first(together)
        note("each model by itself, and all once more ...")
        rounds = [by_itself, *(_answers(fleet) for _ in range(ROUNDS - 1))]
        for number, alone in enumerate(rounds):
            if number:
                again = _answers(fleet)
                walls.append(await ask(client.stream, again, {**request, "cache_salt": f"together {number}"}))
                _raise_first(again)
            for answer in alone:
                await ask(client.stream, [answer], {**request, "cache_salt": f"by itself {number}"})
            _raise_first(alone)
    texts = [answer.text for answer in together]
    comparison = Comparison(
        parallel_wall=median(walls),
        own={answers[0].model: median(answer.wall for answer in answers) for answers in zip(*rounds, strict=True)},
        completion_tokens=sum(a.completion.metrics.completion_tokens for a in together if a.completion),
        same_text=all([answer.text for answer in alone] == texts for alone in rounds),
        rounds=ROUNDS,
    )
    return DemoResult(prompt, together, by_itself, comparison, poll(fleet, state.tokens.current, state))


def _answers(fleet: Fleet) -> list[ModelAnswer]:
    return [ModelAnswer(model) for model in fleet.models]


def _raise_first(answers: Sequence[ModelAnswer]) -> None:
    for answer in answers:
        if answer.error is not None:
            raise answer.error


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several models asked at the same time, and again one after the other. Times are seconds of wall time.

    parallel_wall: of all models at the same time. own: by model, of that model by itself. completion_tokens: output
    tokens of all answers. same_text: whether all runs gave the same answers. rounds: of which each time is the median.
    """

    parallel_wall: float
    own: dict[str, float]
    completion_tokens: int
    same_text: bool
    rounds: int = 1

    @property
    def sequential_sum(self) -> float:
        """The time of all models one after the other."""
        return sum(self.own.values())

    @property
    def speedup(self) -> float:
        """One after the other / at the same time."""
        return self.sequential_sum / self.parallel_wall

    @property
    def throughput(self) -> float:
        """Output tokens per second of all models at the same time."""
        return self.completion_tokens / self.parallel_wall

    @property
    def over_slower(self) -> float:
        """At the same time / the slowest model by itself: what sharing this machine costs."""
        return self.parallel_wall / max(self.own.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "parallel_wall": self.parallel_wall,
            "own_wall": self.own,
            "sequential_sum": self.sequential_sum,
            "speedup": self.speedup,
            "throughput": self.throughput,
            "parallel_over_slower": self.over_slower,
            "same_text": self.same_text,
            "rounds": self.rounds,
        }
