"""Known latencies -> known sentences."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.bench import Mode
from disagg.bench.energy import Power
from disagg.bench.records import TurnResult
from disagg.bench.result import gather, judge
from disagg.bench.verdict import LinkShare, Samples, compare, crossover, verdict
from tests.bench.bench_parts import WITHOUT_SPLIT, plan, point, record, result
from tests.values import present

JITTER = (0.98, 0.99, 1.0, 1.0, 1.01, 1.02)


def samples(length: int, disagg: float, decode: float, prefill: float, jitter: Any = JITTER) -> Samples:
    by_mode = zip(WITHOUT_SPLIT, (disagg, decode, prefill), strict=True)
    return Samples(length, {mode: [value * scale for scale in jitter] for mode, value in by_mode})


def headline(latencies: Any, **changed: Any) -> str:
    (one,) = result(latencies, **changed).verdict.headlines.values()
    return one.text


def test_the_crossover_is_where_the_line_between_two_gains_meets_zero() -> None:
    assert crossover([(100, -1.0), (300, 1.0)]) == 200
    assert crossover([(100, -3.0), (200, -1.0), (400, 3.0), (800, 9.0)]) == 250


@pytest.mark.parametrize("gains", [[], [(100, 1.0)], [(100, 1.0), (200, 2.0)], [(100, -1.0), (200, -2.0)]])
def test_without_a_change_of_sign_there_is_no_crossover(gains: list[Any]) -> None:
    assert crossover(gains) is None


def test_gains_that_come_and_go_have_no_crossover() -> None:
    assert crossover([(100, -1.0), (200, 1.0), (400, -1.0)]) is None
    assert crossover([(100, 1.0), (200, -1.0)]) is None


def test_winning_everywhere_is_said_with_its_range() -> None:
    text = headline({128: (1.0, 2.0, 1.5), 512: (1.0, 3.0, 2.0)})
    assert text == "Disaggregation wins at every prompt length measured: 1.50 to 3.00 times the speed of one machine."


def test_losing_to_one_machine_everywhere_is_losing() -> None:
    text = headline({128: (1.0, 0.5, 3.0), 512: (1.0, 0.8, 3.0)})
    assert text == "Disaggregation loses: the decode machine alone is faster at every prompt length measured."


def test_the_headline_names_the_later_of_the_two_crossovers() -> None:
    latencies = {100: (1.0, 0.8, 0.5), 300: (1.0, 1.2, 0.8), 500: (1.0, 1.6, 1.2)}
    made = result(latencies).verdict
    assert [round(present(one.crossover)) for one in made.series if one.metric == "e2el"] == [200, 400]
    (found,) = made.headlines.values()
    assert found.decision == "depends"
    assert found.text == "Disaggregation wins from about 400 prompt tokens; below, one machine is faster."


def test_where_the_first_token_waits_for_the_link_is_said_with_how_long() -> None:
    shares = [LinkShare(4000, 0.05, 0.9), LinkShare(16000, 3.9, 7.1), LinkShare(8000, 1.0, 3.0)]
    text = (
        "At 8,000 and 16,000 prompt tokens the first token waits for the link to send KV: 3.90 s of 7.10 s at 16,000."
    )
    made = verdict({"here": {"e2el": [samples(4000, 1.0, 0.5, 0.5)]}}, {"here": shares})
    assert made.sentences("here")[-1] == made.to_json()["links"]["here"] == text
    hidden = verdict({"here": {"e2el": [samples(4000, 1.0, 0.5, 0.5)]}}, {"here": shares[:1]})
    assert made.sentences("here")[:-1] == hidden.sentences("here") and not hidden.links


@pytest.mark.parametrize(("exposed", "said"), [(0.49, False), (0.9, True)])
def test_the_verdict_knows_the_exposed_transfer_of_requests_that_were_handed_over(exposed: float, said: bool) -> None:
    """Not of one that fell back, which waited for nothing."""
    waited = [record(5.0, 6.0, prompt=100, exposed_transfer=exposed, method="disaggregated") for _ in range(4)]
    fell_back = record(5.0, 6.0, prompt=100, exposed_transfer=5.0, method="fallback")
    turns = [TurnResult(0, "disaggregated", False, 0.0, 6.0, (*waited, fell_back))]
    made = judge(gather(plan((point(100),)), turns, Power(), {}))
    assert bool(made.links) is said


def test_noise_is_not_called_a_win() -> None:
    wide = (0.5, 0.7, 0.9, 1.1, 1.4, 1.9)
    series = compare("here", "e2el", "decode-alone", [samples(100, 1.0, 1.05, 1.0, wide)])
    (comparison,) = series.comparisons
    assert comparison.decision == "undecided"
    assert series.sentences == (
        "The data do not decide the whole answer against the decode machine alone at every prompt length measured: "
        "the difference is within the noise; more --requests narrow it.",
    )


def test_no_crossover_is_read_out_of_noise() -> None:
    wide = (0.5, 0.7, 0.9, 1.1, 1.4, 1.9)
    series = compare(
        "here", "e2el", "decode-alone", [samples(n, 1.0, 1.0 + g, 1.0, wide) for n, g in ((1, -0.1), (9, 0.1))]
    )
    assert [one.gain > 0 for one in series.comparisons] == [False, True]
    assert series.crossover is None


def test_few_requests_decide_nothing_however_far_apart() -> None:
    series = compare("here", "ttft", "decode-alone", [samples(100, 1.0, 9.0, 1.0, (1.0, 1.01))])
    assert series.comparisons[0].decision == "undecided"
    assert "it takes 5 completed requests in each mode, and there are 2" in series.sentences[0]


def test_a_sentence_says_where_it_loses_from_where_it_wins_and_by_how_much() -> None:
    series = compare("here", "e2el", "decode-alone", [samples(100, 1.0, 0.8, 1.0), samples(300, 1.0, 1.2, 1.0)])
    assert series.sentences == (
        "Against the decode machine alone, the whole answer comes later at 100 prompt tokens (1.25 times as long at "
        "100, 200 ms more) and sooner from about 200 (1.20 times as fast at 300, 200 ms saved).",
    )


def test_a_mixed_picture_is_described_length_by_length() -> None:
    text = headline({100: (1.0, 2.0, 2.0), 200: (1.0, 0.5, 2.0), 400: (1.0, 2.0, 1.0)})
    assert text == (
        "Disaggregation wins at 100 prompt tokens, loses to a machine alone at 200 prompt tokens, "
        "and is undecided at 400 prompt tokens."
    )


def test_without_a_machine_alone_there_is_no_verdict() -> None:
    cells = [cell for cell in result({100: (1.0, 2.0, 2.0)}).cells if cell.mode == "disaggregated"]
    (found,) = judge(cells).headlines.values()
    assert found.decision == "undecided" and found.text.startswith("No verdict")


def test_what_cannot_be_compared_is_said_once_per_machine() -> None:
    none = [Samples(128, {"disaggregated": [1.0], "decode-alone": [], "prefill-alone": []})]
    assert verdict({"here": {"e2el": none, "ttft": none}}).sentences("here") == [
        "There is nothing to compare with the decode machine alone: one of the two completed no request.",
        "There is nothing to compare with the prefill machine alone: one of the two completed no request.",
    ]


def test_loads_are_judged_apart() -> None:
    made = result({100: (1.0, 2.0, 2.0)}, loads=(1, 4))
    assert list(made.verdict.headlines) == ["output 5, concurrency 1", "output 5, concurrency 4"]


def test_requests_that_fell_back_have_no_say() -> None:
    quick = [record(0.1, 0.2, method="decode-alone") for _ in range(6)]
    fallen = [record(0.1, 9.0, method="fallback") for _ in range(6)]
    turns: list[tuple[Any, list[Any]]] = [("disaggregated", fallen), ("decode-alone", quick)]
    turn_results = [
        TurnResult(0, mode, warmup=False, began=0.0, ended=1.0, records=tuple(records)) for mode, records in turns
    ]
    cells = gather(plan((point(),)), turn_results, Power(), {})
    assert cells[0].figures.fallbacks == 6
    (found,) = judge(cells).headlines.values()
    assert found.decision == "undecided" and found.text.startswith("No verdict")


def test_the_json_has_every_comparison_with_its_decision() -> None:
    body = result({100: (1.0, 0.8, 0.5), 300: (1.0, 1.2, 1.5)}).verdict.to_json()
    first = body["series"][0]
    assert (first["metric"], first["against"]) == ("e2el", "decode-alone")
    assert [one["decision"] for one in first["comparisons"]] == ["loses", "wins"]
    assert first["crossover_prompt_tokens"] == pytest.approx(200)
    assert first["comparisons"][0]["speedup"]["value"] == pytest.approx(0.8)


def test_what_is_open_everywhere_for_one_reason_is_said_once() -> None:
    few = [samples(length, 1.0, 2.0, 1.5, JITTER[:4]) for length in (128, 512)]
    assert verdict({"here": {"e2el": few, "ttft": few}}).sentences("here") == [
        "It takes 5 completed requests in each mode, and there are 4."
    ]
    mixed = [samples(128, 1.0, 2.0, 1.5, JITTER[:4]), samples(512, 1.0, 2.0, 1.5)]
    assert len(verdict({"here": {"e2el": mixed, "ttft": few}}).sentences("here")) == 5


def test_of_an_interrupted_run_the_lack_of_requests_is_said_once() -> None:
    stopped = [Samples(128, {"disaggregated": [1.0] * 3, "decode-alone": [1.0] * 2, "prefill-alone": [1.0]})]
    assert verdict({"here": {"e2el": stopped, "ttft": stopped}}).sentences("here") == [
        "It takes 5 completed requests in each mode, and there are 1."
    ]
    stopped = [*stopped, samples(512, 1.0, 2.0, 1.5)]
    sentences = verdict({"here": {"e2el": stopped, "ttft": stopped}}).sentences("here")
    assert [one for one in sentences if one.startswith("Not decided")] == [
        "Not decided: it takes 5 completed requests in each mode, and there are 1."
    ]


def test_a_reason_that_several_comparisons_share_is_given_once() -> None:
    wide = (0.5, 0.7, 0.9, 1.1, 1.4, 1.9)
    noisy = [samples(128, 1.0, 1.05, 1.0, wide), samples(512, 1.0, 2.0, 1.5)]
    sentences = verdict({"here": {"e2el": noisy, "ttft": noisy}}).sentences("here")
    assert len(sentences) == 5 and "".join(sentences).count("within the noise") == 1
    assert sentences[-1] == "Not decided: the difference is within the noise; more --requests narrow it."
    assert sentences[0].endswith("The data do not decide it at 128 prompt tokens.")


def test_a_whole_request_host_is_compared_with_like_a_machine_alone() -> None:
    by_mode = {"disaggregated": [value * 1.0 for value in JITTER], "whole": [value * 2.0 for value in JITTER]}
    series = compare("output 5", "e2el", "whole", [Samples(100, by_mode)])
    assert series.sentences[0].startswith("Against the whole-request host, the whole answer comes sooner")
    found = verdict({"output 5": {"e2el": [Samples(100, by_mode)], "ttft": []}})
    assert [one.against for one in found.series] == ["whole"]
    assert found.headlines["output 5"].decision == "wins"


FOUR: tuple[Mode, ...] = ("disaggregated", "split", "decode-alone")


def test_a_prefill_host_that_pays_everywhere_is_worth_its_quickest_way() -> None:
    text = headline({2048: (1.0, 0.9, 1.5), 8192: (1.0, 0.8, 2.0)}, modes=FOUR)
    assert text == (
        "The prefill host pays for this model at every prompt length measured: 1.67 to 2.50 times the speed of the "
        "decode machine alone, quickest by a split."
    )


def test_which_way_is_quickest_is_said_by_prompt_length() -> None:
    text = headline({512: (1.0, 1.2, 1.5), 2048: (1.0, 0.8, 2.0), 8192: (1.0, 0.8, 2.0)}, modes=FOUR)
    assert text.endswith(", quickest by a hand-off at 512 prompt tokens, by a split at 2,048 and 8,192 prompt tokens.")


def test_a_prefill_host_that_pays_for_long_prompts_only() -> None:
    made = result({128: (1.0, 1.2, 0.5), 8192: (1.0, 0.8, 2.0)}, modes=FOUR).verdict
    (found,) = made.headlines.values()
    assert found.decision == "depends"
    assert found.text == (
        "The prefill host pays for this model at 8,192 prompt tokens: 2.50 times the speed of the decode machine "
        "alone, quickest by a split; not at 128 prompt tokens."
    )


def test_a_prefill_host_that_does_not_pay_is_said_not_to() -> None:
    made = result({128: (1.0, 1.2, 0.5), 8192: (1.0, 0.9, 0.8)}, modes=FOUR).verdict
    (found,) = made.headlines.values()
    assert found.decision == "loses"
    assert found.text == (
        "The prefill host does not pay for this model: the decode machine alone is faster at every prompt length "
        "measured."
    )


def test_what_is_not_decided_of_a_prefill_host_is_left_open() -> None:
    made = result({128: (1.0, 1.0, 1.0)}, modes=FOUR).verdict
    (found,) = made.headlines.values()
    assert (found.decision, found.text) == (
        "undecided",
        "The data do not decide whether the prefill host pays for this model.",
    )
    text = headline({128: (1.0, 1.0, 1.0), 8192: (1.0, 0.8, 2.0)}, modes=FOUR)
    assert text.endswith("quickest by a split; undecided at 128 prompt tokens.")


def test_a_split_is_compared_with_the_hand_off_in_a_sentence() -> None:
    made = result({2048: (1.0, 0.8, 1.5), 8192: (1.0, 0.8, 2.0)}, modes=FOUR).verdict
    sentences = [one for one in made.sentences("output 5, concurrency 1") if "split" in one]
    everywhere = "comes sooner at every prompt length measured (1.25 times as fast at 2,048"
    assert sentences == [
        f"By a split: against the hand-off, the whole answer {everywhere}, 200 ms saved).",
        f"By a split: against the hand-off, the first token {everywhere}, 100 ms saved).",
    ]
    assert {one.against for one in made.series if one.mode == "split"} == {"disaggregated", "decode-alone"}
