"""Many requests while hosts are killed and frozen at random: every answer is exact, or its error is justified."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from disagg.errors import DisaggError
from disagg.inference.client import AsyncClient
from disagg.inference.types import Stage
from tests.faults import process
from tests.faults.fleet import MODEL, FaultFleet

TIMEOUT_S: Final = 60.0
HANG_S: Final = TIMEOUT_S + 10
PROMPTS: Final = 8
SLOWEST: Final = 8  # requests whose stages the report has
Harm = Literal["killed", "frozen"]


@dataclass(frozen=True, slots=True)
class Settings:
    """requests, concurrency: of the load. every_s: mean time between two harms. frozen_s, start_s: how long a frozen
    host stays so, and after which time a killed one is started again. seed: of prompts and harms. split: so many of the
    model's layers are computed by the prefill host, the others by the decode host; 0: the hosts decide."""

    requests: int = 1000
    concurrency: int = 16
    every_s: float = 4.0
    frozen_s: float = 6.0
    start_s: float = 1.0
    seed: int = 1
    split: int = 0

    @property
    def prompts(self) -> Sequence[int]:
        """Their tokens: of a split, several chunks."""
        return (300, 900, 2400) if self.split else (20, 150, 600)


@dataclass(slots=True)
class Event:
    """A harm to a host. back: when it served again. lost: of a killed prefill host, see `lost_tokens`."""

    host: str
    harm: Harm
    at: float
    back: float = float("inf")
    lost: Sequence[float] = ()


@dataclass(slots=True)
class Outcome:
    """How one request ended. gap_s: its longest time without a token after the first one, and when that began.
    divided: both hosts computed the prompt. alone_tokens: that the decode host computed of it through all layers after
    the prefill host had failed; None if that did not. stages: what it came to, each with the seconds since its start.
    """

    name: str
    started: float
    ended: float
    error: str = ""
    wrong: str = ""
    gap_s: float = 0.0
    gap_at: float = 0.0
    notes: tuple[str, ...] = ()
    divided: bool = False
    alone_tokens: int | None = None
    stages: list[tuple[float, Stage]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    @property
    def story(self) -> str:
        """Where its time went."""
        hosts = "{} {} -> {}"
        return ", ".join(
            f"{at:.1f} {hosts.format(one.phase, one.prefill_server or '-', one.decode_server or '-')}"
            for at, one in self.stages
        )


@dataclass(slots=True)
class Report:
    settings: Settings
    outcomes: list[Outcome] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """What must not be: hangs, wrong tokens, errors while a host was up, and what is held afterwards."""
        found = [f"{one.name}: {one.wrong or one.error}" for one in self.outcomes if one.name in BAD]
        return found + self.left


BAD: Final = ("wrong answer", "hung", "error with a host left", "not a DisaggError")


class _Harmer(threading.Thread):
    """Kills and freezes random hosts until it is stopped, and brings them back."""

    def __init__(self, fleet: FaultFleet, settings: Settings) -> None:
        super().__init__(name="harm", daemon=True)
        self.events: list[Event] = []
        self._fleet, self._settings = fleet, settings
        self._chance = random.Random(settings.seed)
        self._over = threading.Event()
        self._down: set[str] = set()
        self._returning: list[threading.Thread] = []

    def run(self) -> None:
        while not self._over.wait(self._chance.uniform(0.5, 1.5) * self._settings.every_s):
            host = self._chance.choice(self._fleet.names())
            harm: Harm = self._chance.choice(("killed", "frozen"))
            if host not in self._down:
                self._harm(Event(host, harm, time.monotonic()))

    def end(self) -> None:
        """No more harm; returns when every host is back."""
        self._over.set()
        self.join()
        for thread in self._returning:
            thread.join()

    def _harm(self, event: Event) -> None:
        self.events.append(event)
        self._down.add(event.host)
        pid, before = self._fleet.pid(event.host), self._lost()
        (process.kill if event.harm == "killed" else process.freeze)(pid)
        thread = threading.Thread(target=self._bring_back, args=(event, pid, before), daemon=True)
        self._returning.append(thread)
        thread.start()

    def _lost(self) -> Mapping[str, Sequence[float]]:
        """What the logs of the decode hosts say, by host."""
        servers = self._fleet.servers
        return {name: lost_tokens(servers[name].log(name)) for name in self._fleet.names("decode")}

    def _bring_back(self, event: Event, pid: int, before: Mapping[str, Sequence[float]]) -> None:
        if event.harm == "frozen":
            time.sleep(self._settings.frozen_s)
            process.thaw(pid)
        else:
            time.sleep(self._settings.start_s)
            if event.host.startswith("prefill"):
                event.lost = [one for host, lost in self._lost().items() for one in lost[len(before[host]) :]]
        if event.harm == "killed" or self._fleet.ended(event.host):  # a watchdog may have ended a frozen server
            self._fleet.restart(event.host)
        event.back = time.monotonic()
        self._down.discard(event.host)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt with its options, and the answer of an undisturbed fleet."""

    tokens: Sequence[int]
    options: Mapping[str, Any]
    expected: tuple[int, ...] = ()


def run(fleet: FaultFleet, settings: Settings) -> Report:
    """The whole run. Its answers are compared with those that the same fleet gave before."""
    return asyncio.run(_run(fleet, settings))


async def _run(fleet: FaultFleet, settings: Settings) -> Report:
    chance = random.Random(settings.seed)
    report = Report(settings)
    before = fleet.held()
    async with fleet.client() as client:
        requests = [await _answered(client, request) for request in _requests(chance, settings)]
        harmer = _Harmer(fleet, settings)
        harmer.start()
        upcoming = iter([chance.choice(requests) for _ in range(settings.requests)])

        async def caller() -> None:
            for request in upcoming:
                report.outcomes.append(await _outcome(client, request))

        await asyncio.gather(*(caller() for _ in range(settings.concurrency)))
        await asyncio.to_thread(harmer.end)
    report.events = harmer.events
    _excuse(report, fleet.names())
    report.left = await asyncio.to_thread(fleet.wait_idle, before)
    return report


def _requests(chance: random.Random, settings: Settings) -> list[Request]:
    """Every second one is sampled with a seed."""
    requests = []
    for number in range(PROMPTS):
        tokens = [chance.randrange(10, 600) for _ in range(chance.choice(settings.prompts))]
        options: dict[str, Any] = {"max_tokens": chance.choice((20, 80, 200)), "ignore_eos": True}
        if settings.split:
            options["split"] = settings.split
        if number % 2:
            options |= {"temperature": 0.9, "seed": number}
        requests.append(Request(tokens, options))
    return requests


async def _answered(client: AsyncClient, request: Request) -> Request:
    got = await client.generate(MODEL, tokens=request.tokens, **request.options)
    return Request(request.tokens, request.options, tuple(token.id for token in got.tokens))


async def _outcome(client: AsyncClient, request: Request) -> Outcome:
    ids: list[int] = []
    times: list[float] = []
    notes: list[str] = []
    outcome = Outcome("hung", time.monotonic(), 0.0)

    def watch(stage: Stage) -> None:
        outcome.stages.append((time.monotonic() - outcome.started, stage))

    try:
        async with asyncio.timeout(HANG_S):
            salt = secrets.token_hex(8)  # so that every request hands its KV off
            stream = client.stream(
                MODEL, tokens=request.tokens, timeout=TIMEOUT_S, cache_salt=salt, watch=watch, **request.options
            )
            async with stream:
                async for chunk in stream:
                    ids += [token.id for token in chunk.tokens]
                    times.append(chunk.arrived)
                    notes += [chunk.note] if chunk.note else []
        outcome.notes, metrics = stream.completion.warnings, stream.completion.metrics
        outcome.divided = metrics.layers is not None
        if metrics.resumed_at is not None:
            outcome.alone_tokens = len(request.tokens) - 1 - metrics.resumed_at
        outcome.name = "exact, with a note" if outcome.notes else "exact"
    except TimeoutError:
        outcome.error = "no end within its timeout"
    except DisaggError as error:
        outcome.name, outcome.error = (
            "error with a host left",
            f"{error.code()} after {len(ids)} tokens and {notes}: {error}",
        )
    except Exception as error:  # noqa: BLE001 - it is what this run looks for
        outcome.name, outcome.error = "not a DisaggError", repr(error)
    outcome.ended = time.monotonic()
    _judge(outcome, tuple(ids), request.expected)
    gaps = [(later - earlier, earlier) for earlier, later in itertools.pairwise(times)]
    outcome.gap_s, outcome.gap_at = max(gaps, default=(0.0, 0.0))
    return outcome


def _judge(outcome: Outcome, ids: tuple[int, ...], expected: tuple[int, ...]) -> None:
    wanted = expected if outcome.name.startswith("exact") else expected[: len(ids)]
    if ids != wanted:
        outcome.name, outcome.wrong = "wrong answer", f"{len(ids)} tokens, {len(expected)} expected, {outcome.notes}"


def _excuse(report: Report, hosts: Sequence[str]) -> None:
    """An error is justified if at some moment of the request every host was down."""
    for outcome in report.outcomes:
        moments = [event.at for event in report.events if event.at <= outcome.ended] + [outcome.started]
        during = [moment for moment in moments if moment >= outcome.started]
        if outcome.name == "error with a host left" and any(_all_down(report.events, hosts, at) for at in during):
            outcome.name = "error, no host was left"


def _all_down(events: Sequence[Event], hosts: Sequence[str], at: float) -> bool:
    return {event.host for event in events if event.at <= at < event.back} >= set(hosts)


def failover_times(report: Report, harm: Harm) -> list[float]:
    """From each harm to a decode host to the next token of the requests that were silent from then on."""
    times = []
    for event in report.events:
        if event.harm == harm and event.host.startswith("decode"):
            for one in report.outcomes:
                over = one.gap_at + one.gap_s - event.at
                if one.gap_at <= event.at + 0.05 and over > 0 and any("decode" in note for note in one.notes):
                    times.append(over)
    return times


def table(report: Report) -> list[str]:
    """The report as lines of text."""
    counts = Counter(outcome.name for outcome in report.outcomes)
    harms = Counter((event.host, event.harm) for event in report.events)
    seconds = sorted(outcome.seconds for outcome in report.outcomes)
    lines = [f"{report.settings}", f"{len(report.outcomes)} requests, {len(report.events)} harms"]
    lines += [f"  {count:5d}  {name}" for name, count in counts.most_common()]
    lines += [f"  {count:5d} x {host} {harm}" for (host, harm), count in sorted(harms.items())]
    lines.append(f"time to the end: {percentiles(seconds)}")
    for harm in _HARMS:
        lines.append(f"decode host {harm} to next token: {percentiles(sorted(failover_times(report, harm)))}")
    if report.settings.split:
        lines += _resumed(report)
    notes = Counter(note.split(":")[0] for outcome in report.outcomes for note in outcome.notes)
    lines += [f"  {count:5d} noted: {note}" for note, count in notes.most_common(12)]
    slowest = sorted(report.outcomes, key=lambda one: one.seconds, reverse=True)[:SLOWEST]
    lines += [f"  {one.seconds:.1f} s, {one.name}: {one.story}" for one in slowest]
    return lines + [f"  problem: {problem}" for problem in report.problems[:40]]


def lost_tokens(log: str) -> Sequence[float]:
    """Of each chunk that a sender had begun when it was lost, the tokens that had come and are computed again, from a
    decode host's log: the chunk's tokens times the share of its bytes. What the sender had computed and not yet sent is
    not known; it sends each layer when it has it."""
    found = (tuple(map(int, numbers)) for numbers in _LOST.findall(log))
    return [(end - start) * nbytes / whole for start, end, nbytes, whole in found]


_LOST: Final = re.compile(r"is lost in the chunk of tokens \[(\d+), (\d+)\), with (\d+) of its (\d+) bytes")


def _again(report: Report) -> str:
    """What is computed again of the chunks that killed prefill hosts had begun."""
    killed = [one for one in report.events if one.harm == "killed" and one.host.startswith("prefill")]
    heads = [sum(one.lost) for one in killed if one.lost]
    chunks = [tokens for one in killed for tokens in one.lost]
    return (
        f"{len(killed)} prefill hosts were killed, {len(heads)} within {len(chunks)} chunks; tokens that had come "
        f"of these and are computed again, p50, p90, max: {quantiles(chunks)}; per killed host: {quantiles(heads)}"
    )


def quantiles(values: Sequence[float]) -> str:
    ordered = sorted(values)
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.9, 1.0)] if ordered else []
    return ", ".join(f"{value:.0f}" for value in at) or "none"


def _resumed(report: Report) -> list[str]:
    """What came of prompts that both hosts computed."""
    divided = [one for one in report.outcomes if one.divided]
    alone = [one.alone_tokens for one in divided if one.alone_tokens is not None]
    went_on = sum(any("goes on from there" in note for note in one.notes) for one in report.outcomes)
    return [
        f"{len(divided)} prompts were computed by both hosts; {went_on} went on after their prefill host failed, of "
        f"{len(alone)} of which the decode host computed the rest through all layers; its tokens p50, p90, max: "
        f"{quantiles(alone)}",
        _again(report),
    ]


_HARMS: Final[tuple[Harm, ...]] = ("killed", "frozen")


def percentiles(ordered: Sequence[float]) -> str:
    """p50, p99 and the greatest, in seconds."""
    if not ordered:
        return "none"
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99)]
    return f"p50 {at[0]:.2f} s, p99 {at[1]:.2f} s, max {ordered[-1]:.2f} s, of {len(ordered)}"
