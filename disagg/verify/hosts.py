"""`disagg verify` on a running fleet: the same prompts by each way that it has to answer them.

Every prefill host hands over to every decode host, and each of them answers alone: through their servers and links,
with their weights and dtypes. Requests share no held KV, and no short prompt is computed on the decode host instead.
"""

from __future__ import annotations

import importlib.util
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.abc import InspectLoader
from typing import Final, NamedTuple, Self

import msgspec

from disagg.api.names import AS_IS
from disagg.api.verify import HostsReport, PairReport, VerifyBounds
from disagg.config import Fleet, Host, Model
from disagg.errors import CapabilityMissing, DeadlineExceeded, DisaggError, ServerUnavailable, UsageError
from disagg.inference.attempt import Alone
from disagg.inference.client import Client
from disagg.inference.types import Completion
from disagg.verify.compare import agrees, compare_answers, limits, same_weights

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
    """A way to answer: the names of its hosts, and the role of the one that answers alone."""

    hosts: tuple[str, ...]
    alone: Alone | None = None

    def __str__(self) -> str:
        return " → ".join(self.hosts) + (" alone" if self.alone else "")


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


def verify_hosts(fleet: Fleet, model: Model, ask: Ask, prompts: Sequence[str], max_tokens: int) -> HostsReport:
    """Ask for every answer, one after the other, and compare."""
    outcomes: dict[Way, Outcome] = {}

    def answers(way: Way) -> Outcome:
        if way not in outcomes:
            outcomes[way] = _answers(ask, way, prompts, max_tokens)
        return outcomes[way]

    judged = [
        judge(
            model,
            (prefill, decode),
            answers(Way((prefill.name, decode.name))),
            answers(Way((prefill.name,), "prefill")),
            answers(Way((decode.name,), "decode")),
        )
        for prefill, decode in pairs_of(fleet, model)
    ]
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
            on_kv_failure="fail",
            timeout=self._left_s(),
            cache_salt=secrets.token_hex(8),
        )

    def _client(self, way: Way) -> Client:
        if way not in self._clients:
            hosts = {name: self._fleet.hosts[name] for name in way.hosts}
            client = Client(replace(self._fleet, hosts=hosts), token=self._token)
            self._clients[way] = self._stack.enter_context(client)
        return self._clients[way]

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
