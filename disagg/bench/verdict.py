"""From figures to sentences: at which prompt lengths a second machine pays on this fleet, and by how much. Pure.

A speedup is median(one machine alone) / median(both, by a hand-off or a split): over 1, both are faster. It is decided
if its 95 % bootstrap interval does not contain 1. The crossover is the prompt length at which the difference of the
medians, linear between the two nearest lengths measured, is 0.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from disagg.bench import Mode
from disagg.bench.stats import Interval, ratio_of_medians
from disagg.units import ms

MIN_SAMPLES = 5  # of each side; a bootstrap interval of fewer means nothing
EXPOSED_SHARE = 0.1  # of a TTFT; a smaller share of waiting for the transfer is not worth a sentence
Metric = Literal["e2el", "ttft"]
Decision = Literal["wins", "loses", "depends", "undecided"]
EVERYWHERE = "at every prompt length measured"
METRICS: tuple[Metric, ...] = ("e2el", "ttft")
_TOO_FEW = f"it takes {MIN_SAMPLES} completed requests in each mode, and there are "  # one digit follows
_MACHINES: Mapping[str, str] = {
    "decode-alone": "the decode machine alone",
    "prefill-alone": "the prefill machine alone",
    "whole": "the whole-request host",
    "disaggregated": "the hand-off",
}
_TOGETHER: Mapping[Mode, str] = {"disaggregated": "by a hand-off", "split": "by a split"}
"""The ways in which both machines answer."""
_WORDS: Mapping[Metric, str] = {"e2el": "whole answer", "ttft": "first token"}


@dataclass(frozen=True, slots=True)
class Samples:
    """Measurements of one metric at one prompt length: seconds by mode."""

    prompt_tokens: int
    by_mode: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class LinkShare:
    """What the disaggregated requests at one prompt length waited for their KV transfers: means in seconds."""

    prompt_tokens: int
    exposed: float
    ttft: float

    @property
    def large(self) -> bool:
        return self.exposed >= EXPOSED_SHARE * self.ttft > 0


@dataclass(frozen=True, slots=True)
class SpeedupAtLength:
    """Both machines against one alone, at one prompt length. gain: difference of the medians, in seconds."""

    prompt_tokens: int
    speedup: Interval
    gain: float
    samples: int

    @property
    def decision(self) -> Literal["wins", "loses", "undecided"]:
        if self.samples < MIN_SAMPLES or self.speedup.low <= 1.0 <= self.speedup.high:
            return "undecided"
        return "wins" if self.speedup.low > 1.0 else "loses"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "decision": self.decision}


@dataclass(frozen=True, slots=True)
class Series:
    """One sweep over prompt lengths of both machines, by `mode`, against one alone. crossover: prompt tokens from which
    both win; None unless a loss and a win are decided and the medians cross once between them."""

    where: str
    metric: Metric
    against: str
    comparisons: tuple[SpeedupAtLength, ...]
    crossover: float | None
    sentences: tuple[str, ...]
    mode: Mode = "disaggregated"

    def to_json(self) -> dict[str, Any]:
        return {
            "where": self.where,
            "mode": self.mode,
            "metric": self.metric,
            "against": self.against,
            "comparisons": [one.to_json() for one in self.comparisons],
            "crossover_prompt_tokens": self.crossover,
            "sentences": list(self.sentences),
        }


@dataclass(frozen=True, slots=True)
class Headline:
    """One sentence on whole answers, against all machines alone; or, if splits were measured, on what the prefill
    machine is worth beside the decode machine. "depends": on the prompt length."""

    decision: Decision
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """headlines: one per family of points. series: all comparisons. links: a sentence per family that waited for its
    KV transfers."""

    headlines: Mapping[str, Headline]
    series: tuple[Series, ...]
    links: Mapping[str, str] = field(default_factory=dict)

    def sentences(self, where: str) -> list[str]:
        """The details below a headline: a line per series, and one on the link. A reason that several lines share is
        given once."""
        return [*self._of_series(where), *filter(None, [self.links.get(where)])]

    def _of_series(self, where: str) -> list[str]:
        series = [one for one in self.series if one.where == where]
        reasons = Counter(reason for one in series if (reason := _reason(one)))
        if len(different := _different(reasons)) == 1 and all(_always(one, "undecided") for one in series):
            reason = different[0]
            return [f"{reason[0].upper()}{reason[1:]}."]
        shared = [reason for reason, count in reasons.items() if count > 1]
        lines = list(dict.fromkeys(" ".join(one.sentences) for one in series if one.sentences))
        for reason in shared:
            lines = [line.replace(f": {reason}.", ".") for line in lines]
        return [*lines, *(f"Not decided: {reason}." for reason in _different(shared))]

    def to_json(self) -> dict[str, Any]:
        headlines = {where: asdict(headline) for where, headline in self.headlines.items()}
        return {"headlines": headlines, "series": [one.to_json() for one in self.series], "links": dict(self.links)}


def verdict(
    families: Mapping[str, Mapping[Metric, Sequence[Samples]]], links: Mapping[str, Sequence[LinkShare]] | None = None
) -> Verdict:
    """The verdict on all families, by name. A family is the points that differ in prompt length only."""
    waited = {where: sentence for where, shares in (links or {}).items() if (sentence := _on_link(shares))}
    series = tuple(
        compare(where, metric, against, samples, mode)
        for where, metrics in families.items()
        for mode in _TOGETHER
        for metric, samples in metrics.items()
        for against in _MACHINES
        if against != mode and any(mode in one.by_mode and against in one.by_mode for one in samples)
    )
    return Verdict(
        {where: _headline([s for s in series if s.where == where and s.metric == "e2el"]) for where in families},
        series,
        waited,
    )


def compare(
    where: str, metric: Metric, against: str, samples: Sequence[Samples], mode: Mode = "disaggregated"
) -> Series:
    """One series in order of prompt length, without lengths at which either side completed nothing."""
    comparisons = tuple(
        _comparison(one, one.by_mode[mode], one.by_mode[against])
        for one in sorted(samples, key=lambda one: one.prompt_tokens)
        if one.by_mode.get(mode) and one.by_mode.get(against)
    )
    decided = {"wins", "loses"} <= {one.decision for one in comparisons}
    cross = crossover([(one.prompt_tokens, one.gain) for one in comparisons]) if decided else None
    sentences = _sentences(metric, against, comparisons, cross)
    if mode == "split":  # what it is worth beside one machine is in the headline
        sentences = [f"By a split: {one[0].lower()}{one[1:]}" for one in sentences if against == "disaggregated"]
    return Series(where, metric, against, comparisons, cross, tuple(sentences), mode)


def crossover(gains: Sequence[tuple[int, float]]) -> float | None:
    """The prompt length at which losses turn into wins; None unless they do exactly once."""
    signs = [gain > 0 for _, gain in gains]
    if signs != sorted(signs) or len(set(signs)) != 2:
        return None
    for (low, loss), (high, win) in itertools.pairwise(gains):
        if loss <= 0 < win:
            return low + (high - low) * -loss / (win - loss)
    raise AssertionError("a sorted mixture has an edge")


def _comparison(one: Samples, both: Sequence[float], alone: Sequence[float]) -> SpeedupAtLength:
    gain = statistics.median(alone) - statistics.median(both)
    return SpeedupAtLength(one.prompt_tokens, ratio_of_medians(alone, both), gain, min(len(both), len(alone)))


def _sentences(metric: Metric, against: str, comparisons: Sequence[SpeedupAtLength], cross: float | None) -> list[str]:
    """What these comparisons decide, and what they do not."""
    if not comparisons:
        return [f"There is nothing to compare with {_MACHINES[against]}: one of the two completed no request."]
    wins, loses, open_ = (
        [one for one in comparisons if one.decision == decision] for decision in ("wins", "loses", "undecided")
    )
    everywhere = {len(comparisons): EVERYWHERE}
    parts = []
    if loses:
        worst = min(loses, key=lambda one: one.speedup.value)
        parts.append(f"later {everywhere.get(len(loses), f'at {_lengths(loses)}')} ({_slower(worst)})")
    if wins:
        best = max(wins, key=lambda one: one.speedup.value)
        start = f"from about {about(cross)}" if cross else everywhere.get(len(wins), f"at {_lengths(wins)}")
        parts.append(f"sooner {start} ({_faster(best)})")
    lines = [f"Against {_MACHINES[against]}, the {_WORDS[metric]} comes {' and '.join(parts)}."] if parts else []
    if open_:
        opening = f"The data do not decide {'it' if parts else f'the {_WORDS[metric]} against {_MACHINES[against]}'}"
        where = everywhere.get(len(open_), f"at {_lengths(open_)}")
        lines.append(f"{opening} {where}: {_why_open(open_)}.")
    return lines


def _on_link(shares: Sequence[LinkShare]) -> str:
    """Where requests waited for the link, and how long at most; empty if they did nowhere."""
    large = sorted((share for share in shares if share.large), key=lambda share: share.prompt_tokens)
    if not large:
        return ""
    worst = max(large, key=lambda share: share.exposed)
    part = f"{ms(1e3 * worst.exposed)} of {ms(1e3 * worst.ttft)}"
    where = f" at {worst.prompt_tokens:,}" if len(large) > 1 else ""
    return f"At {_lengths(large)} the first token waits for the link to send KV: {part}{where}."


def _headline(series: Sequence[Series]) -> Headline:
    """series: of whole answers. That of hand-offs alone, if no split was compared with the decode machine."""
    beside_decode = [line for line in series if line.against == "decode-alone"]
    if any(line.mode == "split" and line.comparisons for line in beside_decode):
        return _worth(beside_decode)
    return _of_handoffs([line for line in series if line.mode == "disaggregated"])


def _of_handoffs(series: Sequence[Series]) -> Headline:
    every = [one for line in series for one in line.comparisons]
    if not every:
        return Headline(
            "undecided", "No verdict: it needs requests that completed with a hand-off, and on one machine."
        )
    if all(one.decision == "undecided" for one in every):
        return Headline("undecided", "The data do not decide whether disaggregation pays.")
    if lost := [line for line in series if _always(line, "loses")]:
        machines = " and ".join(_MACHINES[line.against] for line in lost)
        text = f"Disaggregation loses: {machines} {'is' if len(lost) == 1 else 'are'} faster {EVERYWHERE}."
        return Headline("loses", text)
    if all(_always(line, "wins") for line in series):
        return Headline("wins", f"Disaggregation wins {EVERYWHERE}: {_range(every)}.")
    crossings = [line.crossover for line in series if line.crossover is not None]
    if all(_always(line, "wins") or line.crossover is not None for line in series):
        start = f"{about(max(crossings))} prompt tokens"
        return Headline("depends", f"Disaggregation wins from about {start}; below, one machine is faster.")
    return Headline("depends", _by_length(series))


def _worth(series: Sequence[Series]) -> Headline:
    """Whether the prefill machine pays beside the decode machine, where, and in which way. series: of both ways against
    the decode machine alone."""
    at: dict[int, list[tuple[Mode, SpeedupAtLength]]] = {}
    for line in series:
        for one in line.comparisons:
            at.setdefault(one.prompt_tokens, []).append((line.mode, one))
    best = [max(ways, key=lambda way: way[1].speedup.value) for _, ways in sorted(at.items())]
    won = [way for way in best if way[1].decision == "wins"]
    lost = [one for _, one in best if one.decision == "loses"]
    open_ = [one for _, one in best if one.decision == "undecided"]
    alone = _MACHINES["decode-alone"]
    if not won and not lost:
        return Headline("undecided", "The data do not decide whether the prefill host pays for this model.")
    if won:
        rest = [f"not at {_lengths(lost)}"] if lost else []
        where = f"at {_lengths([one for _, one in won])}" if lost or open_ else EVERYWHERE
        speed = f"{_range_of([one for _, one in won])} times the speed of {alone}, {_ways(won)}"
        text = f"The prefill host pays for this model {where}: {speed}"
    else:
        rest, where = [], f"at {_lengths(lost)}" if open_ else EVERYWHERE
        text = f"The prefill host does not pay for this model: {alone} is faster {where}"
    rest += [f"undecided at {_lengths(open_)}"] if open_ else []
    decision: Decision = "loses" if not won else "depends" if rest else "wins"
    return Headline(decision, f"{'; '.join([text, *rest])}.")


def _ways(won: Sequence[tuple[Mode, SpeedupAtLength]]) -> str:
    """The quickest way, by prompt length if it is not the same everywhere."""
    by_way = {mode: [one for way, one in won if way == mode] for mode in _TOGETHER}
    used = {mode: ones for mode, ones in by_way.items() if ones}
    if len(used) == 1:
        return f"quickest {_TOGETHER[next(iter(used))]}"
    return "quickest " + ", ".join(f"{_TOGETHER[mode]} at {_lengths(ones)}" for mode, ones in used.items())


def _always(line: Series, decision: str) -> bool:
    return bool(line.comparisons) and all(one.decision == decision for one in line.comparisons)


def _by_length(series: Sequence[Series]) -> str:
    at: dict[int, list[SpeedupAtLength]] = {}
    for one in (one for line in series for one in line.comparisons):
        at.setdefault(one.prompt_tokens, []).append(one)
    won = [group[0] for _, group in sorted(at.items()) if all(one.decision == "wins" for one in group)]
    lost = [group[0] for _, group in sorted(at.items()) if any(one.decision == "loses" for one in group)]
    rest = [group[0] for _, group in sorted(at.items()) if group[0] not in won and group[0] not in lost]
    parts = [f"wins at {_lengths(won)}"] if won else []
    parts += [f"loses to a machine alone at {_lengths(lost)}"] if lost else []
    parts += [f"is undecided at {_lengths(rest)}"] if rest else []
    return f"Disaggregation {_listed(parts, ', and ')}."


def _listed(words: Sequence[str], last: str) -> str:
    """a / a and b / a, b and c."""
    return last.join(filter(None, (", ".join(words[:-1]), words[-1])))


def _lengths(comparisons: Sequence[SpeedupAtLength | LinkShare]) -> str:
    numbers = [f"{one.prompt_tokens:,}" for one in comparisons]
    return f"{_listed(numbers, ' and ')} prompt tokens"


def _faster(one: SpeedupAtLength) -> str:
    return f"{one.speedup.value:.2f} times as fast at {one.prompt_tokens:,}, {ms(1e3 * one.gain)} saved"


def _slower(one: SpeedupAtLength) -> str:
    return f"{1 / one.speedup.value:.2f} times as long at {one.prompt_tokens:,}, {ms(-1e3 * one.gain)} more"


def _range(every: Sequence[SpeedupAtLength]) -> str:
    values = _range_of(every)
    return f"{values} times the speed of one machine" if " to " in values else f"{values} times the speed"


def _range_of(every: Sequence[SpeedupAtLength]) -> str:
    values = sorted(one.speedup.value for one in every)
    low, high = f"{values[0]:.2f}", f"{values[-1]:.2f}"
    return low if low == high else f"{low} to {high}"


def _reason(series: Series) -> str:
    """Why comparisons of this series are undecided; "" if none is."""
    undecided = [one for one in series.comparisons if one.decision == "undecided"]
    return _why_open(undecided) if undecided else ""


def _different(reasons: Iterable[str]) -> list[str]:
    """The reasons; of those that differ in how few requests completed only, the one with the fewest."""
    few = sorted(reason for reason in reasons if reason.startswith(_TOO_FEW))
    return [*few[:1], *(reason for reason in reasons if reason not in few)]


def _why_open(comparisons: Sequence[SpeedupAtLength]) -> str:
    if fewest := min((one.samples for one in comparisons if one.samples < MIN_SAMPLES), default=0):
        return f"{_TOO_FEW}{fewest}"
    return "the difference is within the noise; more --requests narrow it"


def about(tokens: float) -> str:
    """A crossover in two significant digits, the precision of the interpolation."""
    return f"{float(f'{tokens:.2g}'):,.0f}"
