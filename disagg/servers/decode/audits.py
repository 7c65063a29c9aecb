"""What a decode host has found of the KV that prefill hosts sent it: whom it audits, within which bounds, and what it
states about them. Pure.

Every hand-off is audited, unless the model is a mixture of experts. The tokens of an audit use several times the
experts of one, so that its pass may take several times as long: of these, one hand-off in so many is audited that the
mean time to the first token rises by less than COST. A sender that is new here, or was refuted lately, always is.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import ceil, isnan
from typing import Final

from disagg.api.status import SenderAudits, Verdict
from disagg.config import EngineOptions, KVAudit
from disagg.engines.base import EngineInfo
from disagg.engines.base.audit import MEASURES, AuditBounds, AuditFinding, Measure, bounds
from disagg.errors import KVRefuted
from disagg.kv.received import ReceivedKV
from disagg.servers.host.feed import StepTokens

COST: Final = 0.02
"""The share of the mean time to the first token that audits may add to it."""
UNMEASURED: Final = 8
"""One in so many of a mixture's hand-offs, until their times are measured."""
MOST: Final = 64
"""One in so many at least."""
NEW: Final = 3
"""Audits in a row that a sender must pass before some of its hand-offs are not audited."""

ENOUGH: Final = 256
"""Audits of one sender after which their largest deviations tighten its bounds."""
SPARE: Final[dict[Measure, float]] = {"sample": 4.0, "rows": 4.0, "few": 8.0}
"""A tightened bound, over the largest deviation of that many audits. Of 10,000 honest ones the largest was 2.5, 2.6 and
3.9 times that of the first 256 (`python -m tests.hostile.audit honest`); of 1,500 with a linear attention in bfloat16,
the rows of one were 3.8 times as far off as the worst of the first 64."""
TIGHTEST: Final = 1 / 8
"""The least share of the bound in the table: no bound is tightened further."""

MAX_SENDERS: Final = 64
_WEIGHT: Final = 0.9  # of all earlier measurements when a new one comes


def every(setting: KVAudit, mixture: bool, audit_s: float | None, first_token_s: float | None) -> int:
    """One hand-off in so many is audited; 0: none is. setting: of hosts.toml. audit_s, first_token_s: mean seconds of
    an audit, and of hand-offs until their first token without it; None if not measured."""
    if setting == "off":
        return 0
    if isinstance(setting, int):
        return setting
    if setting == "always" or not mixture:
        return 1
    if audit_s is None or not first_token_s:
        return UNMEASURED
    return max(1, min(MOST, ceil(audit_s / (COST * first_token_s))))


@dataclass(slots=True)
class _Sender:
    """accepted, refuted: hand-offs. passed: audits in a row that found nothing. since: hand-offs since the last audit.
    deviation, highest: see SenderAudits. largest: deviations of accepted ones, by measure."""

    accepted: int = 0
    refuted: int = 0
    passed: int = 0
    since: int = 0
    verdict: Verdict | None = None
    deviation: float | None = None
    highest: float | None = None
    largest: dict[Measure, float] = field(default_factory=dict)

    @property
    def proven(self) -> bool:
        """Whether it passed enough audits since it was last refuted."""
        return self.passed >= NEW


@dataclass(frozen=True, slots=True)
class AuditOrder:
    """One hand-off is to be audited. table: the bounds before they are tightened."""

    table: AuditBounds
    limits: AuditBounds


class Audits:
    """One decode host's audits, by sender. info: of the loaded engine, None until then. all_accepted: all KV that was
    received and used was audited, so that what is held of it is right."""

    def __init__(self, options: EngineOptions, info: EngineInfo | None = None) -> None:
        self._options = options
        self._info = info
        self._senders: OrderedDict[str, _Sender] = OrderedDict()  # the one that was asked for least recently first
        self.all_accepted = True
        self._audit_s = Fading(_WEIGHT)
        self._first_token_s = Fading(_WEIGHT)

    @property
    def every(self) -> int:
        """One in so many hand-offs is audited, by what audits have taken so far; 0: none."""
        info = self._info
        if info is None or not info.audits:
            return 0
        return every(self._options.kv_audit, info.mixture, self._audit_s.value, self._first_token_s.value)

    def order(self, kv: ReceivedKV, asked: bool = False) -> AuditOrder | None:
        """The bounds that this KV, which has arrived, is audited with; None if it is not. asked: its caller asks for an
        audit."""
        if kv.tokens == kv.start:
            return None
        if (order := self._order(kv, asked)) is None:
            self.all_accepted = False
        return order

    def _order(self, kv: ReceivedKV, asked: bool) -> AuditOrder | None:
        sender, one_in, info = self._of(kv.sender), self.every, self._info
        sender.since += 1
        if info is None or one_in == 0 or (sender.proven and sender.since < one_in and not asked):
            return None
        sender.since = 0
        same_weights = bool(info.weights) and kv.weights == info.weights
        table = bounds(info.layout.dtype, kv.wire, same_weights=same_weights).times(self._options.kv_audit_tolerance)
        return AuditOrder(table, _tightened(table, sender))

    def judge(self, name: str, order: AuditOrder | None, first: StepTokens, arrived: float) -> float | None:
        """What the first step of an answer shows of received KV: its deviation, None if it was not audited. Raises
        KVRefuted. arrived: when the request did."""
        timing = first.timing
        if isnan(first.tokens[0].logprob):
            raise KVRefuted("the first probability that it gives is no number")
        deviation = None
        if order is not None and timing.audit is not None:
            self.passed(name, order, timing.audit, timing.audit_s)
            deviation = timing.audit.share(order.table)
        elif order is not None:
            self.failed()
        self.answered(first.at - arrived - timing.audit_s)
        return deviation

    def passed(self, name: str, order: AuditOrder, finding: AuditFinding, seconds: float) -> None:
        """An audit has found nothing."""
        sender = self._of(name)
        sender.accepted += 1
        sender.passed += 1
        sender.verdict = "accepted"
        sender.deviation = share = finding.share(order.table)
        sender.highest = max(share, sender.highest or 0.0)
        for one in finding.deviations:
            sender.largest[one.measure] = max(one.value, sender.largest.get(one.measure, 0.0))
        self._audit_s.add(seconds)

    def failed(self) -> None:
        """An audit could not be made, and the KV was used."""
        self.all_accepted = False

    def refuted(self, name: str) -> None:
        """The KV of this sender was wrong."""
        sender = self._of(name)
        sender.refuted += 1
        sender.passed = 0
        sender.verdict = "refuted"

    def answered(self, first_token_s: float) -> None:
        """A hand-off has brought a first token after so many seconds, without its audit."""
        self._first_token_s.add(first_token_s)

    @property
    def figures(self) -> dict[str, SenderAudits]:
        """What was found of each sender that was audited."""
        return {
            name: SenderAudits(
                accepted=one.accepted,
                refuted=one.refuted,
                verdict=one.verdict,
                deviation=one.deviation,
                highest=one.highest,
            )
            for name, one in self._senders.items()
            if one.verdict is not None
        }

    def _of(self, name: str) -> _Sender:
        """A bounded number of senders: names come from other hosts."""
        sender = self._senders.setdefault(name, _Sender())
        self._senders.move_to_end(name)
        while len(self._senders) > MAX_SENDERS:
            self._senders.popitem(last=False)
        return sender


def _tightened(table: AuditBounds, sender: _Sender) -> AuditBounds:
    """Bounds for a sender of which enough is known: never wider than the table."""
    if sender.accepted < ENOUGH:
        return table
    limits = {measure: getattr(table, measure) for measure in MEASURES}
    for measure, largest in sender.largest.items():
        limits[measure] = min(limits[measure], max(SPARE[measure] * largest, TIGHTEST * limits[measure]))
    return AuditBounds(**limits)


class Fading:
    """The ratio of two sums in which earlier measurements fade: a mean, or a speed. weight: of all earlier measurements
    when a new one comes."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._sum = self._per = 0.0

    @property
    def value(self) -> float | None:
        """The ratio; None if nothing was measured."""
        return self._sum / self._per if self._per > 0 else None

    def add(self, value: float, per: float = 1.0) -> None:
        self._sum = self._sum * self._weight + value
        self._per = self._per * self._weight + per
