"""`disagg bench predict`: every line says that it is predicted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commandline import run, write_fleet

SHIPPED = Path(__file__).parents[3] / "hosts.toml"
RULE = "─"


def test_every_line_says_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", SHIPPED, "bench", "predict", "--link-gbps", 1) == 0
    shown = capsys.readouterr().out
    tables = ("disaggregated", "split", "dgx-spark alone", "m4-max alone", "m3-ultra alone", RULE, "predicted")
    lines = [line for line in shown.splitlines() if line.strip()]
    assert all(line.startswith(tables) for line in lines)
    assert sum(line.startswith("predicted ") for line in lines) == 2  # the head of each table
    assert max(len(line) for line in lines) <= 80


def test_the_default_prompt_fits_each_models_context(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", SHIPPED, "bench", "predict", "--json") == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(one["context"], one["prompt_tokens"], one["output_tokens"]) for one in results] == [
        (32768, 8192, 256),
        (8192, 7936, 256),
    ]
    assert run("--config", SHIPPED, "bench", "predict", "--prompt-tokens", 8192) == 0
    assert capsys.readouterr().out.count("exceed the context of 8,192") == 1


def test_a_size_needs_no_hosts_toml(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ("-m", "shape:llama-3.1-8b", "--prefill-device", "dgx-spark", "--decode-device", "m3-ultra")
    assert run("bench", "predict", *sizes, "--output-tokens", 32, "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert body["predicted"] is True
    assert body["results"][0]["disaggregated"]["total_s"] == pytest.approx(2.32, rel=0.1)


@pytest.mark.parametrize(("tokens", "faster"), [(8192, 1.21), (32768, 1.56)])
def test_a_pair_is_faster_with_a_hybrid_of_80b_as_the_docs_state(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, faster: float
) -> None:
    monkeypatch.chdir(tmp_path)
    machines = ("--prefill-device", "dgx-spark", "--decode-device", "m3-ultra", "--link-gbps", 10)
    sizes = ("--prompt-tokens", tokens, "--output-tokens", 256)
    assert run("bench", "predict", "-m", "shape:qwen3-next-80b", *machines, *sizes, "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["speedup_over_decode_alone"] == pytest.approx(faster, abs=0.01)
    assert result["disaggregated"]["exposed_s"] == pytest.approx(0.066, abs=0.001)
    assert result["crossover_prompt_tokens"] == pytest.approx(1500, rel=0.1)


def test_aliases_and_other_machines_work(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("-m", "qwen", "--prefill-device", "h100-sxm", "--decode-device", "m2-ultra", "--json")
    assert run("--config", SHIPPED, "bench", "predict", *options) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert (result["model"], result["prefill_device"]["name"]) == ("qwen3-coder:30b", "h100-sxm")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-m", "nothing"), "no model"),
        (("--prefill-device", "m9"), "unknown device 'm9'"),
        (("-m", "shape:nothing", "--prefill-device", "dgx-spark", "--decode-device", "m4-max"), "unknown model shape"),
        (("-m", "./nothing", "--prefill-device", "dgx-spark", "--decode-device", "m4-max"), "cannot be read"),
        (("-m", "shape:qwen3-8b"), "needs two machines"),
    ],
)
def test_what_cannot_be_planned_is_one_error(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert run("--config", SHIPPED, "bench", "predict", *options) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_fleet_that_says_too_little_is_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("--config", write_fleet(tmp_path), "bench", "predict") == 2
    assert "the hardware of prefill-1 is not stated" in capsys.readouterr().err


def test_a_split_is_predicted_beside_the_hand_off(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published pair of a DGX Spark and an M3 Ultra: 1.16 s and what fills the pipe, instead of 1.47."""
    monkeypatch.chdir(tmp_path)
    sizes = ("-m", "shape:llama-3.1-8b", "--prefill-device", "dgx-spark", "--decode-device", "m3-ultra")
    assert run("bench", "predict", *sizes, "--output-tokens", 32, "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    split, handoff = result["split"], result["disaggregated"]
    assert result["split_layers"] == 26
    assert split["prefill_s"] + split["tail_s"] == pytest.approx(1.27, abs=0.02)
    assert handoff["prefill_s"] == pytest.approx(1.47, abs=0.01)
    assert split["kv_bytes"] < handoff["kv_bytes"]
    assert run("bench", "predict", *sizes) == 0
    assert "dgx-spark computes 26 of 32 layers and sends 939 MB" in capsys.readouterr().out


def test_a_split_of_no_layer_or_of_all_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ("-m", "shape:llama-3.1-8b", "--prefill-device", "dgx-spark", "--decode-device", "m3-ultra")
    assert run("bench", "predict", *sizes, "--prompt-tokens", 500) == 0
    assert "dgx-spark computes all 32 layers, as in a hand-off" in capsys.readouterr().out
    assert run("bench", "predict", *sizes, "--link-gbps", 0.05) == 0
    assert "dgx-spark computes none of 32 layers" in capsys.readouterr().out
