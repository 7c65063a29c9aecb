"""`disagg verify` on a fleet: every prefill host with every decode host, and each alone. The hosts are a function."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from disagg.api.events import TokenLogprob
from disagg.api.layout import SplitLayout
from disagg.api.verify import HostsReport
from disagg.config import Fleet, load
from disagg.errors import DisaggError, PeerLost, UsageError
from disagg.inference.attempt import Method
from disagg.inference.types import Completion
from disagg.verify.compare import quarters, split_layers
from disagg.verify.hosts import Ask, Divided, Way, pieces, require_lengths, verify_hosts
from tests.cli.answers import completion
from tests.cli.commandline import HOST, write_fleet
from tests.ports import free_ports

PROMPTS = ("one", "two", "three")
COUNT = 4
WHOLE = Divided(4, "its layers share KV")
ALONE: dict[str, Method] = {"decode": "decode-alone", "prefill": "prefill-alone"}


@dataclass
class Hosts:
    """Answers each prompt alike by every way, but those in `wrong`, and fails those in `failing`. used: layers of a
    split, if not those that are asked for. asked: each way."""

    wrong: set[Way] = field(default_factory=set)
    failing: dict[Way, DisaggError] = field(default_factory=dict)
    handed_over: Method = "disaggregated"
    computed: int = 1
    used: int | None = None
    asked: list[Way] = field(default_factory=list)

    def ask(self, way: Way, prompt: str, count: int) -> Completion:
        self.asked.append(way)
        if error := self.failing.get(way):
            raise error
        first = (999 if way in self.wrong else 100) + PROMPTS.index(prompt)
        ids = range(first, first + count)
        tokens = tuple(TokenLogprob(id, math.log(0.9), ((id, math.log(0.9)), (5, math.log(0.05)))) for id in ids)
        method = ALONE[way.alone] if way.alone else self.handed_over
        made = completion("tiny", method=method, kv_wire="as-is", decode_computed_tokens=self.computed, prompt_tokens=9)
        metrics = replace(made.metrics, layers=self.used if way.layers and self.used else way.layers)
        return replace(made, tokens=tokens, metrics=metrics)


def verified(fleet: Fleet, hosts: Hosts, divided: Divided = WHOLE, ask: Ask | None = None) -> HostsReport:
    return verify_hosts(
        fleet, fleet.model("tiny"), ask or hosts.ask, PROMPTS, COUNT, divided=lambda prefill, decode: divided
    )


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Two prefill hosts and one decode host."""
    path = write_fleet(tmp_path)
    more = {"name": "prefill-9", "role": "prefill", "engine": "transformers", "model": "tiny", "connector": "local"}
    path.write_text(path.read_text() + HOST.format(**more, kv="", port=free_ports(1)[0]))
    return load(path)


def test_every_prefill_host_hands_over_to_every_decode_host_and_each_answers_alone(fleet: Fleet) -> None:
    hosts = Hosts()
    report = verified(fleet, hosts)
    assert report.ok
    ways = {
        Way(("prefill-1", "decode-1")),
        Way(("prefill-9", "decode-1")),
        Way(("prefill-1",), "prefill"),
        Way(("prefill-9",), "prefill"),
        Way(("decode-1",), "decode"),
    }
    assert set(hosts.asked) == ways
    assert len(hosts.asked) == len(ways) * len(PROMPTS), "each answer is asked for once"
    assert [(one.prefill, one.decode, one.same_weights) for one in report.pairs] == [
        ("prefill-1", "decode-1", True),
        ("prefill-9", "decode-1", True),
    ]
    assert (report.prompts, report.prompt_tokens, report.distinct_tokens) == (3, 9, 6)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (Way(("prefill-9", "decode-1")), "the hand-off prefill-9 → decode-1 differs from prefill-9 alone"),
        (Way(("prefill-9",), "prefill"), "prefill-9 alone differs from decode-1 alone"),
    ],
)
def test_a_way_whose_tokens_differ_fails_its_pair_and_no_other(fleet: Fleet, wrong: Way, why: str) -> None:
    report = verified(fleet, Hosts(wrong={wrong}))
    assert not report.ok
    assert [one.ok for one in report.pairs] == [True, False]
    assert why in report.pairs[1].why


def test_a_link_that_fails_is_that_pairs_failure_and_the_others_are_compared(fleet: Fleet) -> None:
    way = Way(("prefill-1", "decode-1"))
    hosts = Hosts(failing={way: PeerLost("the KV connection broke")})
    report = verified(fleet, hosts)
    assert [one.ok for one in report.pairs] == [False, True] and not report.ok
    assert "the KV connection broke" in report.pairs[0].why and report.pairs[0].handoff_vs_decode is None
    assert hosts.asked.count(way) == 1, "a way that fails is not asked again"


@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        (Hosts(handed_over="local"), "not every prompt was handed over: local"),
        (Hosts(computed=7), "decode-1 computed 7 tokens of a prompt itself"),
    ],
)
def test_answers_without_the_kv_of_the_prefill_host_prove_nothing(fleet: Fleet, hosts: Hosts, why: str) -> None:
    report = verified(fleet, hosts)
    assert not report.ok
    assert report.pairs[0].why == why


@pytest.mark.parametrize(
    ("prompt", "answer", "message"),
    [
        (100_000, 64, "--prompt-tokens: 16 to 1984 (got 100000)"),
        (1985, 64, "--prompt-tokens: 16 to 1984 (got 1985)"),
        (1, 1, "--prompt-tokens: 16 to 2047 (got 1)"),
        (200, 2048, "--max-tokens: at most 2032, for a prompt and the context of tiny (got 2048)"),
        (1984, 64, ""),
        (16, 1, ""),
    ],
)
def test_lengths_that_cannot_be_compared_are_a_usage_error(
    fleet: Fleet, prompt: int, answer: int, message: str
) -> None:
    if not message:
        require_lengths(fleet.model("tiny"), prompt, answer)
        return
    with pytest.raises(UsageError) as raised:
        require_lengths(fleet.model("tiny"), prompt, answer)
    assert raised.value.message == message


def test_an_answer_that_is_too_short_is_no_answer(fleet: Fleet) -> None:
    hosts = Hosts()
    report = verified(fleet, hosts, ask=lambda way, prompt, count: hosts.ask(way, prompt, count - 1))
    assert not report.ok and "answered 3 tokens instead of 4" in report.pairs[0].why


def test_a_model_without_a_decode_host_has_no_hand_off(fleet: Fleet) -> None:
    alone = replace(fleet, hosts={name: host for name, host in fleet.hosts.items() if "prefill" in name})
    with pytest.raises(UsageError, match="no decode host for tiny"):
        verified(alone, Hosts())


def test_each_pair_is_compared_with_three_splits_of_the_layers(fleet: Fleet) -> None:
    hosts = Hosts()
    report = verified(fleet, hosts, Divided(32))
    assert report.ok
    for pair in report.pairs:
        assert pair.split_refusal == ""
        assert [(one.layers, one.ok, one.computed_tokens) for one in pair.splits] == [
            (8, True, 1),
            (16, True, 1),
            (24, True, 1),
        ]
        for one in pair.splits:
            assert one.vs_prefill is not None and one.vs_decode is not None
            assert one.vs_prefill.equal_tokens == one.vs_decode.equal_tokens == COUNT * len(PROMPTS)
    asked = [way for way in hosts.asked if way.layers]
    assert len(asked) == 2 * 3 * len(PROMPTS)


def test_a_model_that_is_not_divided_is_compared_whole_and_says_why(fleet: Fleet) -> None:
    hosts = Hosts()
    report = verified(fleet, hosts)
    assert report.ok
    assert [(one.splits, one.split_refusal) for one in report.pairs] == [((), "its layers share KV")] * 2
    assert not [way for way in hosts.asked if way.layers]


def test_a_split_that_answers_otherwise_fails_its_pair_by_its_layer(fleet: Fleet) -> None:
    wrong = Way(("prefill-9", "decode-1"), layers=2)
    report = verified(fleet, Hosts(wrong={wrong}), Divided(4))
    assert [one.ok for one in report.pairs] == [True, False] and not report.ok
    assert report.pairs[1].why == "the split after layer 2: it differs from prefill alone; it differs from decode alone"
    assert [one.ok for one in report.pairs[1].splits] == [True, False, True]


def test_a_split_that_fails_is_its_own_failure(fleet: Fleet) -> None:
    failing = Way(("prefill-1", "decode-1"), layers=3)
    report = verified(fleet, Hosts(failing={failing: PeerLost("the head was killed")}), Divided(4))
    assert not report.ok and "the split after layer 3: " in report.pairs[0].why
    assert "the head was killed" in report.pairs[0].splits[2].why and report.pairs[0].handoff_vs_decode is not None


def test_a_split_that_was_not_used_proves_nothing(fleet: Fleet) -> None:
    report = verified(fleet, Hosts(used=4), Divided(4))
    assert not report.ok
    assert [one.why for one in report.pairs[0].splits] == ["the prefill host computed 4 layers"] * 3


def test_a_host_with_the_first_layers_only_is_compared_with_the_decode_host_alone(fleet: Fleet) -> None:
    hosts = Hosts()
    report = verified(fleet, hosts, Divided(32, loaded=20))
    assert report.ok
    assert [one.layers for one in report.pairs[0].splits] == [8, 16, 20]
    for one in report.pairs[0].splits:
        assert one.vs_prefill is None and one.vs_decode is not None and one.vs_decode.equal_tokens == 12
    assert {way.alone for way in hosts.asked if way.layers is None} == {"decode"}, "no hand-off, and it never answers"
    wrong = verified(fleet, Hosts(wrong={Way(("prefill-9", "decode-1"), layers=20)}), Divided(32, loaded=20))
    assert [one.why for one in wrong.pairs] == ["", "the split after layer 20: it differs from decode alone"]


def test_a_split_whose_prompt_the_decode_host_computed_proves_nothing(fleet: Fleet) -> None:
    pair = verified(fleet, Hosts(computed=7), Divided(2)).pairs[0]
    assert [one.why for one in pair.splits] == ["the decode end computed 7 tokens of a prompt itself"]
    assert "the split after layer 1: the decode end computed 7 tokens" in pair.why


@pytest.mark.parametrize(
    ("layers", "found"), [(32, [8, 16, 24]), (4, [1, 2, 3]), (3, [1, 2]), (2, [1]), (1, []), (0, [])]
)
def test_splits_are_a_quarter_half_and_three_quarters_as_far_as_there_are_layers(layers: int, found: list[int]) -> None:
    assert quarters(layers) == found


def test_a_split_begins_with_a_layer_that_keeps_something() -> None:
    assert split_layers(SplitLayout(8, (3, 7), 16)) == [4, 6]


@pytest.mark.parametrize("length", [1, 50, 500])
def test_prompts_have_the_wanted_length_and_differ(length: int) -> None:
    found = pieces("".join(chr(97 + n % 26) * (1 + n % 7) for n in range(60)), 4, length)
    assert [len(one) for one in found] == [length] * 4
    assert length == 1 or len(set(found)) == 4
