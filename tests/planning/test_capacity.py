"""What bench predict finds in a hosts.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.cli.bench.predict import setups
from disagg.config import load
from disagg.errors import UsageError
from disagg.planning.capacity import Traffic, assess, hypothetical
from disagg.planning.sizing import is_size
from disagg.planning.times import Link

SHIPPED = Path(__file__).parents[2] / "hosts.toml"
LINK = Link(10.0)


def test_each_model_is_assessed_on_the_machines_that_serve_it() -> None:
    found = list(setups(load(SHIPPED), ["qwen3-coder:30b", "gpt-oss:120b"], LINK, None, None))
    pairs = [(name, setup.prefill_device.name, setup.decode_device.name) for name, setup, _ in found]
    assert pairs == [("qwen3-coder:30b", "dgx-spark", "m4-max"), ("gpt-oss:120b", "dgx-spark", "m3-ultra")]
    assert [(setup.chunk_tokens, context) for _, setup, context in found] == [(2048, 32768), (2048, 8192)]


def test_machines_of_one_kind_are_assessed_once(tmp_path: Path) -> None:
    text = SHIPPED.read_text().replace('model = "gpt-oss:120b"', 'model = "qwen3-coder:30b"')
    (tmp_path / "hosts.toml").write_text(text)
    fleet = load(tmp_path / "hosts.toml")
    assert len(list(setups(fleet, ["qwen3-coder:30b"], LINK, None, None))) == 2
    assert len(list(setups(fleet, ["qwen3-coder:30b"], LINK, None, "m2-ultra"))) == 1


def test_a_model_without_a_pair_is_an_error(tmp_path: Path) -> None:
    head, _, tail = SHIPPED.read_text().partition("[hosts.mac-studio-2]")
    (tmp_path / "hosts.toml").write_text(head)
    assert tail
    with pytest.raises(UsageError, match="no pair"):
        list(setups(load(tmp_path / "hosts.toml"), ["qwen3-coder:30b"], LINK, None, None))


def test_a_size_needs_no_fleet_but_machines() -> None:
    assert is_size("shape:x")
    assert is_size("./config.json")
    assert not is_size("qwen")
    name, setup, context = hypothetical("shape:llama-3.1-8b", LINK, "dgx-spark", "m3-ultra")
    assert (name, setup.shape.name, context) == ("shape:llama-3.1-8b", "llama-3.1-8b", 131072)
    with pytest.raises(UsageError, match="needs two machines"):
        hypothetical("shape:llama-3.1-8b", LINK, "dgx-spark", None)


def test_what_does_not_fit_is_named() -> None:
    name, setup, context = hypothetical("shape:gpt-oss-120b", LINK, "rtx-5090", "m3-ultra")
    found = assess(name, setup, Traffic(), context)
    assert found.crowded == ("rtx-5090 (63 of 32 GB)",)


def test_its_json_says_predicted_and_adds_up() -> None:
    body = assess(*hypothetical("shape:llama-3.1-8b", LINK, "dgx-spark", "m3-ultra")[:2], Traffic(8192, 32), 16384)
    found = body.to_json()
    assert found["predicted"] is True
    whole = found["disaggregated"]
    parts = ("overhead_s", "prefill_s", "exposed_s", "ingest_s", "decode_s")
    assert whole["total_s"] == pytest.approx(sum(whole[part] for part in parts))
    assert found["speedup_over_decode_alone"] == pytest.approx(2.8, rel=0.1)
