"""`python -m benchmarks.full_size`: what is read out of a trace of a GPU, and a run on a CPU."""

from __future__ import annotations

import json
from multiprocessing import dummy
from pathlib import Path
from typing import Any

import pytest

from benchmarks import full_size

TINY = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def event(kind: str, name: str, stream: int, begin: float, end: float, nbytes: int = 0) -> dict[str, Any]:
    args = {"stream": stream, "bytes": nbytes}
    return {"cat": kind, "name": name, "ts": begin, "dur": end - begin, "args": args}


def test_the_share_of_copies_beside_kernels_counts_no_moment_twice() -> None:
    found = full_size.copies_in(
        [
            event("kernel", "gemm", 7, 0, 100),
            event("kernel", "norm", 7, 50, 120),
            event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 7, 120, 130, 64),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 13, 100, 140, 400_000),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 7, 200, 240, 400_000),
            event("cpu_op", "aten::mm", 0, 0, 1),
        ]
    )
    assert (found["copies"], found["to_pinned"]) == (2, 1)
    assert (found["gb_s"], found["share_beside_kernels"]) == (10.0, 0.25)
    assert (found["streams"], found["streams_of_kernels"]) == ([7, 13], [7])


def test_every_way_is_measured_and_the_memory_that_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY), "utf-8")
    arguments = ["--device", "cpu", "--dtype", "float32", "--rounds", "1", "--tokens", "64", "--chunk", "32"]
    monkeypatch.setattr("sys.argv", ["full_size", "--shape", str(tmp_path / "config.json"), *arguments])
    monkeypatch.setattr("multiprocessing.get_context", lambda method: dummy)  # a process would import all again
    full_size.main()
    found = json.loads(capsys.readouterr().out)
    prompt = found["prompts"]["64"]
    assert set(prompt["tokens_per_s"]) == {"bare", "engine", "sent"} and all(prompt["tokens_per_s"].values())
    assert 0 <= prompt["sent"]["hidden_share"] <= 1
    assert prompt["sent"]["kv_gb"] == pytest.approx(64 * 2 * 2 * 2 * 16 * 4 / 1e9, abs=1e-4)
    assert found["memory"]["planned"]["weights"] == pytest.approx(found["memory"]["weights"], rel=0.02)
