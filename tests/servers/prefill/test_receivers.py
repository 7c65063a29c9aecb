"""disagg/servers/prefill/delivery.py: to whom KV may go."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.api.requests import KVAddress
from disagg.config import load
from disagg.errors import RequestError
from disagg.servers.prefill.delivery import Receivers

MODELS = "".join(f'[models.{name}]\ncontext = 64\nsources = {{simulated = "shape:qwen3-8b"}}\n' for name in "ab")
HOST = """[hosts.{name}]
address = "127.0.0.1"
port = {port}
roles = ["{role}"]
connector = "local"
service = "process"
hardware = "m3-ultra"
engine = {{name = "simulated"}}
"""


def hosts(prefill: str, decode: str) -> str:
    """A prefill host and a decode host, with these models each."""
    return (
        f'[fleet]\nname = "t"\n{MODELS}'
        f"{HOST.format(name='p', port=8000, role='prefill')}{prefill}\n"
        f"{HOST.format(name='d', port=8001, role='decode')}{decode}\n"
    )


SEVERAL = 'models = ["a"]\nports = "8200-8207"'
"""Of the prefill host."""


def test_kv_may_go_to_a_host_whose_list_has_the_model_since_this_process_runs(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(hosts(SEVERAL, 'models = ["b"]\nports = "8100-8107"'))
    fleet = load(path)
    receivers = Receivers(fleet, fleet.served["p/a"])
    there = KVAddress("127.0.0.1", 8103)
    with pytest.raises(RequestError, match=r"127.0.0.1:8103 is no decode host of a"):
        receivers.require(there)
    path.write_text("models = 1")
    with pytest.raises(RequestError, match="is no decode host of a"):
        receivers.require(there)
    path.write_text(hosts(SEVERAL, 'models = ["b", "a"]\nports = "8100-8107"'))
    receivers.require(there)
    for port in (8001, 8099, 8108, 8203):
        with pytest.raises(RequestError, match=f"127.0.0.1:{port} is no decode host of a"):
            receivers.require(KVAddress("127.0.0.1", port))


def test_a_host_with_one_model_goes_by_the_hosts_toml_of_its_start(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(hosts('model = "a"', 'model = "a"\nkv_port = 9001'))
    fleet = load(path)
    receivers = Receivers(fleet, fleet.served["p"])
    receivers.require(KVAddress("127.0.0.1", 9001))
    path.write_text(hosts('model = "a"', 'model = "a"\nkv_port = 9002'))
    with pytest.raises(RequestError, match=r"127.0.0.1:9002 is no decode host"):
        receivers.require(KVAddress("127.0.0.1", 9002))
