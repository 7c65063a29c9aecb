"""`python -m benchmarks.split_simulated`: a row of its table from metrics of requests."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.split_simulated import PAIRS, READ_AT_865, row, write_hosts
from disagg.api.layout import split_chunk
from disagg.config import load
from disagg.inference.metrics import TTFTParts
from disagg.planning.devices import DEVICES
from disagg.planning.sizing import read_size
from disagg.planning.times import prefill
from tests.cli.answers import metrics


def answer(seconds: float, **changed: Any) -> dict[str, Any]:
    parts = TTFTParts(prefill=seconds, first_step=0.2, ingest=0.1)
    return asdict(replace(metrics("model"), ttft=seconds + 0.3, ttft_parts=parts, layers=None, **changed))


def test_a_row_compares_the_medians_of_each_way_with_what_is_ideal() -> None:
    split = [with_layers(answer(seconds, method="disaggregated"), 26) for seconds in (1.3, 1.4, 9.0)]
    ways = {
        "split": split,
        "hand-off": [answer(1.5, method="disaggregated")],
        "decode alone": [answer(5.6, method="decode-alone")],
    }
    found = row("llama-3.1-8b", "shape:llama-3.1-8b", 10.0, 8192, ways)
    assert (found["layers"], found["ideal_layers"], found["chunk"]) == ([26], 26, split_chunk(8192))
    assert found["split"] == pytest.approx(1.4)
    assert 1.2 < found["both"] <= found["ideal"] < 1.4
    assert found["split_over_ideal"] == pytest.approx(1.4 / found["ideal"])
    assert found["split_over_better"] == pytest.approx(1.4 / 1.5)


def test_a_split_that_was_none_counts_all_layers_or_no_layer() -> None:
    ways = {
        "split": [answer(1.0, method="disaggregated"), answer(1.0, method="local")],
        "hand-off": [answer(1.0, method="disaggregated")],
    }
    assert row("llama-3.1-8b", "shape:llama-3.1-8b", 10.0, 2048, ways)["layers"] == [0, 32]


def test_the_published_pair_is_read_at_its_published_speeds(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(READ_AT_865))
    size = read_size(str(path))
    speeds = [32768 / prefill(DEVICES[name], size, 32768, "bfloat16", 2048).seconds for name in ("dgx-spark", "m5-max")]
    assert speeds == [pytest.approx(865, rel=0.01), pytest.approx(557, rel=0.01)]


@pytest.mark.parametrize("name", PAIRS)
def test_every_pair_is_a_fleet_that_can_be_read(tmp_path: Path, name: str) -> None:
    fleet = load(write_hosts(tmp_path, PAIRS[name], None, layers=24))
    assert fleet.hosts["decode"].engine.split == 24
    assert {host.hardware for host in fleet.hosts.values()} == {PAIRS[name].prefill, PAIRS[name].decode}


def with_layers(one: dict[str, Any], layers: int) -> dict[str, Any]:
    return {**one, "layers": layers}
