"""What `render` writes loads as the same fleet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.config import EngineOptions, Fleet, Host, Model, load
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
