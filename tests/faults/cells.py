"""The fault matrix as data: which fault, at which state of a request, under which policy, and what must come of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

from tests.faults.flow import Direction, Fault, Kind
from tests.hostile.schemas import POISONS

Side = Literal["decode", "prefill", "kv"]
State = Literal["before the slot", "waiting for KV", "in the transfer", "in the answer", "at any time"]
Policy = Literal["fallback", "fail", "one decode host", "no host left"]
Ending = Literal["answer", "answer with a note", "error"]
Process = Literal[
    "killed",
    "frozen",
    "frozen for 5 s",
    "connections reset",
    "engine's thread stopped",
    "link cut",
    "link cut for 2 s",
    "clock an hour fast",
    "clock an hour slow",
]
Lacking = Literal["no descriptors", "no memory", "disk full"]
LIES: Final = (
    "zeros",
    "NaN",
    "one layer of another prompt",
    "one head permuted",
    "rope of another base",
    "1 % noise",
    "rows shifted by one",
    "weights of another checkpoint",
    "weights 1 % off",
    "another prompt",
    "another prompt that ends alike",
    "20 early rows zero",
)
"""Those of tests.hostile.peers, which imports torch."""
HIDDEN_LIES: Final = (
    "hidden states zero",
    "hidden states of another prompt",
    "hidden states shifted by one",
    "hidden states with 1 % noise",
)
"""The same of the hidden states alone."""

IDLES: Final = "idles"
"""Instead of a lie, see tests.hostile.peers; with " once" after it, the first host that is asked does."""
BOUND_S: Final = 20.0  # from the fault to the end of the request: detection, failover and the answer
IDLE_BOUND_S: Final = 8.0  # two hosts that make no progress are given up before they count as stalled
EVERY: Final = 1000  # connections: the fault does not go away
MID_TRANSFER: Final = 100_000  # bytes; the prompt's KV has some 700,000
FIFTH: Final = 5
SPLIT_LAYERS: Final = 2  # of the three of the model
SECOND_CHUNK: Final = 400_000  # bytes; those of a split are some 600,000, of which the first chunk has 320,000


@dataclass(frozen=True, slots=True)
class Cell:
    """One case. side: whose connections or process. fault: of bytes, or the trigger at which `process` happens to the
    host of `side`; None: `lacking`, or the hosts of `side` tell a lie, from the beginning, or the request itself is the
    fault. endings: those allowed. schema: of tests.hostile.schemas, the form that the answer must have. split: so many
    of the model's layers are computed by the prefill host, the others by the decode host; None: all by the prefill
    host. within_s: from the fault to the end of the request."""

    side: Side
    name: str
    state: State
    policy: Policy
    endings: frozenset[Ending]
    trigger: Side
    fault: Fault | None
    process: Process | None = None
    lacking: Lacking | None = None
    lie: str | None = None
    schema: str | None = None
    split: int | None = None
    within_s: float = BOUND_S

    @property
    def linked(self) -> bool:
        """Whether it needs servers on cables that can be cut, with clocks that can jump."""
        return self.process in LINKED

    @property
    def id(self) -> str:
        return f"{self.side}: {self.name}, {self.state}, {self.policy}"


LINKED: Final[tuple[Process, ...]] = ("link cut", "link cut for 2 s", "clock an hour fast", "clock an hour slow")
UNNOTED: Final[frozenset[Ending]] = frozenset({"answer"})
WHOLE: Final[frozenset[Ending]] = frozenset({"answer", "answer with a note"})
NOTED: Final[frozenset[Ending]] = frozenset({"answer with a note"})
ERROR: Final[frozenset[Ending]] = frozenset({"error"})


def cells() -> Iterator[Cell]:
    """The whole matrix."""
    yield from _kv()
    yield from _prefill_http()
    yield from _decode_http()
    yield from _processes()
    yield from _engine_thread()
    yield from _lacking()
    yield from _lies()
    yield from _poisons()
    yield from _linked()
    yield from _splits()


def _bytes(side: Side, name: str, state: State, policy: Policy, endings: frozenset[Ending], fault: Fault) -> Cell:
    return Cell(side, name, state, policy, endings, side, fault)


_KV_KINDS: Final[tuple[tuple[str, Kind], ...]] = (
    ("reset", "reset"),
    ("truncated", "close"),
    ("stalled", "stall"),
    ("byte corrupted", "corrupt"),
    ("bytes doubled", "duplicate"),
    ("blocks swapped", "reorder"),
)


def _kv() -> Iterator[Cell]:
    """The KV connection from prefill to decode host."""
    for name, kind in _KV_KINDS:
        for where, at in (("in the preamble", 3), ("in the header", 120), ("in a frame", MID_TRANSFER)):
            fault = Fault(kind, "request", at=at, size=24)
            state: State = "in the transfer" if at == MID_TRANSFER else "waiting for KV"
            yield _bytes("kv", f"{name} {where}", state, "fallback", WHOLE, fault)
        for policy, endings in _EVERY_TRANSFER:
            fault = Fault(kind, "request", at=MID_TRANSFER, size=24, times=EVERY)
            yield _bytes("kv", f"{name}, every one", "in the transfer", policy, endings, fault)
    yield _bytes("kv", "reply reset", "in the transfer", "fallback", WHOLE, Fault("reset", "answer"))
    yield _bytes("kv", "reply stalled", "in the transfer", "fallback", WHOLE, Fault("stall", "answer"))
    trickle = Fault("slow", "request", at=MID_TRANSFER, rate=1.0)
    yield _bytes("kv", "trickled in a frame", "in the transfer", "fallback", WHOLE, trickle)
    for policy, endings in _EVERY_TRANSFER:
        fault = replace(trickle, times=EVERY)
        yield _bytes("kv", "trickled, every one", "in the transfer", policy, endings, fault)
    for rate, endings in ((3e6, WHOLE), (300e3, NOTED)):
        fault = Fault("slow", "request", rate=rate, times=EVERY)
        yield _bytes("kv", f"slow, {rate / 1e6:g} MB/s", "in the transfer", "fallback", endings, fault)


_EVERY_TRANSFER: Final[tuple[tuple[Policy, frozenset[Ending]], ...]] = (("fallback", NOTED), ("fail", ERROR))


def _prefill_http() -> Iterator[Cell]:
    """The caller's connection to a prefill host."""
    for name, kind in _HTTP_KINDS:
        for direction in _DIRECTIONS:
            fault = Fault(kind, direction, path="/prefill")
            what = f"{direction} {name}"
            yield _bytes("prefill", what, "waiting for KV", "fallback", WHOLE, fault)
    fault = Fault("corrupt", "answer", path="/prefill")
    yield _bytes("prefill", "answer corrupted", "waiting for KV", "fallback", WHOLE, fault)


_HTTP_KINDS: Final[tuple[tuple[str, Kind], ...]] = (("reset", "reset"), ("truncated", "close"), ("stalled", "stall"))
_CORRUPTED: Final[tuple[str, Kind]] = ("corrupted", "corrupt")
_DIRECTIONS: Final[tuple[Direction, ...]] = ("request", "answer")


def _decode_http() -> Iterator[Cell]:
    """The caller's connection to a decode host."""
    states: tuple[tuple[State, bytes, int], ...] = (
        ("before the slot", b"", 1),
        ("waiting for KV", b"event: slot", 1),
        ("in the answer", b"event: tokens", FIFTH),
    )
    for name, kind in (*_HTTP_KINDS, _CORRUPTED):
        for state, after, nth in states:
            at = len(b"\ndata: ") if kind == "corrupt" and after else 0
            fault = Fault(kind, "answer", path="/decode", after=after, nth=nth, at=at)
            endings = NOTED if state == "in the answer" else WHOLE
            yield _bytes("decode", name, state, "fallback", endings, fault)
            yield _bytes("decode", name, state, "one decode host", endings, fault)
    fault = Fault("reset", "answer", path="/decode", after=b"event: tokens", nth=FIFTH)
    yield _bytes("decode", "reset", "in the answer", "no host left", ERROR, fault)


_TRIGGERS: Final[tuple[tuple[State, Side, Fault], ...]] = (
    ("before the slot", "decode", Fault("call", "request", path="/decode")),
    ("waiting for KV", "prefill", Fault("call", "request", path="/prefill")),
    ("in the transfer", "kv", Fault("call", "request", at=MID_TRANSFER)),
    ("in the answer", "decode", Fault("call", "answer", path="/decode", after=b"event: tokens", nth=FIFTH)),
)
_PROCESSES: Final[tuple[Process, ...]] = ("killed", "frozen", "frozen for 5 s", "connections reset")


def _processes() -> Iterator[Cell]:
    """What happens to a whole host at one state."""
    for state, trigger, fault in _TRIGGERS:
        for process in _PROCESSES:
            lasting = process in ("killed", "frozen")
            decode = NOTED if lasting and state == "in the answer" else WHOLE
            yield Cell("decode", process, state, "fallback", decode, trigger, fault, process)
            if state != "in the answer":
                yield Cell("prefill", process, state, "fallback", WHOLE, trigger, fault, process)
            if lasting:
                yield Cell("decode", process, state, "one decode host", decode, trigger, fault, process)
                yield Cell("decode", process, state, "no host left", ERROR, trigger, fault, process)


def _engine_thread() -> Iterator[Cell]:
    """The thread that computes is stopped, everything else of the host goes on: as a hung GPU looks from outside."""
    states = {state: (trigger, fault) for state, trigger, fault in _TRIGGERS}
    rows: tuple[tuple[Side, State, Policy, frozenset[Ending]], ...] = (
        ("prefill", "in the transfer", "fallback", WHOLE),
        ("decode", "in the transfer", "fallback", WHOLE),
        ("decode", "in the answer", "fallback", NOTED),
        ("decode", "in the answer", "one decode host", NOTED),
    )
    for side, state, policy, endings in rows:
        yield Cell(side, STOPPED, state, policy, endings, *states[state], STOPPED)


STOPPED: Final = "engine's thread stopped"


_LACKING: Final[tuple[Lacking, ...]] = ("no descriptors", "no memory", "disk full")


def _lacking() -> Iterator[Cell]:
    """A host without a resource, and no other decode host if it is one."""
    for lacking in _LACKING:
        sides: tuple[tuple[Side, Policy], ...] = (("decode", "one decode host"), ("prefill", "fallback"))
        for side, policy in sides:
            yield Cell(side, lacking, "at any time", policy, WHOLE, side, None, lacking=lacking)


def _lies() -> Iterator[Cell]:
    """Every prefill host sends wrong KV under a right digest; or sends idle frames for ever."""
    for lie in LIES:
        yield Cell("prefill", f"sends {lie}", "in the transfer", "fallback", NOTED, "prefill", None, lie=lie)
    for lie in (LIES[0], *HIDDEN_LIES):
        name = f"sends {lie}, split"
        yield Cell("prefill", name, "in the transfer", "fallback", NOTED, "prefill", None, lie=lie, split=SPLIT_LAYERS)
    lie = LIES[0]
    yield Cell("prefill", f"sends {lie}", "in the transfer", "fail", ERROR, "prefill", None, lie=lie)
    idle = partial(Cell, "prefill", state="in the transfer", trigger="prefill", fault=None, within_s=IDLE_BOUND_S)
    name = "sends idle frames and makes no progress"
    yield idle(name=name, policy="fallback", endings=WHOLE, lie=f"{IDLES} once")
    for policy, endings in _EVERY_TRANSFER:
        yield idle(name=f"{name}, every one", policy=policy, endings=endings, lie=IDLES)


def _poisons() -> Iterator[Cell]:
    """Requests that harm whoever works on them: every host that begins with one ends, or its schema is too much."""
    states = {state: (trigger, replace(fault, times=EVERY)) for state, trigger, fault in _TRIGGERS}
    rows: tuple[tuple[Side, State], ...] = (
        ("decode", "before the slot"),
        ("decode", "in the transfer"),
        ("prefill", "waiting for KV"),
    )
    for side, state in rows:
        yield Cell(side, "killed, every one", state, "fallback", ERROR, *states[state], "killed")
    for name in POISONS:
        yield Cell("decode", f"compiles {name}", "before the slot", "fallback", ERROR, "decode", None, schema=name)


def _linked() -> Iterator[Cell]:
    """A host's cable is cut, or its wall clock jumps."""
    for state, trigger, _ in _TRIGGERS:
        for process in LINKED:
            unnoted = process.startswith("clock")
            lasting = process == "link cut" and state == "in the answer"
            endings = UNNOTED if unnoted else NOTED if lasting else WHOLE
            yield Cell("decode", process, state, "fallback", endings, trigger, None, process)
            if state != "in the answer":
                yield Cell("prefill", process, state, "fallback", endings, trigger, None, process)


def _splits() -> Iterator[Cell]:
    """What can happen in a transfer, to prompts of which each host computes some layers. If it is that of the KV, the
    decode host goes on after the first chunk, or another prefill host does: under "fail" only the latter."""
    for cell in (*_kv(), *_processes(), *_engine_thread(), *_linked()):
        if cell.state == "in the transfer":
            divided = replace(cell, name=f"{cell.name}, split", split=SPLIT_LAYERS)
            if cell.fault is not None and cell.fault.at == MID_TRANSFER:
                endings = cell.endings if cell.side != "kv" else WHOLE | ERROR if cell.policy == "fail" else WHOLE
                divided = replace(divided, fault=replace(cell.fault, at=SECOND_CHUNK), endings=endings)
            yield divided


REPRESENTATIVE_LINKED: Final = (
    "decode: link cut, in the answer, fallback",
    "decode: link cut for 2 s, in the transfer, fallback",
    "prefill: link cut, waiting for KV, fallback",
)
REPRESENTATIVE: Final = (
    "kv: reset in a frame, in the transfer, fallback",
    "kv: byte corrupted in a frame, in the transfer, fallback",
    "kv: blocks swapped, every one, in the transfer, fallback",
    "kv: truncated, every one, in the transfer, fail",
    "kv: trickled in a frame, in the transfer, fallback",
    "prefill: request reset, waiting for KV, fallback",
    "decode: reset, before the slot, fallback",
    "decode: truncated, in the answer, fallback",
    "decode: corrupted, in the answer, one decode host",
    "decode: reset, in the answer, no host left",
    "decode: killed, in the answer, fallback",
    "decode: frozen, in the answer, fallback",
    "decode: killed, in the transfer, one decode host",
    "prefill: killed, in the transfer, fallback",
    "prefill: sends another prompt that ends alike, in the transfer, fallback",
    "prefill: sends zeros, in the transfer, fail",
    "decode: killed, every one, in the transfer, fallback",
    "decode: compiles references, before the slot, fallback",
    "prefill: sends idle frames and makes no progress, every one, in the transfer, fallback",
    "kv: reset, every one, split, in the transfer, fallback",
    "prefill: killed, split, in the transfer, fallback",
    "prefill: sends hidden states of another prompt, split, in the transfer, fallback",
)
"""The cells that `make test` runs, and those of them with cables above."""
