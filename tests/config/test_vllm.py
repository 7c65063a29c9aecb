"""hosts.toml for hosts that prefill with vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.config import EngineOptions, load
from disagg.config.render import render
from tests.config.conftest import FLEET, ExpectFault

SPARK_ENGINE = 'name = "transformers"'
SOURCES = 'sources = {transformers = "Qwen/Qwen"'
VLLM = 'name = "vllm"'
WITH_SOURCE = {SOURCES: 'sources = {vllm = "Qwen/Qwen-FP8"'}


def test_every_option_of_vllm_arrives_in_the_host_and_in_its_own_hosts_toml(tmp_path: Path) -> None:
    options = f"""\
{VLLM}
dtype = "float16"
device = "cuda"
chunk_tokens = 4096
threads = 3
kv_wire = "auto"
kv_cache_memory_bytes = 17_179_869_184
enforce_eager = true"""
    text = FLEET.replace(SOURCES, WITH_SOURCE[SOURCES]).replace(SPARK_ENGINE, options)
    text = text.replace('engine.name = "mlx"', 'engine = {name = "mlx", dtype = "float16"}')
    (tmp_path / "hosts.toml").write_text(text)
    fleet = load(tmp_path / "hosts.toml")
    engine = fleet.hosts["spark"].engine
    assert engine == EngineOptions(
        "vllm",
        dtype="float16",
        device="cuda",
        chunk_tokens=4096,
        threads=3,
        kv_wire="auto",
        kv_cache_memory_bytes=16 << 30,
        enforce_eager=True,
    )
    (tmp_path / "own.toml").write_text(render(fleet, ["spark"], {"qwen:30b": {"vllm": "Qwen/Qwen-FP8"}}))
    assert load(tmp_path / "own.toml").hosts["spark"].engine == engine


@pytest.mark.parametrize(
    ("option", "message", "hint"),
    [
        (
            '«quantization» = "int8"',
            'unknown key "quantization" in [hosts.spark.engine]',
            'this is an option of the engine "transformers"',
        ),
        (
            "kv_cache_memory_bytes = «3»",
            "kv_cache_memory_bytes is out of range",
            f"from {1 << 20} to {1 << 50}",
        ),
        ('device = «"mps"»', '"mps" is not a value for device', 'one of "auto", "cuda", "cpu"'),
    ],
)
def test_what_vllm_cannot_do_is_pointed_at(expect_fault: ExpectFault, option: str, message: str, hint: str) -> None:
    expect_fault({**WITH_SOURCE, SPARK_ENGINE: f"{VLLM}\n{option}"}, message, hint)


def test_a_model_without_a_vllm_source_is_pointed_at(expect_fault: ExpectFault) -> None:
    expect_fault(
        {SPARK_ENGINE: VLLM, '[hosts.spark]\naddress = "10.0.0.1"\nroles = ["prefill"]\nmodel = "qwen:30b"':
            '[hosts.spark]\naddress = "10.0.0.1"\nroles = ["prefill"]\nmodel = «"qwen:30b"»'},
        'model "qwen:30b" has no source for the engine "vllm" of this host',
        'add vllm = "owner/model" to [models."qwen:30b".sources]',
    )  # fmt: skip
