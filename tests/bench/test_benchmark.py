"""An order becomes a plan, or one clear refusal; a plan on a real fleet becomes a result."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from disagg.bench import energy
from disagg.bench.benchmark import BenchSpec, ServerUnderTest, benchmark, can_split, prepare, read_servers
from disagg.bench.load import RunMonitor
from disagg.bench.plan import ArrivalPattern
from disagg.bench.records import MODES
from disagg.bench.result import BenchHost
from disagg.bench.workloads import LengthTrace, RandomTokens
from disagg.config import Fleet, load
from disagg.errors import ServerUnavailable, UsageError
from disagg.token import TOKEN_FILE_VARIABLE
from tests import tiny_models
from tests.bench.bench_parts import WITHOUT_SPLIT, point
from tests.fleets import TOKEN, RunningFleet, running, write_hosts
from tests.simulated import write_simulated
from tests.values import present
from tests.whole.fake_openai import Script, ended, openai_server, whole_host, with_whole


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    (tmp_path / "model").mkdir()
    return load(write_hosts(tmp_path, {"tiny": tmp_path / "model"}, context=2048))


@pytest.fixture
def decode_only(tmp_path: Path) -> Fleet:
    path = write_hosts(tmp_path, {"tiny": tmp_path})
    text = path.read_text()
    begin, end = text.index("[hosts.tiny-prefill]"), text.index("[hosts.tiny-decode]")
    path.write_text(text[:begin] + text[end:])
    return load(path)


def trace_file(folder: Path, *lengths: int) -> Path:
    path = folder / "trace.jsonl"
    rows = [
        {"timestamp": 100 * n, "input_length": length, "output_length": 4, "hash_ids": list(range(-(-length // 512)))}
        for n, length in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_by_default_all_modes_run_the_usual_lengths_that_fit(fleet: Fleet) -> None:
    plan, workload, left_out = prepare(fleet, BenchSpec("tiny"), 640)
    assert plan.modes == WITHOUT_SPLIT and plan.requests == 10 and left_out == 0
    assert plan.points == (point(128, 64), point(512, 64))
    assert workload == RandomTokens(640)


def test_a_sweep_is_every_combination(fleet: Fleet) -> None:
    spec = BenchSpec("tiny", prompt_tokens=(10, 20), output_tokens=(1, 2), rates=(0.5, 2.0))
    plan, _, _ = prepare(fleet, spec, 640)
    assert len(set(plan.points)) == len(plan.points) == 8
    assert {p.load for p in plan.points} == {ArrivalPattern(rate=0.5), ArrivalPattern(rate=2.0)}


def test_of_a_prefill_host_with_the_first_layers_no_answer_and_no_whole_prompt_is_measured(tmp_path: Path) -> None:
    path = write_hosts(tmp_path, {"tiny": tmp_path}, prefill={"layers": "0:2"})
    assert prepare(load(path), BenchSpec("tiny"), 640, splits=True)[0].modes == ("split", "decode-alone")
    with pytest.raises(UsageError, match="--mode prefill-alone: no prefill host of tiny has all of its layers"):
        prepare(load(path), BenchSpec("tiny", modes=("prefill-alone",)), 640, splits=True)


def test_without_a_prefill_host_only_the_decode_host_is_measured(decode_only: Fleet) -> None:
    assert prepare(decode_only, BenchSpec("tiny"), 640)[0].modes == ("decode-alone",)
    with pytest.raises(UsageError, match="--mode disaggregated: no prefill host serves tiny"):
        prepare(decode_only, BenchSpec("tiny", modes=("disaggregated",)), 640)


def test_a_split_is_measured_if_the_hosts_can_compute_a_prompt_together(fleet: Fleet) -> None:
    assert prepare(fleet, BenchSpec("tiny"), 640, splits=True)[0].modes == MODES
    alone = BenchSpec("tiny", modes=("split", "decode-alone"))
    assert prepare(fleet, alone, 640, splits=True)[0].modes == ("split", "decode-alone")
    with pytest.raises(UsageError, match="--mode split: the hosts of tiny do not compute a prompt together"):
        prepare(fleet, alone, 640)


def test_only_a_pair_that_can_divide_the_layers_makes_a_split() -> None:
    def host(role: str, *, splits: bool) -> ServerUnderTest:
        return ServerUnderTest(BenchHost("h", role, "a", "", "b", simulated=False, versions={}), 640, splits)

    assert can_split([host("prefill", splits=True), host("prefill", splits=False), host("decode", splits=True)])
    assert not can_split([host("prefill", splits=True), host("decode", splits=False)])
    assert not can_split([host("prefill", splits=False), host("decode", splits=True)])


def with_baseline(fleet: Fleet, *, alone: bool = False, port: int = 9) -> Fleet:
    return with_whole(fleet, whole_host("tiny", port), alone=alone)


def texts(folder: Path) -> dict[str, Any]:
    path = folder / "prompt.jsonl"
    path.write_text('{"prompt": "def f(x):"}\n{"prompt": "return x"}\n')
    return {"kind": "prompts", "file": path}


def test_whole_request_hosts_are_a_baseline_of_texts(fleet: Fleet, decode_only: Fleet, tmp_path: Path) -> None:
    spec = BenchSpec("tiny", **texts(tmp_path))
    every = BenchSpec("tiny", modes=(*WITHOUT_SPLIT, "whole"), **texts(tmp_path))
    both = BenchSpec("tiny", modes=("decode-alone", "whole"), **texts(tmp_path))
    assert prepare(with_baseline(fleet), every, 640)[0].modes == (*WITHOUT_SPLIT, "whole")
    assert prepare(with_baseline(decode_only), both, 640)[0].modes == ("decode-alone", "whole")
    assert prepare(with_baseline(fleet, alone=True), spec, 0)[0].modes == ("whole",)


def test_servers_of_others_are_measured_only_if_they_are_named(fleet: Fleet, tmp_path: Path) -> None:
    assert prepare(with_baseline(fleet), BenchSpec("tiny", **texts(tmp_path)), 640)[0].modes == WITHOUT_SPLIT
    assert prepare(with_baseline(fleet), BenchSpec("tiny"), 640)[0].modes == WITHOUT_SPLIT


@pytest.mark.parametrize(
    ("baseline", "alone", "changed", "message"),
    [
        (False, False, {"modes": ("whole",)}, "--mode whole: no whole-request host serves tiny"),
        (True, False, {"modes": ("whole",)}, "whole-request hosts take text, not token ids"),
        (True, True, {}, "whole-request hosts take text, not token ids"),
    ],
)
def test_a_baseline_that_cannot_be_measured_is_refused(
    baseline: bool, alone: bool, changed: dict[str, Any], message: str, fleet: Fleet
) -> None:
    with pytest.raises(UsageError, match=message):
        prepare(with_baseline(fleet, alone=alone) if baseline else fleet, BenchSpec("tiny", **changed), 640)


def test_a_mode_without_its_host_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    spec = BenchSpec("tiny", modes=("decode-alone",), **texts(tmp_path))
    with pytest.raises(UsageError, match="--mode decode-alone: no prefill or decode host serves tiny"):
        prepare(with_baseline(fleet, alone=True), spec, 640)


async def test_a_whole_request_host_is_measured_like_the_others(fleet: Fleet, tmp_path: Path) -> None:
    pieces = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in ("a", "b")]
    script = Script([*pieces, *ended("length", prompt=9, answer=2)])
    spec = BenchSpec("tiny", output_tokens=(2,), requests=2, warmup=0, **texts(tmp_path))
    with openai_server(script) as port:
        result = await benchmark(with_baseline(fleet, alone=True, port=port), spec, RunMonitor(), TOKEN)
    (cell,) = result.cells
    assert (cell.mode, cell.figures.completed, cell.figures.failed) == ("whole", 2, 0)
    assert (cell.figures.total_input_tokens, cell.figures.total_output_tokens) == (18, 4)
    assert [(host.name, host.role, host.backend) for host in result.hosts] == [("ollama", "whole", "openai")]
    asked = [body for path, _, body in script.asked if path == "/v1/completions"]
    assert {body["prompt"] for body in asked} == {"def f(x):", "return x"}
    assert not any("authorization" in {name.lower() for name in headers} for _, headers, _ in script.asked)


async def test_an_answer_of_another_length_is_a_failure_of_the_baseline(fleet: Fleet, tmp_path: Path) -> None:
    script = Script([{"choices": [{"index": 0, "text": "a", "finish_reason": None}]}, *ended("stop", answer=1)])
    spec = BenchSpec("tiny", output_tokens=(2,), requests=1, warmup=0, **texts(tmp_path))
    with openai_server(script) as port:
        result = await benchmark(with_baseline(fleet, alone=True, port=port), spec, RunMonitor(), TOKEN)
    assert [(mode, kind) for mode, kind, _ in result.failures] == [("whole", "WrongTokenCount")]


def test_enough_requests_are_made_to_reach_the_concurrency(fleet: Fleet) -> None:
    assert prepare(fleet, BenchSpec("tiny", concurrency=(16,)), 640)[0].requests == 32
    with pytest.raises(UsageError, match="--requests 4 never reaches --concurrency 16"):
        prepare(fleet, BenchSpec("tiny", concurrency=(16,), requests=4), 640)


def test_a_trace_runs_at_its_own_times_and_tells_what_does_not_fit(fleet: Fleet, tmp_path: Path) -> None:
    spec = BenchSpec("tiny", kind="mooncake", file=trace_file(tmp_path, 600, 5000, 300))
    plan, workload, left_out = prepare(fleet, spec, 640)
    assert isinstance(workload, LengthTrace) and [row.input_length for row in workload.rows] == [600, 300]
    assert (plan.requests, left_out, plan.points) == (2, 1, (point(None, None, concurrency=None),))


def test_texts_have_their_own_prompt_lengths_and_the_stated_output_length(fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("x = 1")
    plan, _, _ = prepare(fleet, BenchSpec("tiny", kind="prompts", file=path, output_tokens=(5,)), 640)
    assert plan.points == (point(None, 5),)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt_tokens": (2040,), "output_tokens": (9,)}, "over the model's context of 2,048 tokens"),
        ({"output_tokens": (2040,)}, "no default prompt fits"),
        ({"kind": "sharegpt"}, "--workload sharegpt needs a file"),
        ({"concurrency": (1,), "rates": (1.0,)}, "exclude each other"),
        ({"requests": 90_000}, "over 100,000"),
    ],
)
def test_an_order_that_cannot_be_carried_out_is_refused_before_the_first_request(
    changed: dict[str, Any], message: str, fleet: Fleet
) -> None:
    with pytest.raises(UsageError, match=message):
        prepare(fleet, BenchSpec("tiny", **changed), 640)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "random"}, "--workload random reads no file"),
        ({"kind": "mooncake", "output_tokens": (5,)}, "state their output lengths"),
        ({"kind": "mooncake", "prompt_tokens": (5,)}, "have their own lengths"),
        ({"kind": "mooncake"}, "no request of .* fits the context"),
    ],
)
def test_an_option_that_a_file_leaves_no_room_for_is_refused(
    changed: dict[str, Any], message: str, fleet: Fleet, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        prepare(fleet, BenchSpec("tiny", file=trace_file(tmp_path, 5000), **changed), 640)


async def test_hosts_are_described_as_their_servers_report_them(tiny_fleet: RunningFleet) -> None:
    prefill, decode = await read_servers(tiny_fleet.fleet, "tiny", TOKEN)
    assert (prefill.host.name, prefill.host.role, prefill.host.backend) == (
        "tiny-prefill",
        "prefill",
        "transformers/cpu",
    )
    assert (decode.host.name, decode.host.backend, decode.host.hardware) == ("tiny-decode", "mlx/cpu", "")
    assert prefill.vocabulary == decode.vocabulary == tiny_models.VOCAB
    assert prefill.host.versions.keys() >= {"disagg", "torch"} and not prefill.host.simulated


async def test_a_simulated_fleet_says_what_it_simulated_and_this_machines_power_is_not_its(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    @contextmanager
    def sampled(power: Any, roles: Any) -> Iterator[Any]:
        asked.append(roles)
        yield power

    monkeypatch.setattr(energy, "sampled", sampled)
    with running(write_simulated(tmp_path)) as fleet:
        short = BenchSpec("m", prompt_tokens=(16,), output_tokens=(2,), requests=1, warmup=0, modes=("disaggregated",))
        result = await benchmark(fleet.fleet, short, RunMonitor(), TOKEN)
    assert asked == [[]] and result.simulated == {"m-prefill": "h200-sxm", "m-decode": "h200-sxm"}
    assert result.to_json()["simulated"] and result.cells[0].figures.completed == 1


async def test_a_fleet_that_is_down_is_one_clear_error(fleet: Fleet) -> None:
    with pytest.raises(ServerUnavailable, match="no server answers at"):
        await read_servers(fleet, "tiny", TOKEN)


async def test_a_host_that_is_down_leaves_no_question_to_the_others_behind(fleet: Fleet) -> None:
    hosts = fleet.serving("tiny", "decode")
    with socket.create_server((hosts[0].address, hosts[0].port)):  # takes the question, and never answers
        with pytest.raises(ServerUnavailable, match="no server answers at"):
            await read_servers(fleet, "tiny", TOKEN)
        left = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
        assert not [name for name in left if name == "_read_server"]


@pytest.fixture
def spec(tiny_fleet: RunningFleet, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tiny_fleet.folder / "token"))
    return BenchSpec(
        "alias-of-tiny",
        prompt_tokens=(32, 256),
        output_tokens=(4,),
        requests=5,
        watts={"decode": 100.0},
    )


async def test_a_run_on_a_real_fleet_has_figures_for_every_mode_and_point(tiny_fleet: RunningFleet, spec: Any) -> None:
    result = await benchmark(tiny_fleet.fleet, spec, RunMonitor())
    body = json.loads(json.dumps(result.to_json()))
    assert [(one["mode"], one["prompt_tokens"]) for one in body["results"]] == [
        (m, n) for n in (32, 256) for m in MODES
    ]
    assert all((one["completed"], one["failed"], len(one["requests"])) == (5, 0, 5) for one in body["results"])
    assert all(one["total_input_tokens"] == 5 * one["prompt_tokens"] for one in body["results"])
    assert (body["model_id"], body["stopped"], body["failures"]) == ("tiny", "", [])
    handed_over, split, alone, _ = body["results"][:4]
    assert sum(split["mean_ttft_parts_ms"].values()) == pytest.approx(split["mean_ttft_ms"])
    assert handed_over["total_kv_bytes"] > 0 and handed_over["decode_computed_tokens"] == 5
    assert alone["total_kv_bytes"] == 0 and alone["decode_computed_tokens"] == 5 * 32
    assert handed_over["joules_per_request"] is None and alone["energy_source"] == "stated"
    assert sum(handed_over["mean_ttft_parts_ms"].values()) == pytest.approx(handed_over["mean_ttft_ms"])
    assert list(body["verdict"]["headlines"]) == ["output 4, concurrency 1"]
    assert [(host["name"], host["backend"]) for host in body["hosts"]] == [
        ("tiny-prefill", "transformers/cpu"),
        ("tiny-decode", "mlx/cpu"),
    ]
    assert body["on_cpu"] == ["tiny-prefill", "tiny-decode"]
    assert handed_over["backends"] == {"tiny-prefill": "transformers/cpu", "tiny-decode": "mlx/cpu"}


async def test_a_run_is_estimated_before_its_first_measured_request(tiny_fleet: RunningFleet, spec: Any) -> None:
    estimates, monitor = [], RunMonitor()
    monitor.estimated = lambda plan, seconds: estimates.append((plan.total, seconds, monitor.done))
    await benchmark(tiny_fleet.fleet, spec, monitor)
    ((requests, seconds, done),) = estimates
    assert (requests, done) == (2 * 4 * 6, 0) and 0 < present(seconds) < 600


async def test_the_longest_a_run_may_take_ends_it_and_is_said(tiny_fleet: RunningFleet, spec: Any) -> None:
    long = BenchSpec("tiny", prompt_tokens=(1000,), output_tokens=(900,), requests=50, max_duration=0.5)
    result = await benchmark(tiny_fleet.fleet, long, RunMonitor())
    assert result.stopped == "after 0.5 s, as asked"
    assert sum(len(cell.records) for cell in result.cells) < 200


async def test_what_a_prompt_costs_running_answers_is_measured_in_each_mode(
    tiny_fleet: RunningFleet, spec: Any
) -> None:
    beside = BenchSpec("tiny", prompt_tokens=(900,), output_tokens=(2,), requests=2, warmup=0, beside=2)
    result = await benchmark(tiny_fleet.fleet, beside, RunMonitor())
    assert [cell.mode for cell in result.cells] == list(MODES)
    for cell in result.cells:
        figures = present(cell.figures.beside)
        assert figures.quiet_s > 0 and figures.during_s > 0 and figures.longest_s > 0
        assert cell.figures.completed == 2
    assert result.to_json()["answers_beside"] == 2


async def test_a_trace_plays_on_a_real_fleet(tiny_fleet: RunningFleet, spec: Any, tmp_path: Path) -> None:
    trace = BenchSpec("tiny", kind="mooncake", file=trace_file(tmp_path, 600, 700, 30, 800))
    result = await benchmark(tiny_fleet.fleet, trace, RunMonitor())
    for cell in result.cells:
        lengths = sorted(present(record.metrics).prompt_tokens for record in cell.records)
        assert lengths == [30, 600, 700, 800]
        assert {present(record.metrics).completion_tokens for record in cell.records} == {4}


async def test_texts_are_counted_by_the_servers(tiny_fleet: RunningFleet, spec: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "def f(x):"}\n{"prompt": "return x", "output_tokens": 2}\n')
    texts = BenchSpec(
        "tiny", kind="prompts", file=path, modes=("decode-alone",), output_tokens=(3,), requests=2, warmup=0
    )
    (cell,) = (await benchmark(tiny_fleet.fleet, texts, RunMonitor())).cells
    expected = [len(tiny_models.tokenizer()(text)["input_ids"]) for text in ("def f(x):", "return x")]
    assert [present(record.metrics).prompt_tokens for record in cell.records] == expected
    assert [present(record.metrics).completion_tokens for record in cell.records] == [3, 2]
