"""Prefill engines and servers that lie: a sample of `python -m tests.hostile.audit`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from disagg.api.names import AS_IS, INT8
from disagg.api.sampling import Sampling
from disagg.engines.base import DecodeRequest
from disagg.engines.base.audit import bounds
from disagg.engines.base.decode import Collector
from disagg.errors import KVRefuted
from disagg.inference.attempts.answer import FALLBACK_WARNING
from disagg.inference.hosts.breaker import FAILURES_IF_IT_ANSWERS
from tests import tiny_models
from tests.engines.heads import Head
from tests.engines.mlx.mlx_parts import prompt, start
from tests.faults import cells
from tests.faults.fleet import hosts_file
from tests.fleets import RunningFleet, running
from tests.hostile.audit import FAMILIES, WIDE, Peers, peers
from tests.hostile.peers import HIDDEN_LIES, LIES
from tests.ports import free_ports

SAMPLE = {
    "latent": ("another prompt that ends alike", "one layer of another prompt", "1 % noise"),
    "sliding, beyond": ("zeros", "one head permuted", "weights of another checkpoint"),
    "linear attention": ("rows shifted by one", "another prompt that ends alike", "rope of another base"),
    "rows and state": ("NaN", "20 early rows zero", "one layer of another prompt"),
}
ALIKE = [family for family in FAMILIES if family.name in SAMPLE]


@pytest.fixture(scope="module", params=ALIKE, ids=lambda family: family.name)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[str, Peers]]:
    with peers(request.param, "float32") as pair:
        yield request.param.name, pair


def test_lies_are_found_in_every_family_of_caches_and_honest_kv_is_not_refuted(pair: tuple[str, Peers]) -> None:
    family, engines = pair
    limits = bounds("float32", AS_IS, same_weights=True)
    for length in (3, 40, 150):
        tokens = prompt(length)
        assert engines.finding(tokens, engines.receive(tokens, AS_IS)).share(limits) < 0.2
    for lie in SAMPLE[family]:
        found = engines.finding(tokens, engines.receive(tokens, AS_IS, lie))
        assert found.over(limits) is not None, f"{lie}: {found}"


def test_after_a_held_prefix_lies_in_what_was_received_are_found_and_what_is_held_stays_as_it_is(
    pair: tuple[str, Peers],
) -> None:
    family, engines = pair
    limits, first = bounds("float32", AS_IS, same_weights=True), prompt(90)
    engines.prefill.lie = ""
    assert start(engines.decode, first, max_tokens=4).result()
    second = [*first, *prompt(70, seed=2)]
    held = engines.decode.find_held(second, "")
    if held is None:
        assert family == "rows and state", "of layers that have both, nothing is held"
        return
    assert 0 < held.tokens <= 90
    for lie, found in (("", False), ("zeros", True), ("one layer of another prompt", True), ("", False)):
        kv = engines.receive(second, AS_IS, lie, held.tokens)
        finding = engines.finding(second, kv, held)
        assert (finding.over(limits) is not None) is found, f"{lie}: {finding}"
    held.release()
    engines.decode.give_up_held(engines.decode.held_bytes)


def test_lies_of_a_head_are_found_also_if_only_its_hidden_states_are_wrong() -> None:
    (family,) = (one for one in FAMILIES if one.name == "full")
    limits, tokens = bounds("float32", AS_IS, same_weights=True), prompt(150)
    with peers(family, "float32") as engines:
        layers = engines.decode.info.split.layers // 2
        for lie in ("", *HIDDEN_LIES, "zeros", "another prompt that ends alike", "weights of another checkpoint"):
            engines.prefill.lie = lie
            collector = Collector()
            head = Head(engines.prefill, engines.decode, tokens, layers)
            sampling = Sampling(max_tokens=4, ignore_eos=True)
            request = DecodeRequest(f"lie {lie}", tokens, sampling, arriving=head.arriving, audit=limits)
            engines.decode.submit(request, collector)
            head.finish()
            refuted = isinstance(collector.timing.exception(60), KVRefuted)
            assert refuted == bool(lie), lie or "honest"
            head.arriving.release()


def test_kv_that_was_quantised_on_the_wire_has_bounds_of_its_own() -> None:
    (family,) = (one for one in FAMILIES if one.name == "full")
    assert family.config["head_dim"] == WIDE["head_dim"]
    exact, limits = (bounds("float32", wire, same_weights=True) for wire in (AS_IS, INT8))
    with peers(family, "float32") as engines:
        tokens = prompt(150)
        honest = engines.finding(tokens, engines.receive(tokens, INT8))
        assert honest.over(exact) is not None and honest.over(limits) is None
        for lie in ("zeros", "one layer of another prompt"):
            assert engines.finding(tokens, engines.receive(tokens, INT8, lie)).over(limits) is not None


def test_the_fault_matrix_has_a_row_for_every_lie() -> None:
    assert (set(cells.LIES), set(cells.HIDDEN_LIES)) == (set(LIES), set(HIDDEN_LIES))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """A liar, beside a good prefill host, and a decode host."""
    folder = tmp_path_factory.mktemp("hostile")
    model = tiny_models.make("llama", folder / "model")
    hosts = {"p-good": "prefill", "p-liar": "prefill", "d-1": "decode"}
    ports = dict(zip(hosts, free_ports(3), strict=True))
    (folder / "hosts.toml").write_text(hosts_file(model, hosts, ports, {"d-1": free_ports(1)[0]}, 1 << 26))
    with running(folder / "hosts.toml", lies={"p-liar": "another prompt that ends alike"}) as fleet:
        yield fleet


def test_a_liar_beside_a_good_host_is_out_after_three_and_every_answer_is_right(fleet: RunningFleet) -> None:
    """So many at a time that the liar is asked, too, once it is known to be the slower one."""
    with fleet.client() as client:
        view = client.view
        refuted = 0
        for first in range(0, 80, 8):
            asked = [prompt(80 + number, seed=number) for number in range(first, first + 8)]
            answers = client.generate_all([_request(tokens, f"a {first}") for tokens in asked]).answers
            alone = client.generate_all([_request(tokens, f"b {first}", alone="decode") for tokens in asked]).answers
            for one, other in zip(answers, alone, strict=True):
                assert one.completion is not None and other.completion is not None
                assert [t.id for t in one.completion.tokens] == [t.id for t in other.completion.tokens]
                wrong = one.completion.metrics.method == "fallback"
                refuted += wrong
                assert (
                    any(w.startswith(f"{FALLBACK_WARNING}: the KV from p-liar") for w in one.completion.warnings)
                    == wrong
                )
            if view.of("p-liar").breaker.ejections:
                break
        assert view.of("p-liar").breaker.ejections and refuted >= FAILURES_IF_IT_ANSWERS
        assert view.of("p-good").breaker.failures == view.of("d-1").breaker.failures == 0
    status = fleet.status("d-1")
    assert status["status"] == "ok" and status["audit_every"] == 1
    assert status["senders"]["p-liar"]["refuted"] == refuted and status["senders"]["p-liar"]["accepted"] == 0
    assert status["counters"]["refuted"] == refuted and status["senders"].get("p-good", {}).get("refuted", 0) == 0


def _request(tokens: list[int], salt: str, **options: object) -> dict[str, object]:
    more = {"max_tokens": 6, "ignore_eos": True, "local_prefill": False, **options}
    return {"model": "tiny", "tokens": tokens, "cache_salt": salt, **more}
