"""`disagg bench` as a command line: options, exit codes, files, and Ctrl-C of the real process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from disagg.cli.bench.checks import Group, spread_pairs
from disagg.cli.bench.load import load
from disagg.errors import UsageError
from tests.cli.commandline import ROOT, run
from tests.deadlines import wait_until
from tests.fleets import RunningFleet

SMALL = ["--prompt-tokens", "16,64", "--output-tokens", "3", "-n", "2", "--warmup", "0"]


@pytest.fixture
def bench(tiny_fleet: RunningFleet, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run `disagg bench ARGUMENTS` on the tiny fleet, in this process."""
    monkeypatch.setenv("DISAGG_TOKEN_FILE", str(tiny_fleet.folder / "token"))
    return lambda *arguments: run("--config", tiny_fleet.fleet.path, "bench", *arguments)


@pytest.fixture
def started(tiny_fleet: RunningFleet, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `disagg bench ARGUMENTS` as a process of its own."""
    processes = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": ROOT, "DISAGG_TOKEN_FILE": str(tiny_fleet.folder / "token")}
        command = [sys.executable, "-m", "disagg", "--config", str(tiny_fleet.fleet.path), "bench", *arguments]
        with (tmp_path / "stderr").open("w") as stderr:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_tables_and_verdict_go_to_stdout_and_progress_to_stderr(
    bench: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*SMALL) == 0
    out, err = capsys.readouterr()
    assert "Verdict" in out and "TPOT = (E2E - TTFT) / (output tokens - 1)" in out and "2/2" in out
    assert re.search(r"measuring 16 requests \(2 points × 4 modes, with warm-up\): about \d+ s", err)
    assert err.index("measuring 16 requests") < err.index("measuring prompt 16")
    assert (
        "transformers/cpu" in out
        and "CPU: tiny on" in out
        and "measuring prompt 64" in err
        and all(len(line) <= 80 for line in out.splitlines())
    )


def test_json_to_stdout_is_one_object_and_nothing_else(
    bench: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*SMALL, "--mode", "decode-alone", "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert [(one["mode"], one["completed"]) for one in body["results"]] == [("decode-alone", 2)] * 2


def test_files_are_written_beside_the_tables(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = ["--goodput", "ttft:60000", "tpot:60000", "--watts", "prefill=240", "decode=180"]
    assert bench(*SMALL, *pairs, "--output", tmp_path / "r.json", "--report", tmp_path / "r.html") == 0
    body = json.loads((tmp_path / "r.json").read_text())
    assert body["goodput_limits_ms"] == {"ttft": 60000, "tpot": 60000}
    assert all(one["request_goodput"] == one["request_throughput"] > 0 for one in body["results"])
    assert {one["energy_source"] for one in body["results"]} == {"stated"}
    page = (tmp_path / "r.html").read_text()
    assert page.startswith("<!doctype html>") and not re.search(r"https?:", page)
    assert "Verdict" in capsys.readouterr().out


def test_ctrl_c_keeps_the_partial_result(started: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = started(
        "--prompt-tokens", "16,1000", "--output-tokens", "3,900", "-n", "2", "--output", str(tmp_path / "r.json")
    )
    # The third point is the first with long answers: by then both short ones are whole.
    wait_until(lambda: "output 900" in (tmp_path / "stderr").read_text(), 60, "the third point")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    body = json.loads((tmp_path / "r.json").read_text())
    assert process.returncode == 130 and body["stopped"] == "interrupted"
    short = [one for one in body["results"] if one["output_tokens"] == 3]
    assert [one["completed"] for one in short] == [2] * 8
    assert body["failures"] == [] and "stopped: interrupted" in out and "Verdict" in out
    assert "Traceback" not in (tmp_path / "stderr").read_text()


def test_sigterm_keeps_the_partial_result_too(started: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = started("--prompt-tokens", "1000", "--output-tokens", "900", "--json")
    wait_until(lambda: "measuring" in (tmp_path / "stderr").read_text(), 60, "the run to begin")
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and json.loads(out)["stopped"] == "interrupted"


def test_where_a_mode_completes_nothing_the_exit_code_is_1(
    bench: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    long = ["--prompt-tokens", "1000", "--output-tokens", "1000", "-n", "1", "--warmup", "0", "--mode", "decode-alone"]
    assert bench(*long, "--timeout", "0.2") == 1
    assert "1 × decode-alone: DeadlineExceeded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-tokens", "1,x"], "--prompt-tokens 1,x: not a list of positive numbers"),
        (["--rate", "0"], "--rate 0: not a list of positive numbers"),
        (["--concurrency", "1.5"], "--concurrency 1.5: not a list"),
        (["--goodput", "ttft"], "--goodput ttft: not understood"),
        (["--goodput", "speed:5"], "--goodput speed:5: not understood"),
        (["--watts", "gateway=5"], "--watts gateway=5: not understood"),
        (["--output", "/no/such/folder/r.json"], "cannot write /no/such/folder/r.json"),
        (["--report", "/"], "cannot write /"),
        (["--output", "--report"], "--output --report: not the name of a file"),
        (["--output", "one", "--report", "./one"], "--output and --report both name one"),
        (["--workload", "mooncake"], "--workload mooncake needs a file"),
        (["--workload", "sharegpt", "-f", "/no/such"], "cannot read /no/such"),
        (["--prompt-tokens", "4090"], "over the model's context of 4,096 tokens"),
        (["-m", "nope"], 'no model "nope"'),
    ],
)
def test_a_command_line_that_cannot_be_carried_out_exits_2_and_measures_nothing(
    arguments: list[str], message: str, bench: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and "measuring" not in err


def test_a_file_that_cannot_be_written_in_the_end_does_not_cost_the_other(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = Path("/dev/full")
    assert bench("--prompt-tokens", "16", "-n", "1", "--output", full, "--report", tmp_path / "r.html") == 2
    assert "cannot write /dev/full: No space left on device" in capsys.readouterr().err
    assert "</html>" in (tmp_path / "r.html").read_text()


def test_pairs_may_follow_one_another() -> None:
    words = ["--goodput", "ttft:500", "tpot:50", "-n", "3", "--watts", "a=1", "link"]
    assert spread_pairs(words) == [
        *("--goodput", "ttft:500", "--goodput", "tpot:50"),
        *("-n", "3", "--watts", "a=1", "link"),
    ]


def test_help_names_every_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "--help") == 0
    out = capsys.readouterr().out
    assert "mooncake" in out and "--max-duration" in out


@pytest.fixture
def group() -> typer.Typer:
    """The benchmark's command line with a subcommand of the test's own."""
    group = typer.Typer(cls=Group, invoke_without_command=True)
    group.callback()(load)
    group.command("measure")(lambda: typer.echo("measured"))
    return group


def test_a_subcommand_runs_without_the_benchmark(group: typer.Typer, capsys: pytest.CaptureFixture[str]) -> None:
    group(["measure"], standalone_mode=False)
    assert capsys.readouterr().out == "measured\n"


def test_an_option_of_the_benchmark_before_a_subcommand_is_refused(
    group: typer.Typer, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="--rounds is an option of the benchmark, not of `disagg bench measure`"):
        group(["--rounds", "4", "measure"], standalone_mode=False)
    assert capsys.readouterr().out == ""


def test_a_subcommand_is_not_taken_for_the_name_of_a_file(
    group: typer.Typer, tiny_fleet: RunningFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISAGG_CONFIG", str(tiny_fleet.fleet.path))
    with pytest.raises(UsageError, match="--output measure: this is also the name of a command"):
        group(["--output", "measure"], standalone_mode=False)
    assert not (tmp_path / "measure").exists()
