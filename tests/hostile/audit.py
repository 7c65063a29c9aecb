"""Audits of received KV against peers that lie, and against honest ones: tables on standard output.

    python -m tests.hostile.audit lies      per family of caches and form of KV, which lie is found        4 minutes
    python -m tests.hostile.audit honest    2,000 honest hand-offs in each of float32, bfloat16 and int8   6 minutes
    python -m tests.hostile.audit answers   500 hand-offs, every tenth a lie, through servers              2 minutes
    python -m tests.hostile.audit peers     a prefill host that lies beside a good one, 200 requests       2 minutes
    python -m tests.hostile.audit bits      1,000 answers with all, no and some hand-offs audited          4 minutes
    python -m tests.hostile.audit ttft      time to the first token with audits and without, in turn       3 minutes

Several words: these; none: all of them. `honest=200`: so many. The times are of two cores that do nothing else.
"""

from __future__ import annotations

import os
import secrets
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy

from disagg.api.names import AS_IS, INT8, WireForm
from disagg.api.sampling import Sampling
from disagg.config import DType, EngineOptions
from disagg.engines.base import DecodeRequest, EngineInfo, HeldKV
from disagg.engines.base.audit import MEASURES, AuditBounds, AuditFinding, Measure, bounds, plan
from disagg.engines.mlx import cache as mlx_cache
from disagg.engines.mlx.audit import audit
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.process import exit_without_cleanup
from disagg.inference.client import Client
from disagg.inference.hosts.breaker import FAILURES_IF_IT_ANSWERS
from disagg.inference.types import Completion
from disagg.kv.received import ReceivedKV
from disagg.servers.decode.audits import ENOUGH, Audits
from tests import tiny_models
from tests.engines.architectures.configs import config
from tests.engines.architectures.handoff import hand_over
from tests.engines.architectures.pairs import CONTEXT, make
from tests.engines.mlx.mlx_parts import Collector, held_up, prompt
from tests.faults.fleet import hosts_file
from tests.fleets import TOKEN, RunningFleet, running
from tests.hostile.peers import EACH, LIES, LyingEngine
from tests.ports import free_ports
from tests.values import present


@dataclass(frozen=True, slots=True)
class Family:
    """A family of caches. tokens: of its prompts. mixture: it has experts."""

    name: str
    config: Mapping[str, Any]
    tokens: int = 150
    mixture: bool = False

    @property
    def forms(self) -> list[str]:
        """Those that a CPU computes, and that it has rows for: mlx multiplies experts in float32 only there."""
        quantised = self.config.get("head_dim") == WIDE["head_dim"]
        return [
            form
            for form, (dtype, wire) in FORMS.items()
            if (dtype == "float32" or not self.mixture) and (wire == AS_IS or quantised)
        ]


def _tiny(name: str, **changed: Any) -> dict[str, Any]:
    return {**tiny_models.COMMON, **tiny_models.ARCHITECTURES[name], **changed}


def _latent() -> dict[str, Any]:
    return {**config("deepseek_v3"), "first_k_dense_replace": 3}


WIDE: Final = {"head_dim": 64}
"""Heads that are quantised on the wire."""
FAMILIES: Final = (
    Family("full", _tiny("llama", **WIDE)),
    Family("latent", _latent()),
    Family("latent, sparse", {**config("deepseek_v32"), "first_k_dense_replace": 3}),
    Family("sliding, within", _tiny("gemma3_text", **WIDE), tokens=50),
    Family("sliding, beyond", _tiny("gemma3_text", **WIDE)),
    Family("convolution", config("lfm2")),
    Family("linear attention", config("qwen3_5")),
    Family("Mamba 2", {**config("nemotron_h"), **WIDE}),
    Family("rows and state", {**config("falcon_h1"), **WIDE}),
    Family("mixture", _tiny("qwen3_moe", **WIDE), mixture=True),
    Family("mixture, sliding", _tiny("gpt_oss", **WIDE), mixture=True),
)
Form = tuple[DType, WireForm]
FORMS: Final[Mapping[str, Form]] = {
    "float32": ("float32", AS_IS),
    "bfloat16": ("bfloat16", AS_IS),
    "int8": ("float32", INT8),
}


@dataclass(frozen=True, slots=True)
class Peers:
    """A prefill engine that may lie, and a decode engine, of one tiny model."""

    prefill: LyingEngine
    decode: MLXDecodeEngine

    def receive(self, tokens: Sequence[int], wire: WireForm, lie: str = "", start: int = 0) -> ReceivedKV:
        """The KV of a prompt from `start` on, without its last token."""
        self.prefill.lie = lie
        kv = hand_over(self.prefill, self.decode, tokens[:-1], start=start, wire=wire)
        kv.sender, kv.weights = "p", self.decode.info.weights
        return kv

    def finding(self, tokens: Sequence[int], kv: ReceivedKV, held: HeldKV | None = None) -> AuditFinding:
        """What an audit finds, without bounds. held: what the decode engine has of the tokens before the received."""

        def run(backend: Any) -> AuditFinding:
            model = backend.loaded.model
            before = held.read() if held is not None else None
            caches = mlx_cache.build(model, kv, before)
            known = [_bytes_of(caches), bytes(kv.arena.data)]  # type: ignore[union-attr]  # it is not released
            found = audit(model, caches, tokens[: kv.tokens], plan(kv.layout, kv.start, kv.tokens, "audit"), before)
            assert known == [_bytes_of(caches), bytes(kv.arena.data)], "an audit changes nothing"  # type: ignore[union-attr]
            return found

        return self.decode.call(run)


def _bytes_of(caches: Sequence[Any]) -> list[bytes | int]:
    """All that the caches of a request have: arrays, and how many tokens they count."""
    values = (
        value for cache in mlx_cache.entries_of(caches) for part in mlx_cache.parts_of(cache) for value in part.state
    )
    return [numpy.array(one.view(mx.uint8)).tobytes() if isinstance(one, mx.array) else one for one in values]


@contextmanager
def peers(family: Family, dtype: DType) -> Iterator[Peers]:
    """Both engines."""
    with tempfile.TemporaryDirectory(prefix="disagg-audit-") as folder:
        model = Path(folder) / "model"
        make(family.config, model)
        options = EngineOptions("transformers", dtype=dtype, device="cpu", chunk_tokens=48)
        prefill = LyingEngine(model, CONTEXT, options, "")
        decode = MLXDecodeEngine(model, CONTEXT, replace(options, name="mlx"))
        try:
            yield Peers(prefill, decode)
        finally:
            decode.close()


def combinations() -> Iterator[tuple[Family, str, Peers]]:
    """Every family in every form that a CPU computes it in, with its engines."""
    for family in FAMILIES:
        for dtype in ("float32", "bfloat16"):
            if forms := [form for form in family.forms if FORMS[form][0] == dtype]:
                with peers(family, dtype) as pair:
                    for form in forms:
                        yield family, form, pair


def lies(prompts: int = 5) -> None:
    """Per family and form, which lies are found in all of so many prompts: within the bounds of the table (yes), or
    once honest hand-offs have tightened them (later)."""
    found: dict[str, dict[tuple[str, str], str]] = {lie: {} for lie in LIES}
    for family, form, pair in combinations():
        dtype, wire = FORMS[form]
        asked = [prompt(family.tokens + 7 * n, seed=n) for n in range(prompts)]
        limits = (bounds(dtype, wire, same_weights=True), _tightened(pair, family, wire))
        for lie in LIES:
            found[lie][family.name, form] = _cell(pair, asked, wire, lie, limits)
    for form in FORMS:
        columns = [family.name for family in FAMILIES if (family.name, form) in found["zeros"]]
        _write(f"\n{form}: lies that are found (later: after {ENOUGH} honest hand-offs of their sender)")
        _print(["", *columns], [[lie, *(cells[name, form] for name in columns)] for lie, cells in found.items()])


def _cell(
    pair: Peers, asked: Sequence[Sequence[int]], wire: WireForm, lie: str, limits: tuple[AuditBounds, AuditBounds]
) -> str:
    findings = []
    for tokens in asked:
        right, wrong = pair.receive(tokens, wire), pair.receive(tokens, wire, lie)
        if bytes(right.arena.data) == bytes(wrong.arena.data):  # type: ignore[union-attr]  # neither is released
            return "-"  # this model has nothing to lie about
        findings.append(pair.finding(tokens, wrong))
    table, tight = (sum(one.over(limit) is not None for one in findings) for limit in limits)
    if len(asked) in (table, tight):
        return "yes" if table == len(asked) else "later"
    return f"{tight} of {len(asked)}, later" if tight else "no"


def _tightened(pair: Peers, family: Family, wire: WireForm) -> AuditBounds:
    """The bounds after enough honest hand-offs."""
    audits, kv = Audits(EngineOptions("mlx"), _auditing(pair)), _stated(pair, wire)
    for seed in range(ENOUGH):
        order = audits.order(kv)
        assert order is not None
        audits.passed("p", order, _honest(pair, family, wire, seed), 0.0)
    order = audits.order(kv)
    assert order is not None
    return order.limits


def _auditing(pair: Peers) -> EngineInfo:
    """The decode engine's description, as after its warm-up; of a dense model, all of whose hand-offs are audited."""
    return replace(pair.decode.info, audits=True, mixture=False)


def _stated(pair: Peers, wire: WireForm) -> ReceivedKV:
    """What the sender states about its KV; without the KV."""
    return ReceivedKV(pair.decode.info.layout, 1, None, 0, wire, "p", pair.decode.info.weights)


def honest(hand_offs: int = 2000) -> None:
    """False alarms of so many honest hand-offs in each form, with bounds that are tightened as a decode host tightens
    them, and the largest deviations."""
    rows, alarms, total = [], 0, Counter[str]()
    shares = Counter(form for family in FAMILIES for form in family.forms)
    for family, form, pair in combinations():
        wire = FORMS[form][1]
        found = [_honest(pair, family, wire, seed) for seed in range(-(-hand_offs // shares[form]))]
        wrong = _false_alarms(pair, found, wire)
        alarms, total[form] = alarms + wrong, total[form] + len(found)
        rows.append([family.name, form, str(len(found)), *(_spread(found, one) for one in MEASURES), str(wrong)])
    _write(
        f"\nhonest hand-offs ({', '.join(f'{form}: {count}' for form, count in total.items())}): {alarms} false alarms"
    )
    _print(["", "", "hand-offs", *(f"{one}: half, 99 %, most" for one in MEASURES), "false alarms"], rows)
    assert alarms == 0, "honest KV was refuted"


def _honest(pair: Peers, family: Family, wire: WireForm, seed: int) -> AuditFinding:
    tokens = prompt(2 + seed * 37 % (2 * family.tokens), seed=seed)
    return pair.finding(tokens, pair.receive(tokens, wire))


def _false_alarms(pair: Peers, found: Sequence[AuditFinding], wire: WireForm) -> int:
    audits, kv, wrong = Audits(EngineOptions("mlx"), _auditing(pair)), _stated(pair, wire), 0
    for finding in found:
        order = audits.order(kv)
        assert order is not None
        wrong += finding.over(order.limits) is not None
        audits.passed("p", order, finding, 0.0)
    return wrong


def _spread(found: Sequence[AuditFinding], measure: Measure) -> str:
    values = sorted(one.value for finding in found for one in finding.deviations if one.measure == measure)
    if not values:
        return "-"
    return ", ".join(f"{values[int(share * (len(values) - 1))]:.1e}" for share in (0.5, 0.99, 1))


def _write(*what: object) -> None:
    sys.stdout.write(" ".join(map(str, what)) + "\n")
    sys.stdout.flush()


def _print(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of Markdown."""
    for row in (head, ["---"] * len(head), *rows):
        _write("|", " | ".join(row), "|")


@contextmanager
def fleet(model: Path, hosts: Mapping[str, str], lies: Mapping[str, str], **variables: str) -> Iterator[RunningFleet]:
    """Servers of a model: hosts by name, with their roles. variables: of the environment."""
    ports = iter(free_ports(2 * len(hosts)))
    kv_ports = {name: next(ports) for name, role in hosts.items() if role == "decode"}
    path = model.parent / "hosts.toml"
    path.write_text(hosts_file(model, hosts, {name: next(ports) for name in hosts}, kv_ports, 1 << 28))
    with patched_environment(variables), running(path, lies=lies) as servers:
        yield servers


@contextmanager
def patched_environment(variables: Mapping[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


@contextmanager
def _model(entry: Mapping[str, Any]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="disagg-audit-") as folder:
        make(entry, Path(folder) / "model")
        yield Path(folder) / "model"


def _request(tokens: Sequence[int], **options: Any) -> dict[str, Any]:
    """Of an answer that shares no held KV with others."""
    salt = secrets.token_hex(8)
    return {"model": "tiny", "tokens": list(tokens), "cache_salt": salt, "max_tokens": 8, "ignore_eos": True, **options}


def _asked(client: Client, tokens: Sequence[int], **options: Any) -> Completion:
    return client.generate(**_request(tokens, **options))


def _together(client: Client, asked: Sequence[Sequence[int]], **options: Any) -> list[Completion]:
    """The answers to prompts that are asked at the same time."""
    answers = client.generate_all([_request(tokens, **options) for tokens in asked]).answers
    return [present(answer.completion) for answer in answers]


def _ids(answer: Completion) -> list[int]:
    return [token.id for token in answer.tokens]


def answers(hand_offs: int = 500, every: int = 10) -> None:
    """Hand-offs through servers, in float32, of which one in so many is a lie, each lie in turn."""
    with (
        _model(FAMILIES[0].config) as model,
        fleet(model, {"p": "prefill", "d": "decode"}, {"p": EACH}, DISAGG_LIES_EVERY=str(every)) as servers,
        servers.client() as client,
    ):
        wrong, methods = 0, Counter[str]()
        for number in range(hand_offs):
            tokens = prompt(100 + number % 50, seed=number)
            answer = _asked(client, tokens, local_prefill=False)
            wrong += _ids(answer) != _ids(_asked(client, tokens, alone="decode"))
            methods[answer.metrics.method] += 1
        status = servers.status("d")
    _write(f"\n{hand_offs} hand-offs, every {every}th a lie: {dict(methods)}, {wrong} wrong answers")
    _write(f"the decode host is {status['status']!r}, and states of the sender {status['senders']['p']}")
    assert not wrong and status["status"] == "ok"


def hostile_peer(requests: int = 200, together: int = 8) -> None:
    """A prefill host that lies, in each way in turn, beside a good one, and two decode hosts; so many requests at a
    time, so that all have some."""
    hosts = {"p-good": "prefill", "p-liar": "prefill", "d-1": "decode", "d-2": "decode"}
    with (
        _model(FAMILIES[0].config) as model,
        fleet(model, hosts, {"p-liar": EACH}) as servers,
        servers.client() as client,
    ):
        refuted, before_out, wrong = 0, 0, 0
        for first in range(0, requests, together):
            asked = [prompt(100 + number % 50, seed=number) for number in range(first, first + together)]
            given = _together(client, asked, local_prefill=False)
            refuted += sum(answer.metrics.method == "fallback" for answer in given)
            if not client.view.of("p-liar").breaker.ejections:
                before_out = refuted
            alone = _together(client, asked, alone="decode")
            wrong += sum(_ids(one) != _ids(other) for one, other in zip(given, alone, strict=True))
        states = {name: servers.status(name) for name in hosts}
        breaker = client.view.of("p-liar").breaker
    _write(f"\n{requests} requests, {together} at a time, beside a prefill host that lies: {wrong} wrong answers")
    _write(f"{refuted} were refuted: {before_out} before the group in which it was left out; now {breaker}")
    _write({name: status["status"] for name, status in states.items()})
    _write({name: states[name]["senders"] for name in ("d-1", "d-2")})
    assert not wrong and refuted and before_out < FAILURES_IF_IT_ANSWERS
    assert all(status["status"] == "ok" for status in states.values())


def bits(count: int = 1000, batch: int = 10) -> None:
    """Answers in batches, greedy and sampled in turn, with all hand-offs audited, none, and one in four."""
    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    models = [(family, dtype) for family in FAMILIES for dtype in dtypes if dtype in family.forms]
    batches, rows = -(-count // (len(models) * batch)), []
    for family, dtype in models:
        with peers(family, dtype) as pair:
            differing = sum(_differing(pair, family, dtype, batch * number, batch) for number in range(batches))
        rows.append([family.name, dtype, str(batches * batch), str(differing)])
    _write("\nanswers that are not the same, bit for bit, with all hand-offs audited, none, and one in four")
    _print(["", "", "answers", "differ"], rows)
    assert all(row[-1] == "0" for row in rows)


def _differing(pair: Peers, family: Family, dtype: DType, first: int, batch: int) -> int:
    """How many of one batch's answers are not the same in each of the three ways."""
    asked = [prompt(family.tokens // 2 + seed % 90, seed=seed) for seed in range(first, first + batch)]
    received = [pair.receive(tokens, AS_IS) for tokens in asked]
    limits = bounds(dtype, AS_IS, same_weights=True)
    ways: tuple[Callable[[int], AuditBounds | None], ...] = (
        lambda number: limits,
        lambda number: None,
        lambda number: limits if number % 4 == 0 else None,
    )
    given = [_answers(pair, asked, received, [way(number) for number in range(batch)]) for way in ways]
    return sum(any(other[number] != given[0][number] for other in given) for number in range(batch))


def _answers(
    pair: Peers, asked: Sequence[list[int]], received: Sequence[ReceivedKV], limits: Sequence[AuditBounds | None]
) -> list[list[tuple[int, float]]]:
    """Tokens and log-probabilities of one batch, whose requests begin at the same step."""
    collectors = []
    with held_up(pair.decode):
        for number, (tokens, kv, limit) in enumerate(zip(asked, received, limits, strict=True)):
            sampling = Sampling(max_tokens=8, ignore_eos=True, temperature=float(number % 2), seed=number)
            collectors.append(Collector())
            pair.decode.submit(DecodeRequest(f"bits-{number}", tokens, sampling, kv, audit=limit), collectors[-1])
    for collector in collectors:
        collector.result()
    pair.decode.give_up_held(pair.decode.held_bytes)
    return [[(token.id, token.logprob) for token in collector.tokens] for collector in collectors]


def ttft(pairs: int = 5, requests: int = 20) -> None:
    """Of a dense model and of a mixture: two decode hosts, one of which audits, asked in turn."""
    wide = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}
    models = {"dense": _tiny("llama", **wide), "mixture": _tiny("qwen3_moe", **wide, moe_intermediate_size=256)}
    rows = [[name, *_times(entry, pairs, requests)] for name, entry in models.items()]
    _write(f"\nmean seconds to the first token of {pairs} x {requests} prompts of 1,000 tokens")
    _print(["", "audited", "not audited", "more", "per pair", "one in so many"], rows)


def _times(entry: Mapping[str, Any], pairs: int, requests: int) -> list[str]:
    with (
        _model(entry) as model,
        fleet(model, {"p": "prefill", "d-on": "decode", "d-off": "decode"}, {}) as servers,
        ExitStack() as stack,
    ):
        clients = {name: stack.enter_context(_client_of(servers, "p", name)) for name in ("d-on", "d-off")}
        for number, client in enumerate([*clients.values()] * 4):  # compiled, allocated, and known as a sender
            _asked(client, prompt(1000, seed=number), local_prefill=False)
        taken: dict[str, list[list[float]]] = defaultdict(list)
        for pair in range(pairs):
            for name in (("d-on", "d-off"), ("d-off", "d-on"))[pair % 2]:
                taken[name].append([])
                for number in range(requests):
                    answer = _asked(clients[name], prompt(1000, seed=1000 * pair + number), local_prefill=False)
                    assert answer.metrics.method == "disaggregated"
                    taken[name][-1].append(answer.metrics.ttft)
        every = servers.status("d-on")["audit_every"]
    on, off = ([statistics.mean(times) for times in taken[name]] for name in ("d-on", "d-off"))
    more = [with_it / without - 1 for with_it, without in zip(on, off, strict=True)]
    mean_on, mean_off = statistics.mean(on), statistics.mean(off)
    each = ", ".join(f"{one:+.1%}" for one in more)
    return [f"{mean_on:.4f}", f"{mean_off:.4f}", f"{mean_on / mean_off - 1:+.1%}", each, str(every)]


def _client_of(servers: RunningFleet, *names: str) -> Client:
    """A client that knows these hosts only."""
    hosts = {name: servers.fleet.hosts[name] for name in names}
    return Client(replace(servers.fleet, hosts=hosts), token=TOKEN)


PARTS: Final[Mapping[str, Callable[..., None]]] = {
    "lies": lies,
    "honest": honest,
    "answers": answers,
    "peers": hostile_peer,
    "bits": bits,
    "ttft": ttft,
}

if __name__ == "__main__":
    for word in sys.argv[1:] or PARTS:
        part, _, number = word.partition("=")
        PARTS[part](*([int(number)] if number else []))
    exit_without_cleanup(0)
