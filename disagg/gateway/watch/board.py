"""Requests now, the last answers, totals and plots. An observer without I/O; times are given."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from disagg.api.gateway import (
    LAST,
    MAX_SHOWN,
    HistoryEntry,
    LiveHost,
    LiveModel,
    LiveRequest,
    LiveState,
    Sample,
    Totals,
)
from disagg.config import Fleet
from disagg.gateway.watch.entry import entry_of_completion, entry_of_end, of_stage, without_texts
from disagg.gateway.watch.hosts import SeenModel
from disagg.gateway.watch.request import WAITING, ObservedRequest, Observer
from disagg.version import VERSION

SAMPLES: Final = 300
SAMPLE_S: Final = 2.0
MAX_KEYS: Final = 1024
"""The most keys of which a board of their own requests is kept."""
WINDOW_S: Final = 5
MAX_VALUES: Final = 1000
_SUMMED: Final = {*Sample.__struct_fields__} & {*Totals.__struct_fields__}


def contexts(fleet: Fleet) -> dict[str, int]:
    """The models of a board."""
    return {model.name: model.context for model in fleet.models.values()}


class Board(Observer):
    """What the fleet's gateway is doing. models: the context of each, by canonical name; `lists` changes
    them. `own` has it for one key, without the plots."""

    def __init__(self, fleet: str, models: Mapping[str, int]) -> None:
        self._fleet = fleet
        self._apis: tuple[str, ...] = ()
        self._started = time.time()
        self._models: dict[str, _Model] = {}
        self._running: dict[int, ObservedRequest] = {}
        self._last: deque[HistoryEntry] = deque(maxlen=LAST * 5)
        self._samples: deque[dict[str, Sample]] = deque(maxlen=SAMPLES)
        self._own: dict[str, Board] = {}
        self.lists(models)

    def lists(self, models: Mapping[str, int]) -> None:
        """Show these models from now on. What was counted of others is kept."""
        for name, context in models.items():
            self._models.setdefault(name, _Model(context)).context = context
        self._listed = tuple(models)
        for board in self._own.values():
            board.lists(models)

    def own(self, key_id: str) -> Board:
        """The board of one key's requests."""
        if key_id not in self._own:
            if len(self._own) >= MAX_KEYS:
                idle = next((key for key, board in self._own.items() if not board.busy), next(iter(self._own)))
                del self._own[idle]
            self._own[key_id] = board = Board(self._fleet, {name: one.context for name, one in self._models.items()})
            board._started, board._apis, board._listed = self._started, self._apis, self._listed
        return self._own[key_id]

    def serves(self, paths: Iterable[str]) -> None:
        """Set the paths of the APIs that are served."""
        self._apis = tuple(paths)

    def accepted(self, request: ObservedRequest) -> None:
        for board in self._boards(request):
            board._running[request.number] = request

    def generated(self, request: ObservedRequest, choice: int, tokens: int) -> None:
        answer = request.answers[choice]
        now = answer.arrived or 0.0
        for board in self._boards(request):
            model = board._models[request.model]
            model.counts["completion_tokens"] += tokens
            model.answers.add(tokens, now)
            if answer.gap is None:
                model.prompts.add(answer.stage.prompt_tokens if answer.stage else 0, now)

    def completed(self, request: ObservedRequest, choice: int) -> None:
        fell_back, entry = request.answers[choice].fell_back, entry_of_completion(request, choice)
        for board in self._boards(request):
            board._models[request.model].counts["fallbacks"] += fell_back
            board._remember(entry)

    def ended(self, request: ObservedRequest) -> None:
        failed, entry = request.state == "failed" and not request.refused, entry_of_end(request)
        for board in self._boards(request):
            board._running.pop(request.number, None)
            board._models[request.model].counts["failed"] += failed
            if entry is not None:
                board._remember(entry)

    def _boards(self, request: ObservedRequest) -> Sequence[Board]:
        """This board, and that of the request's key."""
        return (self,) if request.key_id is None else (self, self.own(request.key_id))

    @property
    def busy(self) -> bool:
        """Whether a request runs."""
        return bool(self._running)

    def requests(self, model: str) -> tuple[int, int]:
        """Requests of a model that run, and that wait in a queue or for the model."""
        phases = [one.phase for one in self._running.values() if one.model == model]
        waiting = sum(phase in WAITING for phase in phases)
        return len(phases) - waiting, waiting

    def state(self, hosts: Sequence[LiveHost], now: float, visible: Collection[str] | None = None) -> LiveState:
        """Everything about these models; None: about all. now: time.monotonic()."""
        names = [name for name in self._listed if visible is None or name in visible]
        seen = [host for host in hosts if host.model in names]
        totals = {name: self._totals(name, seen, now) for name in names}
        shown = [one for one in self._running.values() if one.model in names]
        last = [entry for entry in reversed(self._last) if entry.model in names]
        return LiveState(
            fleet=self._fleet,
            version=VERSION,
            time=time.time(),
            started=self._started,
            totals=_sum(totals.values()),
            models=tuple(self._shown(name, totals[name], SeenModel.of(seen, name)) for name in names),
            hosts=tuple(seen),
            requests=tuple(_live(one, now) for one in shown[:MAX_SHOWN]),
            last=tuple(last[:LAST]),
            sample=_sample(self._samples[-1], names) if self._samples else None,
            apis=self._apis,
        )

    def sample(self, hosts: Sequence[LiveHost], now: float) -> None:
        """Add one point to the plots; call it every SAMPLE_S."""
        at = time.time()
        self._samples.append(
            {
                name: _sample_of([self._totals(name, hosts, now)], at, [model.ttft.median(now)])
                for name, model in self._models.items()
            }
        )

    def past(self, visible: Collection[str] | None = None) -> tuple[Sample, ...]:
        """The plots of these models together, oldest first."""
        names = [name for name in self._models if visible is None or name in visible]
        return tuple(sample for points in self._samples if (sample := _sample(points, names)) is not None)

    def _remember(self, entry: HistoryEntry) -> None:
        entry = without_texts(entry)  # a key that monitors sees the requests of all
        self._last.append(entry)
        self._models[entry.model].count(entry, time.monotonic())

    def _shown(self, name: str, totals: Totals, seen: SeenModel) -> LiveModel:
        model = self._models[name]
        return LiveModel(
            name=name,
            totals=totals,
            context=model.context,
            last=model.last,
            state=seen.state,
            on_demand=bool(seen.kept),
            size_bytes=seen.size_bytes,
            expires_s=seen.expires_s,
            left_s=seen.left_s,
        )

    def _totals(self, name: str, hosts: Sequence[LiveHost], now: float) -> Totals:
        model, (running, waiting) = self._models[name], self.requests(name)
        decode = [one for one in hosts if one.model == name and one.role == "decode"]
        return Totals(
            running=running,
            waiting=waiting,
            kv_bytes=sum(one.kv_bytes + one.kv_held_bytes for one in decode),
            prompt_tokens_s=model.prompts.per_s(now),
            completion_tokens_s=model.answers.per_s(now),
            **model.counts,
        )


def _live(request: ObservedRequest, now: float) -> LiveRequest:
    return LiveRequest(
        number=request.number,
        request_id=request.head.request_id,
        api=request.api,
        model=request.model,
        key=request.key,
        phase=request.phase,
        seconds=now - request.began,
        phase_seconds=now - (request.phase_began or request.began),
        tokens=request.tokens,
        choices=len(request.answers),
        **of_stage(next((one.stage for one in request.answers if one.stage), None)),
    )


class Rate:
    """A count per second, over the last WINDOW_S complete seconds."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # by second; at most WINDOW_S + 1 of them

    def add(self, count: int, now: float) -> None:
        second = int(now)
        if second not in self._counts:
            self._forget(second)
            self._counts[second] = 0
        self._counts[second] += count

    def per_s(self, now: float) -> float:
        """The rate. The present second does not count: it is not complete."""
        self._forget(second := int(now))
        complete = sum(self._counts.values()) - self._counts.get(second, 0)
        return complete / max(1, second - min(self._counts, default=second))

    def _forget(self, second: int) -> None:
        self._counts = {at: count for at, count in self._counts.items() if at >= second - WINDOW_S}


class RecentMedian:
    """The median of the values of the last WINDOW_S seconds."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=MAX_VALUES)

    def add(self, value: float, now: float) -> None:
        self._values.append((now, value))

    def median(self, now: float) -> float | None:
        while self._values and self._values[0][0] < now - WINDOW_S:
            self._values.popleft()
        return median(value for _, value in self._values) if self._values else None


@dataclass(slots=True)
class _Model:
    """One model since the gateway started. context: of its requests, in tokens. counts: by the names of Totals."""

    context: int
    counts: Counter[str] = field(default_factory=Counter)
    prompts: Rate = field(default_factory=Rate)
    answers: Rate = field(default_factory=Rate)
    ttft: RecentMedian = field(default_factory=RecentMedian)
    last: HistoryEntry | None = None

    def count(self, entry: HistoryEntry, now: float) -> None:
        if entry.state != "failed":
            self.counts[entry.state] += 1
        if entry.state == "ok":
            self.counts["prompt_tokens"] += entry.prompt_tokens
            self.counts["held_tokens"] += entry.held_tokens
            self.last = entry
            if entry.ttft is not None:
                self.ttft.add(entry.ttft, now)


def _sum(totals: Iterable[Totals]) -> Totals:
    return Totals(**_sums(Totals.__struct_fields__, list(totals)))


def _sample(points: dict[str, Sample], names: Collection[str]) -> Sample | None:
    """One point of several models: sums, and the worst of their medians."""
    chosen = [points[name] for name in names if name in points]
    return _sample_of(chosen, chosen[0].time, [one.ttft for one in chosen]) if chosen else None


def _sample_of(figures: Sequence[Totals | Sample], at: float, ttfts: Iterable[float | None]) -> Sample:
    worst = max((ttft for ttft in ttfts if ttft is not None), default=None)
    return Sample(time=at, ttft=worst, **_sums(_SUMMED, figures))


def _sums(names: Iterable[str], figures: Sequence[Totals | Sample]) -> dict[str, Any]:
    return {name: sum(getattr(one, name) for one in figures) for name in names}
