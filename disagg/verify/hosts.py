"""`disagg verify` on a running fleet: the same prompts by each way that it has to answer them.

Every prefill host hands over to every decode host, both compute prompts together, and each of them answers alone:
through their servers and links, with their weights and dtypes. Requests share no held KV, and no short prompt is
computed on the decode host instead.
"""

from __future__ import annotations

import importlib.util
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.abc import InspectLoader
from typing import Final, NamedTuple, Self

import msgspec

from disagg.api.names import AS_IS
from disagg.api.verify import HostsReport, PairReport, SplitComparison, VerifyBounds
from disagg.config import Fleet, Host, Model
from disagg.errors import CapabilityMissing, DeadlineExceeded, DisaggError, ServerUnavailable, UsageError
from disagg.inference.attempt import Alone
from disagg.inference.client import Client
from disagg.inference.types import Completion
from disagg.verify.compare import Answers, agrees, compare_answers, compare_split, limits, quarters, same_weights

PROMPTS: Final = 8
ALTERNATIVES: Final = 20
LEAST_PROMPT_TOKENS: Final = 16
SAMPLE_CHARS: Final = 4000
"""The length of the text whose tokens are counted to find prompts of the wanted length."""
Outcome = Sequence[Completion] | DisaggError
SAMPLE_MODULES: Final = (
    "argparse", "tarfile", "typing", "subprocess", "inspect", "turtle", "pydoc", "zipfile", "decimal",
)  # fmt: skip


class Way(NamedTuple):
    """A way to answer: the names of its hosts, and the role of the one that answers alone. layers: of the model, that
    the prefill host computes of a prompt, while the decode host computes the others; None: all."""

    hosts: tuple[str, ...]
    alone: Alone | None = None
    layers: int | None = None

    def __str__(self) -> str:
        split = "" if self.layers is None else f", split after layer {self.layers}"
        return " → ".join(self.hosts) + (" alone" if self.alone else "") + split


class Divided(NamedTuple):
    """How a model's layers can be divided between two hosts. layers: of the model. refusal: why they cannot be. loaded:
    the prefill host has the first so many only; None: all."""

    layers: int
    refusal: str = ""
    loaded: int | None = None

    @property
    def heads(self) -> Sequence[int]:
        """How many layers the prefill host is asked to compute, one split after the other."""
        if self.refusal:
            return ()
        if self.loaded is None:
            return quarters(self.layers)
        return sorted({*(layers for layers in quarters(self.layers) if layers < self.loaded), self.loaded})


Ask = Callable[[Way, str, int], Completion]
"""The greedy answer of so many tokens to a prompt, by one way. Raises DisaggError."""


def pairs_of(fleet: Fleet, model: Model) -> Sequence[tuple[Host, Host]]:
    """Every prefill host of the model with every decode host. UsageError if there is none."""
    prefill, decode = fleet.serving(model.name, "prefill"), fleet.serving(model.name, "decode")
    if not prefill or not decode:
        missing = "prefill" if not prefill else "decode"
        raise UsageError(
            f"{fleet.path.name} has no {missing} host for {model.name}: there is no hand-off to verify",
            f"disagg verify {model.name} --here compares the engines on this machine",
        )
    return [(one, other) for one in prefill for other in decode]


def require_lengths(model: Model, prompt_tokens: int, max_tokens: int) -> None:
    """UsageError if no such prompts and answers can be compared: they do not fit the context, or the prompts, which
    have about so many tokens, may be too short for a hand-off."""
    if max_tokens > model.context - LEAST_PROMPT_TOKENS:
        most = model.context - LEAST_PROMPT_TOKENS
        raise UsageError(
            f"--max-tokens: at most {most}, for a prompt and the context of {model.name} (got {max_tokens})"
        )
    most = model.context - max_tokens
    if not LEAST_PROMPT_TOKENS <= prompt_tokens <= most:
        message = f"--prompt-tokens: {LEAST_PROMPT_TOKENS} to {most} (got {prompt_tokens})"
        raise UsageError(message, f"{model.name} has a context of {model.context} tokens, {max_tokens} for the answer")


def verify_hosts(
    fleet: Fleet,
    model: Model,
    ask: Ask,
    prompts: Sequence[str],
    max_tokens: int,
    *,
    divided: Callable[[Host, Host], Divided],
) -> HostsReport:
    """Ask for every answer, one after the other, and compare. divided: how a pair can divide the layers."""
    outcomes: dict[Way, Outcome] = {}

    def answers(way: Way) -> Outcome:
        if way not in outcomes:
            outcomes[way] = _answers(ask, way, prompts, max_tokens)
        return outcomes[way]

    judged = []
    for prefill, decode in pairs_of(fleet, model):
        together, how = (prefill.name, decode.name), divided(prefill, decode)
        alone: tuple[Outcome | None, Outcome] = None, answers(Way((decode.name,), "decode"))
        if how.loaded is None:
            by_prefill = answers(Way((prefill.name,), "prefill"))
            report = judge(model, (prefill, decode), answers(Way(together)), by_prefill, alone[1])
            alone = by_prefill, alone[1]
        else:
            report = part_of(model, (prefill, decode), alone[1])
        heads = how.heads if report.bounds is not None else ()
        by_split = {layers: answers(Way(together, layers=layers)) for layers in heads}
        judged.append(with_splits(report, how.refusal, by_split, alone))
    given = [one for outcome in outcomes.values() if not isinstance(outcome, DisaggError) for one in outcome]
    handed = [one for one in given if one.metrics.method == "disaggregated"]
    return HostsReport(
        model=model.name,
        prompts=len(prompts),
        prompt_tokens=max((one.metrics.prompt_tokens for one in given), default=0),
        max_tokens=max_tokens,
        distinct_tokens=len({token.id for one in handed for token in one.tokens}),
        pairs=tuple(judged),
        ok=all(one.ok for one in judged),
    )


def _answers(ask: Ask, way: Way, prompts: Sequence[str], count: int) -> Outcome:
    given = []
    for prompt in prompts:
        try:
            answer = ask(way, prompt, count)
        except DisaggError as error:
            return error
        if len(answer.tokens) != count:
            message = f"{way} answered {len(answer.tokens)} tokens instead of {count}"
            return ServerUnavailable(message, f"disagg logs --host {way.hosts[-1]}")
        given.append(answer)
    return given


def judge(model: Model, pair: tuple[Host, Host], handoff: Outcome, prefill: Outcome, decode: Outcome) -> PairReport:
    """Compare what a prefill and a decode host answered together with what each answered alone. Pure."""
    given = []
    for outcome in (handoff, prefill, decode):
        if isinstance(outcome, DisaggError):
            return PairReport(prefill=pair[0].name, decode=pair[1].name, why=str(outcome))
        given.append(outcome)
    by_handoff, by_prefill, by_decode = ([one.tokens for one in way] for way in given)
    alone = compare_answers(by_prefill, by_decode)
    same, wires = same_weights(model, *pair), {one.metrics.kv_wire or "" for one in given[0]}
    limit, limit_alone = limits(*pair, same=same, as_is=wires == {AS_IS}, alone=alone)
    report = PairReport(
        prefill=pair[0].name,
        decode=pair[1].name,
        same_weights=same,
        handoff_vs_prefill=compare_answers(by_handoff, by_prefill),
        handoff_vs_decode=compare_answers(by_handoff, by_decode),
        prefill_vs_decode=alone,
        bounds=limit,
        bounds_alone=limit_alone,
        kv_wire=", ".join(sorted(wires)),
        kv_bytes=sum(one.metrics.kv_bytes for one in given[0]),
        decode_computed_tokens=max(one.metrics.decode_computed_tokens for one in given[0]),
        deviation=max((one.metrics.deviation for one in given[0] if one.metrics.deviation is not None), default=None),
    )
    why = "; ".join([*_differences(report, limit, limit_alone), *_unused(report, given[0])])
    return msgspec.structs.replace(report, ok=not why, why=why)


def part_of(model: Model, pair: tuple[Host, Host], decode: Outcome) -> PairReport:
    """The report of a pair whose prefill host has the first layers only, and so can neither answer alone nor hand over.
    Splits may differ from the decode host alone by what two hosts differ by."""
    prefill, host = (one.name for one in pair)
    if isinstance(decode, DisaggError):
        return PairReport(prefill=prefill, decode=host, why=str(decode))
    same, nothing = same_weights(model, *pair), compare_answers(_tokens(decode), _tokens(decode))
    _, bounds = limits(*pair, same=same, as_is=True, alone=nothing)
    return PairReport(prefill=prefill, decode=host, same_weights=same, bounds=bounds, bounds_alone=bounds, ok=True)


def with_splits(
    report: PairReport, refusal: str, by_split: Mapping[int, Outcome], alone: tuple[Outcome | None, Outcome]
) -> PairReport:
    """The report with the comparisons of splits, by the layers that were asked of the prefill host. Pure."""
    splits = tuple(_split(report, layers, outcome, alone) for layers, outcome in by_split.items())
    wrong = [f"the split after layer {one.layers}: {one.why}" for one in splits if not one.ok]
    why = "; ".join([*([report.why] if report.why else []), *wrong])
    return msgspec.structs.replace(report, splits=splits, split_refusal=refusal, ok=report.ok and not wrong, why=why)


def _split(report: PairReport, layers: int, outcome: Outcome, alone: tuple[Outcome | None, Outcome]) -> SplitComparison:
    if isinstance(outcome, DisaggError):
        return SplitComparison(layers=layers, why=str(outcome))
    used = {one.metrics.layers for one in outcome}
    if used != {layers}:
        found = ", ".join("all" if one is None else str(one) for one in sorted(used, key=str))
        return SplitComparison(layers=layers, why=f"the prefill host computed {found} layers")
    by_prefill, by_decode = (_tokens(way) for way in alone)
    assert report.bounds is not None, "splits are compared if hand-offs are"
    computed = max(one.metrics.decode_computed_tokens for one in outcome)
    return compare_split(layers, _tokens(outcome), (by_prefill, by_decode), computed, limit=report.bounds)


def _tokens(outcome: Outcome | None) -> Answers:
    """None if there are none."""
    return [one.tokens for one in outcome] if outcome is not None and not isinstance(outcome, DisaggError) else []


def _differences(report: PairReport, limit: VerifyBounds, limit_alone: VerifyBounds) -> Iterator[str]:
    """The comparisons that are not within their bounds, in words."""
    together = f"the hand-off {report.prefill} → {report.decode}"
    compared = (
        (report.handoff_vs_prefill, limit, together, report.prefill),
        (report.handoff_vs_decode, limit, together, report.decode),
        (report.prefill_vs_decode, limit_alone, f"{report.prefill} alone", report.decode),
    )
    for found, bound, one, other in compared:
        if found is not None and not agrees(found, bound):
            yield f"{one} differs from {other} alone"


def _unused(report: PairReport, handoff: Sequence[Completion]) -> Iterator[str]:
    """Whether an answer was given without the KV of a prefill host, in words."""
    if others := sorted({one.metrics.method for one in handoff} - {"disaggregated"}):
        yield f"not every prompt was handed over: {', '.join(others)}"
    elif report.decode_computed_tokens != 1:
        yield f"{report.decode} computed {report.decode_computed_tokens} tokens of a prompt itself"


class FleetClients:
    """Sends requests to the hosts of a fleet, as any client does. A context manager. report: is called with the way of
    each request."""

    def __init__(self, fleet: Fleet, model: Model, token: str, timeout_s: float) -> None:
        self._fleet, self._model, self._token = fleet, model, token
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        self._clients: dict[Way, Client] = {}
        self._stack = ExitStack()
        self.report: Callable[[Way], object] = lambda way: None

    def prompts(self, way: Way, tokens: int) -> Sequence[str]:
        """Texts of about so many tokens each, as the hosts of this way count them."""
        text = sample_text()
        sample = text[:SAMPLE_CHARS]
        counted = self._client(way).count_tokens(self._model.name, sample, timeout=self._left_s())
        return pieces(text, PROMPTS, max(1, len(sample) * tokens // max(1, counted)))

    def ask(self, way: Way, prompt: str, count: int) -> Completion:
        self.report(way)
        return self._client(way).generate(
            self._model.name,
            prompt,
            alone=way.alone,
            max_tokens=count,
            ignore_eos=True,
            logprobs=ALTERNATIVES,
            local_prefill=False,
            split="off" if way.layers is None else way.layers,
            on_kv_failure="fail",
            timeout=self._left_s(),
            cache_salt=secrets.token_hex(8),
        )

    def _client(self, way: Way) -> Client:
        """Splits of a pair have the client of its hand-off, which has learnt what these hosts can do."""
        pair = way._replace(layers=None)
        if pair not in self._clients:
            hosts = {name: self._fleet.hosts[name] for name in way.hosts}
            client = Client(replace(self._fleet, hosts=hosts), token=self._token)
            self._clients[pair] = self._stack.enter_context(client)
        return self._clients[pair]

    def _left_s(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"not all answers within {self._timeout_s:g} s", "raise --timeout")
        return left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def sample_text() -> str:
    """About 0.9 MB of English and code. CapabilityMissing if this Python came without its source."""
    text = "\n".join(_sources())
    if not text:
        raise CapabilityMissing(
            "this Python has no source files of its standard library, of which prompts are made",
            "use a Python from python.org, the system's packages or uv",
        )
    return text


def _sources() -> Iterator[str]:
    """Each module's source. None is imported: `turtle` needs tkinter, which Debian packages separately."""
    for name in SAMPLE_MODULES:
        spec = importlib.util.find_spec(name)
        loader = spec.loader if spec is not None else None
        if isinstance(loader, InspectLoader) and (source := loader.get_source(name)):
            yield source


def pieces(text: str, count: int, length: int) -> Sequence[str]:
    """`count` pieces of `length` characters, from places as far apart as the text allows."""
    text *= -(-(length + count) // len(text))
    step = max(1, (len(text) - length) // count)
    return [text[number * step : number * step + length] for number in range(count)]
