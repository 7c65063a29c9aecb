"""`disagg verify` on a fleet: every prefill host with every decode host, and each alone. The hosts are a function."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from disagg.api.events import TokenLogprob
from disagg.config import Fleet, load
from disagg.errors import DisaggError, PeerLost, UsageError
from disagg.inference.attempt import Method
from disagg.inference.types import Completion
from disagg.verify.hosts import Way, pieces, require_lengths, verify_hosts
from tests.cli.answers import completion
from tests.cli.commandline import HOST, write_fleet
from tests.ports import free_ports

PROMPTS = ("one", "two", "three")
COUNT = 4
ALONE: dict[str, Method] = {"decode": "decode-alone", "prefill": "prefill-alone"}


@dataclass
class Hosts:
    """Answers each prompt alike by every way, but those in `wrong`, and fails those in `failing`. asked: each way."""

    wrong: set[Way] = field(default_factory=set)
    failing: dict[Way, DisaggError] = field(default_factory=dict)
    handed_over: Method = "disaggregated"
    computed: int = 1
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
        return replace(made, tokens=tokens)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Two prefill hosts and one decode host."""
    path = write_fleet(tmp_path)
    more = {"name": "prefill-9", "role": "prefill", "engine": "transformers", "model": "tiny", "connector": "local"}
    path.write_text(path.read_text() + HOST.format(**more, kv="", port=free_ports(1)[0]))
    return load(path)


def test_every_prefill_host_hands_over_to_every_decode_host_and_each_answers_alone(fleet: Fleet) -> None:
    hosts = Hosts()
    report = verify_hosts(fleet, fleet.model("tiny"), hosts.ask, PROMPTS, COUNT)
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
    report = verify_hosts(fleet, fleet.model("tiny"), Hosts(wrong={wrong}).ask, PROMPTS, COUNT)
    assert not report.ok
    assert [one.ok for one in report.pairs] == [True, False]
    assert why in report.pairs[1].why


def test_a_link_that_fails_is_that_pairs_failure_and_the_others_are_compared(fleet: Fleet) -> None:
    way = Way(("prefill-1", "decode-1"))
    hosts = Hosts(failing={way: PeerLost("the KV connection broke")})
    report = verify_hosts(fleet, fleet.model("tiny"), hosts.ask, PROMPTS, COUNT)
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
    report = verify_hosts(fleet, fleet.model("tiny"), hosts.ask, PROMPTS, COUNT)
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
    report = verify_hosts(
        fleet, fleet.model("tiny"), lambda way, prompt, count: hosts.ask(way, prompt, count - 1), PROMPTS, COUNT
    )
    assert not report.ok and "answered 3 tokens instead of 4" in report.pairs[0].why


def test_a_model_without_a_decode_host_has_no_hand_off(fleet: Fleet) -> None:
    alone = replace(fleet, hosts={name: host for name, host in fleet.hosts.items() if "prefill" in name})
    with pytest.raises(UsageError, match="no decode host for tiny"):
        verify_hosts(alone, alone.model("tiny"), Hosts().ask, PROMPTS, COUNT)


@pytest.mark.parametrize("length", [1, 50, 500])
def test_prompts_have_the_wanted_length_and_differ(length: int) -> None:
    found = pieces("".join(chr(97 + n % 26) * (1 + n % 7) for n in range(60)), 4, length)
    assert [len(one) for one in found] == [length] * 4
    assert length == 1 or len(set(found)) == 4
