"""The benchmark's tables at 80 columns, and what must be said beside them."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from disagg.bench.beside import BesideFigures
from disagg.bench.energy import Power
from disagg.bench.load import RunMonitor
from disagg.bench.records import MODES, TurnResult
from disagg.bench.result import BenchResult, gather, judge
from disagg.cli.bench.result import live, result_view
from disagg.inference.metrics import TTFTParts
from tests.bench.bench_parts import CPUS, GPUS, failed, plan, point, record, result
from tests.values import printed


def shown(made: BenchResult, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(result_view(made))
    text = printed(console)
    assert all(len(line) <= width for line in text.splitlines())
    return text


@pytest.mark.parametrize("width", [80, 120])
def test_every_figure_is_whole_at_this_width(width: int) -> None:
    text = shown(result({128: (1.0, 0.8, 0.5), 32768: (100.0, 160.0, 140.0)}, limits={"ttft": 600.0}), width)
    for word in ("32,768", "decode-alone", "prefill-alone", "6/6", "500 ms", "100 s", "1.60x", "goodput", "stated"):
        assert word in text
    assert "…" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_a_split_has_its_own_tables_whole_at_this_width(width: int) -> None:
    made = result({512: (1.0, 1.2, 0.8, 0.5), 32768: (100.0, 80.0, 160.0, 140.0)}, modes=MODES)
    text = shown(made, width)
    for word in ("speedup of split over the others", "hand-", "split: where TTFT went", "1.25x", "2.00x"):
        assert word in text
    assert "…" not in text
    flat = " ".join(text.replace("│", " ").split())
    assert "The prefill host pays for this model at 32,768 prompt tokens: 2.00 times the speed" in flat


def test_what_a_prompt_costs_running_answers_is_a_table() -> None:
    one = record(1.0, 2.0, prompt=4096)
    turn = TurnResult(0, "split", False, 0.0, 1.0, (one,), beside=BesideFigures(0.020, 0.022, 0.150))
    without = TurnResult(0, "disaggregated", False, 0.0, 1.0, (one,))
    made = plan((point(4096),), modes=("disaggregated", "split"), beside=16)
    cells = gather(made, [without, turn], Power(), {})
    text = shown(BenchResult("test", "tiny", "random", "today", made, cells, judge(cells)))
    assert "what a prompt costs 16 running answers" in text and "beside: answers running" in text
    (row,) = [line for line in text.splitlines() if "+10.0%" in line]
    assert row.split() == ["split", "20", "ms", "22", "ms", "+10.0%", "150", "ms"]
    assert "what a prompt costs" not in shown(result({128: (1.0, 0.8, 0.5)}))


def test_the_parts_of_ttft_are_whole_where_an_attempt_failed_too() -> None:
    parts = TTFTParts(failed_attempts=0.011, queue=0.0006, tokenise=0.0009, prefill=0.3, first_step=0.0039)
    records = (record(0.335, prompt=32768, ttft_parts=parts),)
    cells = gather(plan((point(32768),)), [TurnResult(0, "disaggregated", False, 0.0, 1.0, records)], Power(), {})
    text = shown(BenchResult("test", "tiny", "random", "today", plan((point(32768),)), cells, judge(cells)))
    assert "failed" in text and "hid-" in text and "…" not in text
    (row,) = [line for line in text.splitlines() if "300 " in line]
    assert row.split()[2:] == ["11.0", "0.6", "0.9", "300", "3.9", "18.5"]


def test_every_word_of_the_tables_has_its_formula_in_the_footnote() -> None:
    text = shown(result({128: (1.0, 0.8, 0.5)}, limits={"ttft": 600.0}))
    for word in (
        "TTFT:",
        "E2E:",
        "TPOT =",
        "ITL:",
        "tok/s =",
        "speedup =",
        "hidden:",
        "exposed:",
        "goodput:",
        "J/request =",
    ):
        assert word in text


def test_the_verdict_comes_with_each_load_named() -> None:
    text = shown(result({128: (1.0, 2.0, 1.5)}, loads=(1, 4)))
    assert text.count("Disaggregation wins at every prompt") == 2 and "output 5, concurrency 4:" in text


def test_what_fell_back_failed_or_was_left_out_is_said() -> None:
    made = plan((point(),))
    records = (
        record(method="fallback"),
        failed("Overloaded", "the queue [is] full"),
        failed("Overloaded", "the queue [is] full"),
    )
    cells = gather(
        made, [TurnResult(0, "disaggregated", warmup=False, began=0.0, ended=1.0, records=records)], Power(), {}
    )
    values: dict[str, Any] = {
        "stopped": "interrupted",
        "unfinished": 3,
        "left_out": 7,
        "warmup_errors": {"PeerLost": 1},
    }
    text = " ".join(shown(BenchResult("test", "tiny", "trace", "today", made, cells, judge(cells), **values)).split())
    assert "2 × disaggregated: Overloaded the queue [is] full" in text and "1/3" in text
    assert "stopped: interrupted; 3 requests under way are not counted" in text
    assert (
        "7 requests of the trace are over the model's context" in text and "1 warm-up requests failed: PeerLost" in text
    )
    assert "1 of prompt 100 · output 5 · concurrency 1 fell back" in text


def test_a_run_without_any_request_still_has_a_view() -> None:
    made = replace(result({128: (1.0, 2.0, 1.5)}), cells=(), verdict=judge(()), stopped="interrupted")
    assert "No verdict: nothing was completed." in shown(made)


def test_without_a_terminal_there_is_one_line_per_point() -> None:
    console, monitor = Console(file=io.StringIO(), width=80), RunMonitor()
    with live(monitor, console):
        for mode in ("disaggregated", "decode-alone", "warming up disaggregated"):
            monitor.doing = f"{mode} · prompt 1 · output 2"
            monitor.changed()
    assert printed(console) == "measuring prompt 1 · output 2 …\n"


def test_on_a_terminal_progress_shows_the_share_done_and_what_failed() -> None:
    console, monitor = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None), RunMonitor()
    with live(monitor, console):
        monitor.total_work, monitor.work, monitor.doing = 100, 42, "disaggregated · prompt 1"
        monitor.failures["Overloaded"] = 3
        monitor.changed()
    text = printed(console)
    assert "42%" in text and "disaggregated · prompt 1" in text and "3 failed" in text and "ETA" in text


def test_the_live_line_leaves_room_for_an_interrupt_and_shows_the_whole_time_left() -> None:
    console, monitor = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None), RunMonitor()
    with live(monitor, console, simulated=True):
        monitor.total_work, monitor.work = 100, 42
        monitor.doing = "warming up decode-alone · prompt 2,048 · output 64 · concurrency 16"
        monitor.changed()
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", printed(console))]
    shown_lines = [line for line in lines if "42%" in line]
    assert shown_lines and all(len(line) <= 77 and "ETA --:--" in line for line in shown_lines)


def test_the_hosts_are_named_and_a_cpu_is_marked() -> None:
    text = shown(result({128: (1.0, 0.8, 0.5)}, hosts=GPUS))
    assert "prefill spark: dgx-spark, transformers/cuda" in text and "CPU" not in text
    text = shown(result({128: (1.0, 0.8, 0.5)}, hosts=CPUS))
    assert text.startswith("CPU: tiny on test") and "spark ran the model on a CPU" in text
    assert "│ CPU: Disaggregation loses" in text


@pytest.mark.parametrize(
    ("seconds", "time"),
    [
        (0.2, "about 1 s"),
        (89.0, "about 89 s"),
        (600.0, "about 10 min"),
        (9000.0, "about 2.5 h"),
        (None, "no estimate: a first request failed"),
    ],
)
def test_the_time_of_a_run_is_printed_before_it(seconds: float | None, time: str) -> None:
    console, monitor = Console(file=io.StringIO(), width=80), RunMonitor()
    with live(monitor, console, simulated=True):
        monitor.estimated(plan((point(), point(200)), requests=10), seconds)
    assert printed(console) == (f"simulated: measuring 66 requests (2 points × 3 modes, with warm-up): {time}\n")


def test_a_column_without_a_figure_is_left_out() -> None:
    made = plan((point(64, 1),), modes=("decode-alone",))
    turn = TurnResult(0, "decode-alone", False, 0.0, 1.0, (record(0.1, 0.1, itl=(), output=1, method="decode-alone"),))
    cells = gather(made, [turn], Power(), {})
    text = shown(BenchResult("test", "tiny", "random", "today", made, cells, judge(cells)))
    head = text[: text.index("decode-alone")]
    assert "TTFT" in head and "TPOT" not in head and "ITL" not in head
