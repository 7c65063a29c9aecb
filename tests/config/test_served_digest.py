from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.config import EngineOptions, Fleet, Host, Model, load, served_digest
from disagg.config.render import render

HOST = Host("a", "10.0.0.1", ("prefill",), "m", EngineOptions("transformers"), 8000)


def fleet(host: Host = HOST, **model: Any) -> Fleet:
    return Fleet(
        "f", Path("hosts.toml"), {"m": replace(Model("m", {"transformers": "o/m"}, 100), **model)}, {"a": host}
    )


def test_a_hosts_own_file_has_the_same_digest(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(render(fleet(), ["a"], {"m": {"transformers": "/home/x/m"}}))
    there = load(path)
    assert served_digest(there, there.hosts["a"]) == served_digest(fleet(), HOST)


@pytest.mark.parametrize(
    "change", [{"port": 8001}, {"queue_size": 1}, {"engine": EngineOptions("transformers", threads=2)}]
)
def test_what_the_server_heeds_changes_it(change: dict[str, Any]) -> None:
    changed = replace(HOST, **change)
    assert served_digest(fleet(changed), changed) != served_digest(fleet(), HOST)
    assert served_digest(fleet(context=50), HOST) != served_digest(fleet(), HOST)


def test_how_a_machine_is_reached_does_not(tmp_path: Path) -> None:
    changed = replace(HOST, user="x", ssh_port=23, key="/k", python="/p")
    assert served_digest(fleet(changed), changed) == served_digest(fleet(), HOST)
