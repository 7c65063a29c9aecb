"""What `render` writes loads as the same fleet."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from disagg.config import EngineOptions, Fleet, Host, Model, load, served_digest
from disagg.config.render import render

HOSTILE = ["a b", "it's", 'say "hi"', "; rm -rf ~", "$(id) `id` ${HOME}", "back\\slash", "é ☃", "#no", "]["]


def written(fleet: Fleet, folder: Path, hosts: list[str] | None = None) -> Fleet:
    path = folder / "copy.toml"
    sources: dict[str, Any] = {model.name: model.sources for model in fleet.models.values()}
    path.write_text(render(fleet, hosts or list(fleet.hosts), sources), encoding="utf-8")
    return load(path)


def test_every_kept_field_survives(tmp_path: Path, fleet_text: str) -> None:
    (tmp_path / "hosts.toml").write_text(fleet_text)
    fleet = load(tmp_path / "hosts.toml")
    mac = replace(
        fleet.hosts["mac"],
        data_address="10.9.0.2",
        service="launchd",
        connector="local",
        queue_size=7,
        engine=EngineOptions(
            "mlx", dtype="float32", device="gpu", threads=3, max_batch=2, max_kv_bytes=1 << 33, kv_audit=4
        ),
    )
    spark = replace(fleet.hosts["spark"], engine=EngineOptions("transformers", dtype="float32"))
    fleet = replace(fleet, hosts={"spark": spark, "mac": mac})
    copy = written(fleet, tmp_path)
    assert copy.hosts == fleet.hosts
    assert {name: m.aliases for name, m in copy.models.items()} == {"qwen:30b": ("qwen",)}, "only served models"


OPTIONS = {
    "transformers": """kv_wire = "int8"
        attention = "sdpa"
        quantization = "int8"
        chunk_tokens = 512
        threads = 2
        device = "cuda:1"
        max_held_bytes = 0
        layers = "0:24\"""",
    "vllm": """kv_wire = "auto"
        kv_cache_memory_bytes = 1_073_741_824
        enforce_eager = true
        tensor_parallel = 2
        pipeline_parallel = 2""",
    "vllm-server": """kv_wire = "int8"
        url = "http://127.0.0.1:8100"
        model = "their"
        key_file = "~/key\"""",
    "mlx": """dtype = "float16"
        max_batch = 2
        max_kv_bytes = 1_073_741_824
        split = 24
        kv_audit = "always"
        kv_audit_tolerance = 2.5""",
}
"""Every option that a host's engine may have alone, with another value than the default."""


@pytest.mark.parametrize("engine", OPTIONS)
def test_a_host_reads_the_options_that_its_fleet_has(tmp_path: Path, engine: str) -> None:
    role, port = ("decode", "kv_port = 9001") if engine == "mlx" else ("prefill", "")
    (tmp_path / "hosts.toml").write_text(
        f"""
        [fleet]
        name = "lab"
        [models.m]
        context = 64
        sources = {{{engine} = "owner/m"}}
        [hosts.a]
        address = "10.0.0.1"
        roles = ["{role}"]
        model = "m"
        port = 8000
        {port}
        [hosts.a.engine]
        name = "{engine}"
        {OPTIONS[engine]}
        """
    )
    fleet = load(tmp_path / "hosts.toml")
    copy = written(fleet, tmp_path)
    assert copy.hosts == fleet.hosts
    assert served_digest(copy, copy.hosts["a"]) == served_digest(fleet, fleet.hosts["a"])


def test_every_option_of_an_engine_is_tested_above() -> None:
    alone = {field.name for field in fields(EngineOptions)} - {"name", "nnodes", "node_rank", "head_address"}
    tested = {line.split(" = ")[0].strip() for text in OPTIONS.values() for line in text.splitlines()}
    assert tested == alone - {"key_variable"}  # hosts with a service manager have key_file


def test_what_only_the_deploying_machine_needs_stays_here(tmp_path: Path, fleet_text: str) -> None:
    (tmp_path / "hosts.toml").write_text(fleet_text)
    fleet = load(tmp_path / "hosts.toml")
    spark = replace(fleet.hosts["spark"], python="/opt/python", site_packages=True)
    copy = written(replace(fleet, hosts={"spark": spark}), tmp_path)
    assert copy.hosts == {"spark": replace(spark, python=None, site_packages=False)}


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_strings_come_back_as_they_were(tmp_path: Path, text: str) -> None:
    model = Model(text, {"mlx": f"/models/{text}"}, 64, (f"{text}2",))
    host = Host("h", "10.0.0.1", ("decode",), text, EngineOptions("mlx"), 8000, kv_port=9000)
    copy = written(Fleet("f", tmp_path / "hosts.toml", {text: model}, {"h": host}), tmp_path)
    assert copy.hosts["h"].model == text
    assert copy.models[text].sources == model.sources
    assert copy.models[text].aliases == model.aliases
