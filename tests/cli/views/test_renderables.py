"""Every view at 80 and at 120 columns: nothing is cut, and the numbers people look for are there."""

from __future__ import annotations

import dataclasses
import io
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, Group

from disagg.api.keeper import KeptModel
from disagg.api.status import DeviceUse, LastError, Memory, SenderAudits
from disagg.cli.common.context import error_console, stderr, stdout
from disagg.cli.demo import comparison_panel, next_steps
from disagg.cli.fleet.models import inventories_view, removed_view
from disagg.cli.views.errors import error_view
from disagg.cli.views.health import health_panel, health_view, status_line, watch_view
from disagg.cli.views.logs import LogView
from disagg.cli.views.metrics import footnote, metrics_view, model_panel, ttft_view
from disagg.cli.views.progress import HostProgress, failures_view, results_table
from disagg.cli.views.stream import LiveView, final_view
from disagg.config import EngineOptions, Host
from disagg.demo.flow import HOSTS_FILE, Comparison
from disagg.errors import DisaggError, PortInUse, StartFailed, printable
from disagg.fleet.lifecycle.logs import LogLine
from disagg.fleet.lifecycle.one_server import ServerResult
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.fleet.machine.fan_out import HostOutcome
from disagg.fleet.models.inventory import ModelInventory, RequiredModel, StoredModel
from disagg.inference.metrics import TTFTParts
from disagg.inference.several import ModelAnswer
from tests.cli.answers import completion, metrics
from tests.values import printed

NONE = "nothing is deployed there"
WIDTHS = pytest.mark.parametrize("width", [80, 120])


def shown(view: Any, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, height=30, color_system=None)
    console.print(view)
    text = printed(console)
    assert all(len(line) <= width for line in text.splitlines())
    return text


def healthy(name: str = "dgx-spark-1", **changed: Any) -> HostStatus:
    values = {
        "model": "qwen3-coder:30b",
        "url": "",
        "state": "healthy",
        "backend": "transformers/cuda",
        "queue": 12,
        "running": 16,
        "kv_bytes": 7 << 30,
        "memory": Memory(128 << 30, 20 << 30, 101 << 30),
        "device": DeviceUse("transformers/cuda", 41.7),
        "uptime_s": 1_234_567.0,
    }
    return HostStatus(name, ("prefill",), **{**values, **changed})


DOWN = HostStatus("mac-studio-1", ("decode",), "gpt-oss:120b", "", "not running", "nothing listens", "fix it")


@WIDTHS
def test_health_names_every_host_in_full_and_what_mends_it(width: Any) -> None:
    text = shown(health_view([healthy(), DOWN]), width)
    for word in ("dgx-spark-1", "mac-studio-1", "qwen3-coder:30b", "transformers/cuda", "not running", "decode"):
        assert word in text
    for number in ("16", "12", "7.0 GiB", "42% CPU", "101 GiB", "128 GiB", "14d 6h"):
        assert number in text
    assert "mac-studio-1: nothing listens\n  → fix it" in text


def test_health_shows_kv_of_finished_conversations() -> None:
    assert " 3.0 GiB " in shown(health_view([healthy(kv_held_bytes=3 << 30)]))


def test_health_shows_what_decode_hosts_found_of_received_kv() -> None:
    found = {
        "dgx-1": SenderAudits(accepted=412, verdict="accepted", deviation=0.001, highest=0.0312),
        "dgx-2": SenderAudits(accepted=0, refuted=3, verdict="refuted"),
    }
    text = shown(health_view([healthy("mac-1", senders=found)]), 120)
    assert "mac-1: audits of received KV: dgx-1 412 right (at most 3.1 % of the bound); dgx-2 0 right, 3 wrong" in text
    assert "audits" not in shown(health_panel([healthy("mac-1", senders=found)]))


@WIDTHS
def test_below_a_host_with_several_models_each_has_a_line_with_its_state(width: Any) -> None:
    models = (
        KeptModel(model="qwen", state="ready", port=8100, running=3, waiting=7, resident_bytes=9 << 30, expires_s=95.0),
        KeptModel(model="oss", state="loading", port=8101, read_bytes=3 << 30, total_bytes=12 << 30, wait_s=41.2),
        KeptModel(model="tiny", state="asleep", port=8102, need_bytes=5 << 30, pinned=True),
    )
    several = healthy(model="", backend=None, models=models, used_bytes=21 << 30, budget_bytes=64 << 30)
    text = shown(health_view([several]), width)
    for word in ("3 models", "qwen", "ready", "oss", "loading", "25% 41 s", "tiny", "asleep"):
        assert word in text
    if width >= 80:
        for figure in ("21.0 GiB", "64.0 GiB", "9.0 GiB", "goes in", "1m", "pinned", "5.0 GiB"):
            assert figure in text


def test_the_table_says_of_whom_only_the_first_layers_are_asked_and_why_a_model_is_not_divided() -> None:
    mac = healthy("mac", split_refusal="it has streams")
    text = shown(health_view([healthy("dgx-1", layers=24), replace(mac, roles=("decode",))]), 120)
    assert "dgx-1: computes the first 24 layers of prompts, and no answers" in text
    assert ": no prompt is computed by two hosts together: it has streams" in text


def test_a_backend_is_one_word_in_the_demos_panel_at_80_columns() -> None:
    hosts = [healthy("prefill-1", model="gpt-oss-demo", backend="transformers/cpu", kv_held_bytes=2_250_000)]
    assert " transformers/cpu " in shown(health_panel(hosts))


def test_a_host_has_two_lines_at_80_columns_and_its_backend_is_one_word() -> None:
    simulated = healthy("mac-studio-1", backend="simulated/dgx-spark", kv_held_bytes=264 << 10, version="0.1.0")
    other = healthy("mac-studio-2", state="unauthorised", why="its token differs", hint="disagg deploy")
    *table, _, _, _ = shown(health_view([simulated, other])).splitlines()
    assert len(table) == 3 + 2 * 2
    assert " simulated/dgx-spark " in table[4] and "264 KiB" in table[4]


def test_health_shows_the_accelerators_use_where_a_server_knows_it() -> None:
    text = shown(health_view([healthy(device=DeviceUse(cpu_percent=3.0, utilisation=0.87))]))
    assert "87% GPU" in text and "CPU" not in text


def test_health_of_a_server_that_says_little_shows_dashes() -> None:
    text = shown(health_panel([healthy(queue=None, kv_bytes=None, memory=None, device=DeviceUse(), uptime_s=None)]))
    assert "–" in text and "None" not in text and "1 of 1 healthy" in text


def test_kv_that_was_quantised_on_the_wire_is_called_so_and_exact_kv_is_not() -> None:
    for view in (model_panel, lambda answer: metrics_view([answer])):
        assert "int8 on the wire" in shown(view(completion("qwen3-demo", kv_wire="int8-g64")))
        assert "on the wire" not in shown(view(completion("qwen3-demo", kv_wire="as-is")))
    words = shown(metrics_view([completion("qwen3-demo", kv_wire="int8-g64")])).split()
    assert "KV int8 on the wire, 1.2 MiB" in " ".join(words)


@pytest.mark.parametrize("width", [40, 50, 71])
def test_in_a_narrow_terminal_names_are_still_words(width: int) -> None:
    text = shown(health_view([healthy(version="0.1.0"), DOWN]), width)
    for word in ("dgx-spark-1 ", "mac-studio-1 ", "healthy", "not running", "14d 6h"):
        assert any(word in line for line in text.splitlines()), word
    assert len(text.splitlines()) < 20


def test_the_same_cause_on_several_hosts_is_shown_once_with_one_command() -> None:
    names = ["a", "b", "c"]
    down = [
        HostStatus(
            name, ("decode",), "m", "", "not running", "nothing is deployed there", f"disagg deploy --host {name}"
        )
        for name in names
    ]
    assert "all hosts: nothing is deployed there\n  → disagg deploy\n" in shown(health_view(down, names))
    some = shown(health_view(down[:2], names))
    assert "a, b: nothing is deployed there\n  → disagg deploy --host a --host b\n" in some
    other = HostStatus("c", ("decode",), "m", "", "failed", "no memory", "disagg logs --host c")
    assert "c: no memory\n  → disagg logs --host c" in shown(health_view([*down[:2], other], names))


def test_where_all_are_plain_processes_the_footnote_is_short_and_of_those_that_run() -> None:
    text = shown(health_view([healthy("a", supervised="crash"), healthy("b", supervised="crash")]))
    assert "\nAll run as plain processes: they come back after a crash, not after a reboot\n" in text
    down = HostStatus("a", ("decode",), "m", "", "not running", "x", "y", supervised="crash")
    assert "reboot" not in shown(health_view([down]))


def test_a_watched_fleet_says_when_it_was_looked_at() -> None:
    assert re.search(r"\n\d\d:\d\d:\d\d, again every 2 s; Ctrl-C ends\n", shown(watch_view([healthy()], (), 2.0)))


def test_failed_starts_with_the_same_cause_are_shown_once() -> None:
    errors = [DisaggError(f"{name}: nothing is deployed there", f"disagg deploy --host {name}") for name in "ab"]
    results = [ServerResult(name, "failed", 0.1, error) for name, error in zip("ab", errors, strict=True)]
    assert shown(failures_view(results, "ab")).endswith(
        "\nerror: all hosts: nothing is deployed there\n hint: disagg deploy\n"
    )


def test_a_status_line_is_one_line() -> None:
    assert status_line(DOWN) == "mac-studio-1: not running: nothing listens -> fix it"
    assert status_line(healthy()) == "dgx-spark-1: healthy (qwen3-coder:30b, transformers/cuda)"


@WIDTHS
def test_the_model_panel_shows_seconds_and_speeds_and_the_parts_of_ttft(width: Any) -> None:
    text = shown(model_panel(completion("qwen3-demo")), width)
    for piece in ("21 ms", "329 tok/s", "431 ms", "295 tok/s", "463 ms", "TTFT  31.0 ms", "1 of 7", "1.2 MiB"):
        assert piece in text
    for part in ("queue 2.1 ms", "exposed transfer 1.1 ms", "first step 4.2 ms", "client 0.4 ms", "network 0.5 ms"):
        assert part in text


def test_the_printed_parts_of_ttft_add_up_to_the_printed_ttft() -> None:
    thirds = TTFTParts(client=0.0333333, queue=0.0333333, prefill=0.0333334)
    text = shown(ttft_view(metrics("m", ttft_parts=thirds, ttft=thirds.total)))
    ttft, *parts = map(float, re.findall(r"([\d.]+) ms", text))
    assert ttft == 100.0 and len(parts) == 3 and sum(parts) == pytest.approx(ttft, abs=1e-9)


def test_hosts_that_are_all_stopped_have_one_hint() -> None:
    """The ports differ, and the command that helps is one."""
    stopped = [
        HostStatus(
            name, ("decode",), "m", "", "not running", f"nothing listens on 10.0.0.1:{port}", f"start --host {name}"
        )
        for name, port in (("a", 1), ("b", 2))
    ]
    text = shown(health_view(stopped, ["a", "b"]))
    assert "all hosts: nothing listens on its port\n  → start\n" in text and text.count("→") == 1
    assert "a: nothing listens on 10.0.0.1:1" in shown(health_view([stopped[0], healthy()], ["a", "b"]))


@WIDTHS
def test_the_metrics_name_the_parts_of_ttft_that_their_legend_is_about(width: Any) -> None:
    text = " ".join(shown(metrics_view([completion("m")], formulas=True), width).split())
    assert "m: TTFT 31.0 ms: client 0.4 ms, queue 2.1 ms, tokenise 0.8 ms" in text and "network 0.5 ms" in text
    line = text[text.index("TTFT 31.0 ms:") : text.index("prefill tok/s:")]
    ttft, *parts = map(float, re.findall(r"([\d.]+) ms", line))
    assert sum(parts) == pytest.approx(ttft, abs=1e-9)


def test_a_prompt_of_which_nothing_was_computed_shows_no_rate() -> None:
    cached = completion("m", prefill_time=0.0, prefill_speed=None)
    for view in (model_panel(cached), metrics_view([cached])):
        assert re.search(r"– +(7 tokens on prefill-1|295 tok/s)", shown(view)) and "0 tok/s" not in shown(view)


def test_the_ttft_bar_is_always_as_long_as_the_whole() -> None:
    even = completion("m")
    assert shown(model_panel(even)).count("█") == 36


def test_a_request_without_handoff_says_so_and_shows_its_warnings() -> None:
    alone = completion("m", ("Using fallback mode - slower performance",), method="fallback", kv_bytes=0)
    for view in (model_panel(alone), metrics_view([alone])):
        text = shown(view)
        assert "fallback" in text and "Using fallback mode - slower performance" in text


def test_held_kv_and_the_reason_for_a_local_prompt_are_shown_and_nothing_without_them() -> None:
    reason = "12 tokens left to compute: 0.02 s here, 0.31 s on a prefill host"
    chat = completion("m", prompt_tokens=100, held_tokens=88, method="local", local=reason, kv_bytes=0)
    for view in (metrics_view([chat]), model_panel(chat)):
        text = " ".join(shown(view, 120).split())
        assert "held KV of 88 of 100 prompt tokens" in text and reason in text
    assert "held KV" not in shown(model_panel(completion("m")), 120)


def test_a_prompt_that_was_divided_states_the_layers_of_each_host() -> None:
    for view in (metrics_view([completion("m", layers=12)]), model_panel(completion("m", layers=12))):
        assert "12 layers on prefill-1, the others on decode-1" in " ".join(shown(view, 120).split())
    resumed = metrics_view([completion("m", layers=1, resumed_at=966)])
    assert "1 layer on prefill-1, the others on decode-1, of the first 966 tokens" in " ".join(
        shown(resumed, 120).split()
    )
    assert "layers on" not in shown(model_panel(completion("m")), 120)


@WIDTHS
def test_the_metrics_table_has_a_row_per_model_and_its_formulas(width: Any) -> None:
    both = [completion("qwen3-demo"), completion("gpt-oss-demo")]
    text = shown(metrics_view(both), width)
    assert "qwen3-demo" in text and "gpt-oss-demo" in text and "prefill-1 → decode-1" in text
    assert "prompt tokens / prefill time" not in text  # four lines after every answer
    assert "prompt tokens / prefill time" in shown(metrics_view(both, formulas=True), width)


@WIDTHS
def test_the_comparison_states_what_each_figure_compares(width: Any) -> None:
    comparison = Comparison(0.52, {"a": 0.47, "b": 0.45}, 256, same_text=True)
    text = shown(comparison_panel(comparison), width)
    for piece in ("520 ms", "920 ms", "1.77 x", "492 tok/s", "1.11 x", "a 470 ms + b 450 ms", "the same answers"):
        assert piece in text
    assert re.search(r"speedup +1.77 x +one after the other / at the same time", text)
    assert re.search(r"cost of sharing +1.11 x +at the same time / a by itself", text)
    assert "differ" in shown(comparison_panel(Comparison(1, {"a": 1}, 1, same_text=False)))
    assert "exposed while the answer waited" in shown(footnote(), width)


def test_answers_stand_side_by_side_where_there_is_room() -> None:
    answers = [ModelAnswer("one", "text one", completion=completion("one")), ModelAnswer("two", "text two")]
    wide, narrow = shown(final_view("p", answers, 120), 120), shown(final_view("p", answers, 80))
    assert any("one ─" in line and "two ─" in line for line in wide.splitlines())
    assert len(narrow.splitlines()) > len(wide.splitlines())
    assert "waiting for the first token" in wide and "128 tokens" in wide


@WIDTHS
def test_a_live_view_keeps_to_the_screen_and_shows_the_latest_lines(width: Any) -> None:
    text = "\n".join(f"line {number}" for number in range(200))
    live = shown(LiveView("prompt", [ModelAnswer("one", text, 7), ModelAnswer("two", text)]), width)
    assert len(live.splitlines()) <= 28 and "line 199" in live and "line 0\n" not in live and "7 tokens" in live


def test_a_failed_answer_shows_its_error() -> None:
    assert "the queue is full" in shown(LiveView("p", [ModelAnswer("one", error=DisaggError("the queue is full"))]))


def test_markup_and_control_characters_of_a_model_do_nothing() -> None:
    assert printable("a\x1b[2J\tb\nc\x9b") == "a\ufffd[2J\tb\nc\ufffd"
    text = shown(final_view("p", [ModelAnswer("one", "[bold]x[/bold]")], 80))
    assert "[bold]x[/bold]" in text


def test_results_and_errors_show_the_remedy() -> None:
    error = PortInUse("port 1 is in use by python (pid 2)", "stop it")
    results = [ServerResult("a", "started", 3.2), ServerResult("b", "failed", 1, error)]
    text = shown(Group(results_table(results), failures_view(results) or ""))
    assert failures_view(results[:1]) is None
    assert "3.20 s" in text and "error: port 1 is in use by python (pid 2)\n hint: stop it" in text
    assert shown(error_view(DisaggError("just this"))) == "error: just this\n"


def test_progress_prints_a_line_per_change() -> None:
    console = Console(file=io.StringIO(), width=80)
    progress = HostProgress(console)
    for state in ("starting", "loading", "loading", "healthy"):
        progress.report("a", state)
    assert printed(console).splitlines() == ["a: starting …", "a: loading …", "a: healthy"]


def test_brief_progress_prints_what_all_servers_go_through_once() -> None:
    console = Console(file=io.StringIO(), width=80)
    progress = HostProgress(console, brief=True)
    progress.report("a", "starting")
    progress.report("a", "loading")
    progress.report("b", "starting")  # later than the first one
    for state in ("loading", "healthy", "stopping"):
        for host in ("a", "b"):
            progress.report(host, state)
    progress.report("b", "killed")
    assert printed(console).splitlines() == [
        "servers: starting …",
        "servers: loading …",
        "servers: stopping …",
        "b: killed …",
    ]


@WIDTHS
def test_health_remarks_last_errors_and_what_survives_no_reboot(width: Any) -> None:
    text = shown(
        health_view(
            [
                healthy(why="running other code than here", hint="disagg deploy --host dgx-spark-1"),
                healthy(
                    "mac-studio-1",
                    supervised="crash",
                    version="0.1.0",
                    device=DeviceUse(cpu_percent=35.2),
                ),
                healthy("mac-studio-2", last_error=LastError(time.time() - 65, "PeerLost", "the peer was lost")),
            ]
        ),
        width,
    )
    assert "dgx-spark-1: running other code" in text and "→ disagg deploy --host dgx-spark-1" in text
    assert "35% CPU" in text and "0.1.0" in text
    assert "mac-studio-2: last failed request 1m ago: the peer was lost" in text
    assert "mac-studio-1: plain process: it comes back after a crash, not after a reboot" in " ".join(text.split())


def test_a_failed_start_shows_the_end_of_its_log_above_the_error() -> None:
    error = StartFailed("spark did not start: no weights", "fetch them")
    error.log = (
        '{"time": "2026-01-01T00:00:00.000Z", "level": "error", "event": "start_failed", "message": "no"}',
        "boom\x1b[2J",
    )
    text = shown(failures_view([ServerResult("spark", "failed", 1.0, error), ServerResult("other", "left")]))
    assert "the last 2 lines of spark's log:\n  start_failed message=no\n  boom\ufffd[2J\nerror: spark did not" in text


def test_log_lines_show_time_host_event_fields_and_traceback() -> None:
    view = LogView(["a", "spark"])
    said = {"level": "error", "event": "internal_error", "n": 1, "who": "x y", "traceback": "Traceback\nboom"}
    text = shown(view.line(LogLine("a", 1767225605.25, "", said)))
    assert re.match(r"\d\d:\d\d:05\.250 a     internal_error n=1 who=x y\nTraceback\nboom\n", text)
    assert shown(view.line(LogLine("spark", 0.0, "plain\x07 words"))) == " " * 13 + "spark plain\ufffd words\n"
    timed = {
        "event": "decoded",
        "host": "a",
        "timing": {"queue_s": 0.00022693400023854338, "n": 3},
        "seconds": 12.5,
        "fallback": "",
    }
    assert "decoded timing(queue_s=0.000227 n=3) seconds=12.5\n" in shown(view.line(LogLine("a", 1.0, "", timed)))
    assert "trying again" in shown(view.line(LogLine("a", 1.0, "connection lost; trying again", notice=True)))


def test_removed_models_are_shown_with_the_command_that_fetches_them_again() -> None:
    gone = [
        HostOutcome(
            Host(name, "10.0.0.1", ("decode",), "m", EngineOptions("mlx"), 8001, kv_port=9001), 0.1, value=1 << 20
        )
        for name in ("a", "b")
    ]
    text = " ".join(shown(removed_view(gone, {}, ["a"])).split())
    assert "a: 1.0 MiB freed" in text and "cannot start again without the files" in text
    assert "disagg deploy, disagg models pull copies them again" in text
    assert shown(removed_view([], {})) == "nothing to remove\n"


def test_in_a_narrow_terminal_the_hosts_of_models_keep_their_names() -> None:
    host = Host("mac-studio-1", "10.0.0.1", ("decode",), "gpt-oss:120b", EngineOptions("mlx"), 8001, kv_port=9001)
    source = "mlx-community/gpt-oss-120b-MXFP4-Q8"
    inventory = ModelInventory(
        RequiredModel(host, source), {source: StoredModel(source, "complete", 3 << 30, revision="0123456789")}
    )
    assert "mac-studio-1 " in shown(inventories_view([inventory], {}), 50)


@pytest.mark.parametrize("there", [True, False])
def test_the_next_steps_of_the_demo_activate_the_environment_unless_disagg_is_in_path(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate = tmp_path / "of a clone" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.prefix", str(tmp_path / "of a clone"))
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/disagg" if there else None)
    steps = next_steps().plain.splitlines()
    assert ("  source 'of a clone/bin/activate'" in steps) != there
    assert "  disagg start" in steps and "  disagg init --prefill ADDRESS --decode ADDRESS" in steps


def test_the_next_steps_of_the_demo_name_its_fleet_for_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HOSTS_FILE.parents[2])
    (export,) = (line for line in next_steps().plain.splitlines() if "export" in line)
    monkeypatch.chdir(tmp_path)
    shell = subprocess.run(
        ["sh", "-c", f'{export} && cat "$DISAGG_CONFIG"'], capture_output=True, check=True, timeout=60
    )
    assert shell.stdout == HOSTS_FILE.read_bytes()


def test_warnings_that_were_noted_are_not_repeated_below_the_figures() -> None:
    answer = dataclasses.replace(completion("m"), warnings=("mac-1 failed", "slow"))
    text = shown(metrics_view([answer], ["mac-1 failed"]))
    assert "slow" in text and "mac-1 failed" not in text and "mac-1 failed" in shown(metrics_view([answer]))


def test_the_lines_of_the_next_steps_that_are_no_commands_fit_80_columns() -> None:
    prose = [line for line in next_steps().plain.splitlines() if not line.startswith("  ")]
    assert len(prose) > 3 and max(map(len, prose)) <= 80


@pytest.mark.parametrize("name", ["model[peers]", "model[/]", "model[bold]"])
def test_square_brackets_in_a_models_name_are_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = ModelAnswer(name)
    answer.completion = completion(name)
    assert name in shown(model_panel(completion(name))) and name in shown(final_view("p", [answer], 80))
    for console in (stdout(), stderr(), error_console()):
        console.print(f"serving {name}")
    captured = capsys.readouterr()
    assert captured.out == f"serving {name}\n" and captured.err == f"serving {name}\n" * 2
