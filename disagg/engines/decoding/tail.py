"""The tails of splits: the layers of a prompt that a decode engine computes itself, chunk by chunk, while the KV of the
layers before them arrives.

A piece of a tail delays the next token of every answer. While answers run, pieces are short, and so far apart that they
slow those by at most a share. Without answers they follow each other, and are as long as a chunk of a prompt.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from disagg.engines.decoding.batch import Job
from disagg.engines.decoding.commands import as_disagg
from disagg.kv.arriving import ArrivingKV, Chunk

FIRST_TOKENS = 64
"""Tokens of all layers that the first piece has, before any has shown a speed."""
LEAST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TailPolicy:
    """share: by which tails slow answers at most, from the arrival of the first one on. beside_s: the longest piece
    while answers run. alone_s: the longest piece while none does: the engine shows that it works after each."""

    share: float = 0.1
    beside_s: float = 0.15
    alone_s: float = 0.5

    def rest_s(self, took: float) -> float:
        """Seconds for answers alone before a piece that takes so long."""
        return took / self.share


@dataclass(slots=True)
class TailPace:
    """The pace of all tails of an engine. most: tokens of the longest piece. layers: of the model. speed: layers times
    tokens per second, of the last pieces; 0: not known."""

    most: int
    layers: int
    policy: TailPolicy = field(default_factory=TailPolicy)
    speed: float = 0.0
    _alone: float = 0.0  # since then answers have the time that is to be theirs before the next piece

    def begin(self, now: float) -> None:
        """A tail comes where there was none."""
        self._alone = max(self._alone, now)

    def due(self, now: float, tokens: int, layers: int, *, answers: bool) -> bool:
        """Whether a piece of so many tokens may be computed now. Answers have their time before it: after it, the last
        piece of a prompt would have cost them more than their share."""
        return not answers or now >= self._alone + self.policy.rest_s(self._expected_s(tokens, layers))

    def tokens(self, left: int, layers: int, *, answers: bool) -> int:
        """The length of the next piece, of `left` tokens through `layers` layers. What is left is divided evenly: a
        short last piece would cost almost as much as a long one."""
        seconds = self.policy.beside_s if answers else self.policy.alone_s
        work = self.speed * seconds if self.speed else float(FIRST_TOKENS * self.layers)
        longest = min(max(int(work / layers), LEAST_TOKENS), self.most)
        return -(-left // -(-left // longest))

    def took(self, began: float, ended: float, tokens: int, layers: int, *, answers: bool) -> None:
        """A piece was computed between these two times. The speed at most doubles: that of a short piece, or of the
        first one, predicts little. answers: whether it delayed some, which have had their time for the seconds that
        were expected, and are to have it for the others."""
        seconds = max(ended - began, 1e-6)
        over = self.policy.rest_s(seconds - self._expected_s(tokens, layers)) if answers else 0.0
        self._alone = ended + over
        speed = tokens * layers / seconds
        self.speed = min(speed, 2 * self.speed) if self.speed else speed

    def _expected_s(self, tokens: int, layers: int) -> float:
        """0 before any piece has shown a speed."""
        return tokens * layers / self.speed if self.speed else 0.0


class Tail(ABC):
    """The tail of one prompt. layers: that are computed here; 0: all arrive. covered: of how many of the prompt's first
    tokens they have been computed. computing: the chunk in work."""

    def __init__(self, arriving: ArrivingKV, layers: int) -> None:
        self.arriving, self.layers = arriving, layers
        self.covered = arriving.start
        self.computing: Chunk | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its KV."""
        return 0

    def next_chunk(self) -> bool:
        """Whether there is a chunk to compute. One that needs no work is passed over."""
        while self.computing is None and (chunk := self.arriving.take()) is not None:
            if self.layers:
                self.computing = chunk
            else:
                self.covered = chunk.end
                self.arriving.taken(chunk)
        return self.computing is not None

    def compute(self, tokens: int) -> None:
        """The next so many tokens of the chunk in work."""
        assert self.computing is not None, "next_chunk said so"
        chunk, end = self.computing, min(self.covered + tokens, self.computing.end)
        self._compute(chunk, self.covered, end)
        self.covered = end
        if end == chunk.end:
            self.computing = None
            self.arriving.taken(chunk)

    @abstractmethod
    def _compute(self, chunk: Chunk, begin: int, end: int) -> None:
        """Compute tokens [begin, end) of the chunk, and wait for the end of it."""


class Tails:
    """All tails of an engine, in turn. make: begins that of a job. For the engine's thread; only Job.news is set on
    others."""

    def __init__(self, make: Callable[[Job, ArrivingKV], Tail], pace: TailPace) -> None:
        self._make, self._pace = make, pace
        self._tails: deque[tuple[Job, Tail]] = deque()  # bounded by the engine's requests

    def __len__(self) -> int:
        return len(self._tails)

    @property
    def nbytes(self) -> int:
        return sum(tail.nbytes for _, tail in self._tails)

    def add(self, job: Job) -> None:
        assert job.arriving is not None, "the engine says so"
        if not self._tails:
            self._pace.begin(time.monotonic())
        job.tail = self._make(job, job.arriving)
        self._tails.append((job, job.tail))

    def remove(self, job: Job) -> None:
        self._tails = deque(entry for entry in self._tails if entry[0] is not job)
        job.tail = None

    def clear(self) -> None:
        for job, _ in self._tails:
            job.tail = None
        self._tails.clear()

    def due(self, *, answers: bool) -> bool:
        """Whether `compute` would compute something, or look at what has arrived."""
        return any(job.news or self._turn(tail, answers) for job, tail in self._tails)

    def compute(self, *, answers: bool) -> Job | None:
        """Compute a piece of the tail whose turn it is, if its time has come. Returns a job for which nothing is left
        to compute and nothing more arrives, with its tail; or one with an error. answers: whether a piece delays
        some."""
        for job, tail in list(self._tails):
            if not (job.news or self._turn(tail, answers)):
                continue
            job.news = False  # before the look: what arrives after it is news
            ended = tail.arriving.outcome is not None  # before it, too: then no chunk follows
            try:
                if tail.next_chunk():
                    if not self._turn(tail, answers):
                        continue
                    self._compute(job, tail, answers)
                    return None
                if not ended:
                    continue
            except Exception as error:  # noqa: BLE001 - its own request's: no cache of another has been changed
                job.error = as_disagg(error, "the decode engine failed to compute its layers of a prompt")
            return self._end(job, tail)
        return None

    def _turn(self, tail: Tail, answers: bool) -> bool:
        """Whether this tail has a chunk, as the first of all, and the time for a piece of it has come."""
        if tail is not next((one for _, one in self._tails if one.computing is not None), None):
            return False
        return self._pace.due(time.monotonic(), self._piece(tail, answers), tail.layers, answers=answers)

    def _piece(self, tail: Tail, answers: bool) -> int:
        """The tokens of its next piece."""
        assert tail.computing is not None, "it has a chunk"
        return self._pace.tokens(tail.computing.end - tail.covered, tail.layers, answers=answers)

    def _compute(self, job: Job, tail: Tail, answers: bool) -> None:
        self._tails.remove((job, tail))
        self._tails.append((job, tail))
        began, first = time.monotonic(), tail.covered
        tail.compute(self._piece(tail, answers))
        ended = time.monotonic()
        self._pace.took(began, ended, tail.covered - first, tail.layers, answers=answers)
        job.timing.tail_compute_s += ended - began
        job.news = job.news or tail.computing is None  # the next chunk may be here

    def _end(self, job: Job, tail: Tail) -> Job:
        self._tails.remove((job, tail))
        kv = tail.arriving.kv
        if tail.arriving.outcome == "complete" and kv is not None and kv.timing.accepted:
            job.timing.tail_s = time.monotonic() - kv.timing.accepted
        return job
