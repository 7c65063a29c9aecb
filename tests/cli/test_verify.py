from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console

from disagg.api.verify import HostsReport, PairReport, RunComparison
from disagg.cli.views.verify import hosts_view
from disagg.config import DType, load
from disagg.fleet.lifecycle.status.verdicts import Verdict, VerifiedEngine, known_verdicts
from disagg.fleet.machine import process as local
from disagg.token import TOKEN_FILE_VARIABLE, state_folder
from disagg.verify.compare import NOISE
from disagg.verify.hosts import PROMPTS
from tests.cli.commandline import run, write_fleet
from tests.fleets import RunningFleet
from tests.values import printed

WIDTHS = pytest.mark.parametrize("width", [80, 120])
SAME = {
    "equal_tokens": 64,
    "first_divergence": None,
    "max_logit_diff": 3.2e-5,
    "mean_kl": 1e-9,
    "top1": 1.0,
    "top1_low": 0.94,
    "top1_high": 1.0,
}
BOUNDS = {"max_kl": 1e-5, "min_top1": 1.0, "max_logit_diff": 1e-2}
RESULT = {
    "architecture": "gpt_oss",
    "dtype": "float32",
    "versions": {"mlx-lm": "0.32.2"},
    "prefill_versions": {"transformers": "5.23.0"},
    "prefill": "transformers/cpu",
    "prefill_weights": "float32",
    "decode": "mlx/cpu",
    "decode_weights": "float32",
    "same_weights": True,
    "prompt_tokens": 6000,
    "max_tokens": 64,
    "handoff_vs_prefill": SAME,
    "handoff_vs_decode": SAME,
    "prefill_vs_decode": SAME,
    "prefill_again": SAME,
    "decode_again": SAME,
    "bounds": BOUNDS,
    "bounds_alone": BOUNDS,
    "wrong_kv_changes_output": True,
    "distinct_tokens": 41,
    "decode_computed_tokens": 1,
    "kv_bytes": 1 << 20,
    "deviation": 0.02,
    "preflight": [{"component": "rope", "status": "patched", "detail": "YaRN truncate", "backend": "mlx/cpu"}],
    "summary": "The pair agrees with mlx/cpu alone in 100.0%.",
    "ok": True,
}


@pytest.fixture
def verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A program in the verifier's place: `verifier(body)` makes it print that; its argv goes to a file."""
    script, seen = tmp_path / "fake_verify.py", tmp_path / "argv"
    (tmp_path / "config.json").write_text("{}")  # it is a model folder, too

    def prints(body: Any, exit_code: int = 0, stderr: str = "", before: str = "") -> Path:
        text = body if isinstance(body, str) else json.dumps(body)
        script.write_text(
            f"import sys\nopen({str(seen)!r}, 'w').write(repr(sys.argv[1:]))\n{before}\n"
            f"sys.stderr.write({stderr!r})\nsys.stdout.write({text!r})\nsys.exit({exit_code})"
        )
        return seen

    monkeypatch.setattr(local, "python_command", lambda python: ([sys.executable, str(script)], {}))
    return prints


def test_a_folder_is_verified_and_shown(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = verifier(RESULT, stderr="a framework warns")
    assert (
        run("verify", tmp_path, "--prompt-tokens", 6000, "--max-tokens", 64, "--chunk", 100, "--dtype", "float32") == 0
    )
    out = capsys.readouterr().out
    assert "64 equal" in out and "✔ same answer" in out and "rope patched YaRN truncate" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    options = ["--prompt-tokens", "6000", "--max-tokens", "64", "--chunk", "100", "--dtype", "float32"]
    assert eval(seen.read_text()) == ["disagg.verify", str(tmp_path), str(tmp_path), *options]


def test_a_name_stands_for_its_sources(verifier: Callable[..., Path], tmp_path: Path) -> None:
    seen, path = verifier(RESULT), write_fleet(tmp_path)
    assert run("--config", path, "verify", "tiny-alias", "--here", "--json") == 0
    weights = str(tmp_path / "weights")
    options = ["--context", "2048", "--prefill-engine", "transformers"]
    assert eval(seen.read_text()) == ["disagg.verify", weights, weights, *options]


def test_what_was_found_exact_is_kept_for_the_fleets_status(verifier: Callable[..., Path], tmp_path: Path) -> None:
    verifier(RESULT)
    path = write_fleet(tmp_path)
    assert run("--config", path, "verify", "tiny", "--here") == 0
    folder = state_folder(load(path))
    prefill, decode = ({"transformers": "5.23.0"}, {"mlx-lm": "0.32.2"})
    assert known_verdicts(folder) == (
        Verdict("gpt_oss", VerifiedEngine("float32", prefill), VerifiedEngine("float32", decode)),
    )
    (folder / "verified.json").write_text("cut off")
    assert known_verdicts(folder) == ()


def test_a_difference_is_not_kept(verifier: Callable[..., Path], tmp_path: Path) -> None:
    verifier({**RESULT, "ok": False})
    path = write_fleet(tmp_path)
    assert run("--config", path, "verify", "tiny", "--here") == 1
    assert known_verdicts(state_folder(load(path))) == ()


def test_a_prefill_hosts_engine_and_its_quantization_are_those_that_are_verified(
    verifier: Callable[..., Path], tmp_path: Path
) -> None:
    seen, path = verifier(RESULT), write_fleet(tmp_path)
    text = path.read_text().replace('transformers = "./weights"', 'vllm = "./other"')
    path.write_text(text.replace('name = "transformers"', 'name = "vllm"'))
    assert run("--config", path, "verify", "tiny", "--here", "--prefill-python", "/opt/vllm/bin/python") == 0
    argv = eval(seen.read_text())
    assert argv[1:3] == [str(tmp_path / "other"), str(tmp_path / "weights")]
    assert argv[-4:] == ["--prefill-engine", "vllm", "--prefill-python", "/opt/vllm/bin/python"]


def test_weights_of_another_form_are_named_beside_the_folder(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"decode_weights": "4-bit, groups of 64", "same_weights": False}
    seen = verifier({**RESULT, **other, "handoff_vs_decode": {**SAME, "first_divergence": 7, "top1": 0.97}})
    folder = tmp_path / "four-bits"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert run("verify", tmp_path, "--decode-model", folder, "--engine", "vllm") == 0
    assert eval(seen.read_text())[1:] == [str(tmp_path), str(folder), "--prefill-engine", "vllm"]
    out = capsys.readouterr().out
    assert "decode mlx/cpu: 4-bit, groups of 64" in out and "The pair agrees with mlx/cpu alone" in out
    assert "as close to either engine as their weights" in " ".join(out.split())
    assert all(len(line) <= 80 for line in out.splitlines())


def test_a_folder_that_is_not_there_starts_no_engine(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = verifier(RESULT)
    assert run("verify", tmp_path, "--decode-model", tmp_path / "nope") == 2
    assert "no such folder" in capsys.readouterr().err and not seen.exists()


def test_a_folder_without_a_model_is_a_usage_error_and_starts_no_engine(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, empty = verifier(RESULT), tmp_path / "empty"
    empty.mkdir()
    for arguments in ([empty], [tmp_path, "--decode-model", empty]):
        assert run("verify", *arguments) == 2
        assert f"{empty} has no config.json" in " ".join(capsys.readouterr().err.split()) and not seen.exists()


def test_a_folder_that_only_has_the_name_of_a_model_does_not_hide_it(
    verifier: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_fleet(tmp_path)
    (tmp_path / "work" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    seen = verifier(RESULT)
    assert run("--config", path, "verify", "tiny", "--here") == 0
    assert eval(seen.read_text())[1] == str(tmp_path / "weights")


def test_a_refusal_is_an_object_on_stdout_too(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"code": "PreflightRefused", "message": "mlx-lm ignores the window", "hint": ""}
    verifier({"error": error, "ok": False}, exit_code=3)
    assert run("verify", tmp_path, "--json") == 3
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": error, "ok": False} and "mlx-lm ignores the window" in err


def test_json_is_the_verifiers_own(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verifier(RESULT)
    assert run("verify", tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {**RESULT, "splits": [], "split_refusal": ""}


def test_splits_are_rows_and_one_that_differs_says_so(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = {"layers": 8, "vs_prefill": SAME, "vs_decode": SAME, "computed_tokens": 1, "ok": True, "why": ""}
    verifier({**RESULT, "splits": [right]})
    assert run("verify", tmp_path) == 0
    out = capsys.readouterr().out
    assert out.count("split after layer 8 ↔") == 2 and "✘" not in out
    wrong = {**right, "layers": 16, "ok": False, "why": "it differs from decode alone"}
    verifier({**RESULT, "splits": [right, wrong], "ok": False}, exit_code=1)
    assert run("verify", tmp_path) == 1
    assert "✘ split after layer 16: it differs from decode alone" in capsys.readouterr().out


def test_a_model_that_is_not_divided_says_why(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verifier({**RESULT, "split_refusal": "late layers read KV of early ones"})
    assert run("verify", tmp_path) == 0
    assert "no split: late layers read KV of early ones" in capsys.readouterr().out


def test_a_difference_exits_1_and_is_shown(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    differs = {**SAME, "equal_tokens": 31, "first_divergence": 31}
    verifier({**RESULT, "handoff_vs_prefill": differs, "wrong_kv_changes_output": False, "ok": False}, exit_code=1)
    assert run("verify", tmp_path) == 1
    out = capsys.readouterr().out
    assert "31 equal" in out and "✘ not the same answer" in out and "proves nothing" in out


def test_a_prompt_of_one_token_has_no_control_and_is_no_failure(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verifier({**RESULT, "prompt_tokens": 1, "wrong_kv_changes_output": None})
    assert run("verify", tmp_path, "--prompt-tokens", 1) == 0
    out = capsys.readouterr().out
    assert "no control: a prompt of one token needs no KV" in out and "proves nothing" not in out


def test_an_unknown_dtype_is_a_usage_error_with_the_choices(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = verifier(RESULT)
    assert run("verify", tmp_path, "--dtype", "float23") == 2
    err = capsys.readouterr().err
    assert all(name in err for name in get_args(DType)) and not seen.exists()


def test_the_verifiers_error_is_ours(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verifier({"error": {"code": "PreflightRefused", "message": "mlx-lm ignores the window", "hint": "use x"}}, 3)
    assert run("verify", tmp_path) == 3
    assert "error: mlx-lm ignores the window\n hint: use x\n" in capsys.readouterr().err


def test_a_verifier_that_dies_shows_its_last_words(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verifier("", exit_code=9, stderr="Killed by the kernel\n")
    assert run("verify", tmp_path) == 1
    assert "exited with code 9 and no result" in (err := capsys.readouterr().err) and "Killed by the kernel" in err


def test_a_verifier_that_hangs_is_ended_at_the_timeout(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verifier(RESULT, before="import time; time.sleep(60)")
    assert run("verify", tmp_path, "--timeout", "1") == 1
    assert "no result after 1 s" in capsys.readouterr().err


def test_an_unknown_model_starts_no_engine(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = verifier(RESULT)
    assert run("--config", write_fleet(tmp_path), "verify", "nope", "--here") == 2
    assert "tiny" in capsys.readouterr().err and not seen.exists()


def test_a_model_that_only_one_engine_can_load_cannot_be_verified(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_fleet(tmp_path)
    text = path.read_text().replace('mlx = "./weights"\n', "")
    path.write_text(text[: text.index("[hosts.decode-1]")])
    assert run("--config", path, "verify", "tiny", "--here") == 2
    assert "no mlx source for tiny" in capsys.readouterr().err


def test_a_model_is_verified_on_the_fleets_hosts_and_its_verdict_kept(
    tiny_fleet: RunningFleet,
    verifier: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = verifier(RESULT)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tiny_fleet.folder / "token"))
    size = ("--prompt-tokens", 40, "--max-tokens", 6)
    before = {name: tiny_fleet.status(name)["counters"]["completed"] for name in tiny_fleet.fleet.hosts}
    assert run("--config", tiny_fleet.fleet.path, "verify", "alias-of-tiny", *size, "--json") == 0
    report = HostsReport.from_json(json.loads(capsys.readouterr().out))
    (pair,) = report.pairs
    assert (pair.prefill, pair.decode, pair.ok, pair.same_weights) == ("tiny-prefill", "tiny-decode", True, True)
    assert pair.handoff_vs_decode is not None and pair.handoff_vs_decode.equal_tokens == PROMPTS * 6
    assert (pair.kv_wire, pair.decode_computed_tokens, pair.bounds) == ("as-is", 1, NOISE["float32"])
    assert pair.deviation is not None and 0 < pair.deviation < 0.2
    completed = {name: tiny_fleet.status(name)["counters"]["completed"] - before[name] for name in before}
    ways = 2 + len(pair.splits)
    assert completed == {"tiny-prefill": ways * PROMPTS, "tiny-decode": ways * PROMPTS}
    for split in pair.splits:
        assert (split.ok, split.computed_tokens) == (True, 1)
        assert split.vs_decode is not None and split.vs_decode.equal_tokens == PROMPTS * 6
    assert [split.layers for split in pair.splits] == [1, 2]
    assert not seen.exists(), "no engine was started here"
    verdict = known_verdicts(state_folder(tiny_fleet.fleet))[-1]
    assert (verdict.architecture, verdict.prefill.dtype, verdict.decode.dtype) == ("qwen3", "float32", "float32")
    assert "torch" in verdict.prefill.versions and "mlx-lm" in verdict.decode.versions


@pytest.mark.parametrize("as_json", [False, True])
def test_a_model_of_a_stopped_fleet_is_not_verified(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    seen, path = verifier(RESULT), write_fleet(tmp_path)
    assert run("--config", path, "verify", "tiny", *(["--json"] if as_json else [])) == 4
    out, err = capsys.readouterr()
    assert "tiny is not verified: prefill-1 is not running" in err.replace("\n", " ")
    assert "disagg start" in err and "disagg verify tiny --here" in err.replace("\n", " ")
    assert not seen.exists() and known_verdicts(state_folder(load(path))) == ()
    assert not as_json or json.loads(out)["ok"] is False


@pytest.mark.parametrize(
    "option", [("--dtype", "bfloat16"), ("--chunk", "9"), ("--engine", "vllm"), ("--prefill-python", "/opt/python")]
)
def test_what_hosts_run_is_not_changed_by_an_option(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    seen = verifier(RESULT)
    assert run("--config", write_fleet(tmp_path), "verify", "tiny", *option) == 2
    assert f"disagg verify tiny --here {' '.join(option)}" in capsys.readouterr().err.replace("\n", " ")
    assert not seen.exists()


@WIDTHS
def test_each_pair_of_hosts_is_a_table(width: int) -> None:
    same = RunComparison.from_json(SAME)
    pair = PairReport(
        prefill="dgx-spark-1",
        decode="mac-studio-2",
        same_weights=True,
        handoff_vs_prefill=same,
        handoff_vs_decode=same,
        prefill_vs_decode=same,
        bounds=NOISE["float32"],
        kv_wire="as-is",
        kv_bytes=3 << 20,
        deviation=0.0123,
        ok=True,
    )
    broken = PairReport(prefill="dgx-spark-2", decode="mac-studio-2", why="the KV connection broke")
    report = HostsReport(
        model="qwen3-coder:30b",
        prompts=8,
        prompt_tokens=204,
        max_tokens=64,
        distinct_tokens=41,
        pairs=(pair, broken),
        ok=False,
    )
    console = Console(file=io.StringIO(), width=width)
    console.print(hosts_view(report))
    shown = printed(console)
    assert "dgx-spark-1 → mac-studio-2  KV as-is, 3.0 MiB" in shown and "✔ same answers" in shown
    assert "audit: the KV differs by 1.2 % of the bound; four times that" in shown
    assert "four times that, 0.1 at least: engine.kv_audit_tolerance = 0.1" in " ".join(shown.split())
    assert "hand-off ↔ dgx-spark-1" in shown and "✘ the KV connection broke" in shown
    assert shown.count("|Δlogp|") >= 2 and "|Δlogp| at most" in shown and "|Δlogit|" not in shown, (
        "the bound is of what the table has"
    )
    assert all(len(line) <= width for line in shown.splitlines())


def test_lengths_are_refused_before_any_host_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", write_fleet(tmp_path), "verify", "tiny", "--prompt-tokens", 100_000) == 2
    assert "--prompt-tokens: 16 to 1984 (got 100000)" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["weights/nope", "./nope", "/no/such/folder", "~nobody"])
def test_a_path_that_is_not_there_is_no_unknown_model(
    verifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    seen = verifier(RESULT)
    assert run("--config", write_fleet(tmp_path), "verify", path) == 2
    assert f"no such folder: {path}" in capsys.readouterr().err and not seen.exists()
