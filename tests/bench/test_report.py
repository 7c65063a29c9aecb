"""The page stands on its own, and shows what was found."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from disagg.bench.charts import Bar, ChartLine, Dot, Mark, axis, bar_chart, line_chart
from disagg.bench.energy import Power
from disagg.bench.records import TurnResult
from disagg.bench.report import page
from disagg.bench.result import BenchResult, gather, judge
from disagg.inference.metrics import TTFTParts
from disagg.units import ms
from tests.bench.bench_parts import CPUS, GPUS, failed, plan, point, record, result
from tests.values import present

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Strict(HTMLParser):
    """Fails on a tag that is closed in the wrong place, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(html: str) -> Strict:
    parser = Strict()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture
def full() -> BenchResult:
    return result({128: (1.0, 0.8, 0.5), 512: (1.0, 1.6, 1.4)}, loads=(1, 4), limits={"ttft": 600.0})


def test_the_page_is_well_formed_and_needs_nothing_from_elsewhere(full: BenchResult) -> None:
    html = page(full)
    tags = parsed(html).seen
    assert not re.search(r"https?:|//[a-z]|url\(|@import", html)
    assert not {tag for tag, _ in tags} & {"script", "link", "img", "iframe", "object"}
    assert not [
        name for _, attrs in tags for name in attrs if name in ("src", "href", "srcset") or name.startswith("on")
    ]


def test_the_page_has_light_and_dark_colours(full: BenchResult) -> None:
    html = page(full)
    assert "prefers-color-scheme: dark" in html and "color-scheme: light dark" in html


def test_the_page_has_every_plot_and_the_verdict(full: BenchResult) -> None:
    html = page(full)
    text = parsed(html).text
    for title in ("Time to first token", "Time to the whole answer", "Where TTFT goes", "hidden and exposed"):
        assert title in text
    assert text.count("Median E2E by throughput") == 2
    for headline in full.verdict.headlines.values():
        assert headline.text in text
    assert "wins over prefill-alone from ≈" in text and "TPOT" in text and "stated" in text


def test_every_colour_class_of_a_plot_is_defined(full: BenchResult) -> None:
    html = page(full)
    used = set(re.findall(r'class="(?:bar|line|band) ([a-z_-]+)"', html))
    assert used >= {"disaggregated", "prefill", "hidden", "exposed_transfer"}
    assert all(f".{name} {{ color:" in html for name in used)


def test_failed_attempts_are_in_the_legend_only_where_there_were_some(full: BenchResult) -> None:
    assert "failed" not in page(full).split("</style>")[1]
    made = plan((point(),))
    parts = TTFTParts(failed_attempts=0.01, prefill=0.09)
    records = tuple(record(ttft_parts=parts) for _ in range(6))
    turn_results = [TurnResult(0, "disaggregated", warmup=False, began=0.0, ended=1.0, records=records)]
    cells = gather(made, turn_results, Power(), {})
    html = page(BenchResult("test", "tiny", "random", "today", made, cells, judge(cells)))
    assert "</i>failed attempts</span>" in html and ">failed_attempts<" not in html


def test_names_from_elsewhere_are_escaped(full: BenchResult) -> None:
    from dataclasses import replace

    html = page(replace(full, model="<script>alert(1)</script>", stopped="<b>"))
    assert "<script>" not in html and "<b>." not in html
    parsed(html)


def test_a_run_without_one_completed_request_still_makes_a_page() -> None:
    made = plan((point(),))
    turn_results = [
        TurnResult(
            0,
            "disaggregated",
            warmup=False,
            began=0.0,
            ended=1.0,
            records=(failed("PeerLost", "it <died>"),),
            unfinished=2,
        )
    ]
    cells = gather(made, turn_results, Power(), {})
    html = page(
        BenchResult("test", "tiny", "random", "today", made, cells, judge(cells), stopped="interrupted", unfinished=2)
    )
    text = parsed(html).text
    assert "1 × disaggregated failed: PeerLost: it <died>" in text
    assert "Stopped: interrupted; 2 requests under way are not counted." in text


def test_one_length_one_mode_and_one_token_are_enough_for_a_page() -> None:
    made = plan((point(64, 1),), modes=("decode-alone",))
    one = record(0.1, 0.1, itl=(), output=1, method="decode-alone")
    cells = gather(
        made, [TurnResult(0, "decode-alone", warmup=False, began=0.0, ended=1.0, records=(one,))], Power(), {}
    )
    parsed(page(BenchResult("test", "tiny", "random", "today", made, cells, judge(cells))))


def test_dots_lie_where_the_axes_say() -> None:
    x = axis("x", [100, 400], str, "lengths")
    y = axis("y", [10.0, 1000.0], str, "log")
    svg = line_chart(
        [ChartLine("disaggregated", [Dot(100, 10.0, "a"), Dot(400, 1000.0, "b")])], x, y, [Mark(200, "half")]
    )
    places = [(float(a), float(b)) for a, b in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg)]
    mark = float(present(re.search(r'class="mark" x1="([\d.]+)"', svg))[1])
    assert places[0][0] < places[1][0] and places[0][1] > places[1][1]
    assert mark == pytest.approx((places[0][0] + places[1][0]) / 2, abs=0.2)


def test_words_in_a_picture_are_escaped() -> None:
    bars = bar_chart([Bar("<a>", [("a", 1.0, "<tip>")], "<b>")], str)
    scale = axis("<x>", [1.0, 2.0], str, "log")
    lines = line_chart([ChartLine("a", [Dot(1, 1, "<tip>", label="<c>")])], scale, scale, [Mark(1, "<m>")])
    for picture in (bars, lines):
        assert not re.search(r"<(a|b|c|x|m|tip)>", picture)
        parsed(picture)


def test_bars_are_as_long_as_their_values() -> None:
    svg = bar_chart([Bar("one", [("a", 10.0, ""), ("b", 30.0, "")], "40"), Bar("two", [("a", 20.0, "")], "20")], str)
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="20"', svg)]
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01) and widths[2] == pytest.approx(2 * widths[0], rel=0.01)


@pytest.mark.parametrize("values", [[0.001], [5.0, 5.0], [1e-3, 1e5], [99.0, 101.0]])
@pytest.mark.parametrize("scale", ["log", "linear", "lengths"])
def test_an_axis_holds_all_its_values_and_few_ticks(values: list[float], scale: Any) -> None:
    made = axis("x", values, str, scale)
    assert made.low <= min(values) and made.high >= max(values) and 3 <= len(made.ticks) <= 12
    assert all(0 <= made.pixel(value, 0, 100) <= 100 for value in values)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0 ms"),
        (0.83, "0.83 ms"),
        (3.0, "3.0 ms"),
        (41.7, "42 ms"),
        (1234, "1.23 s"),
        (12_345, "12.3 s"),
        (123_456, "123 s"),
    ],
)
def test_times_are_short_words(value: float | int | None, text: str) -> None:
    assert ms(value) == text


def test_the_page_names_every_host_with_its_backend_and_versions() -> None:
    text = parsed(page(result({128: (1.0, 0.8, 0.5)}, hosts=GPUS))).text
    for word in ("spark", "dgx-spark", "transformers/cuda", "mlx/gpu", "disagg 0.1.0", "10.0.0.1"):
        assert word in text
    assert "CPU" not in text


def test_figures_of_a_cpu_are_marked_in_every_title() -> None:
    html = page(result({128: (1.0, 0.8, 0.5)}, hosts=CPUS))
    text = parsed(html).text
    assert "<title>disagg bench: CPU: tiny" in html and "<h1>CPU: tiny" in html
    assert '<p class="headline">CPU: ' in html
    assert "spark ran the model on a CPU. These are not figures of a GPU." in text


def test_a_table_has_no_empty_column() -> None:
    made = plan((point(64, 1),), modes=("decode-alone",))
    one = record(0.1, 0.1, itl=(), output=1, method="decode-alone")
    turn = TurnResult(0, "decode-alone", warmup=False, began=0.0, ended=1.0, records=(one,))
    cells = gather(made, [turn], Power(), {})
    html = page(BenchResult("test", "tiny", "random", "today", made, cells, judge(cells)))
    rates = ["in tok/s", "out tok/s", "req/s"]
    heads = re.findall(r"<th[^>]*>([^<]+)</th>", html)
    assert heads == ["prompt", "mode", "done", "TTFT p50", "TTFT p99", "E2E p50", "E2E p99", *rates]


def test_labels_beside_dots_do_not_overlap() -> None:
    across, up = axis("x", [0.0, 400.0], str, "linear"), axis("y", [10.0, 1000.0], str, "log")
    crowd = [Dot(200.0 + n, 100.0 + n, "tip", label="131,072") for n in range(6)]
    svg = line_chart([ChartLine("disaggregated", crowd)], across, up)
    found = re.findall(r'class="beside" x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)"', svg)
    lefts = [(float(x) - (40.0 if anchor == "end" else 0.0), float(y)) for x, y, anchor in found]
    assert 1 <= len(lefts) < 6
    for number, (left, base) in enumerate(lefts):
        for other_left, other_base in lefts[:number]:
            assert abs(left - other_left) >= 40 or abs(base - other_base) >= 13


def test_ticks_at_prompt_lengths_leave_room_for_their_labels() -> None:
    made = axis("x", [128, 130, 512, 100_000, 131_072], "{:,g}".format, "lengths")
    assert list(made.ticks) == [128, 512, 100_000]
