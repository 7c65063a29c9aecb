"""Hosts with the role whole: servers of OpenAI's API that disagg asks and does not manage."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from disagg.config import load, served_digest
from disagg.errors import ConfigError, UsageError
from tests.config.test_render import written

HEAD = '[fleet]\nname = "lab"\n[models.m]\ncontext = 4096\n'
HOST = '[hosts.mini]\nroles = ["whole"]\nmodel = "m"\n'


def test_a_whole_host_needs_a_url_only_and_its_model_no_source(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(f'{HEAD}{HOST}engine = {{name = "openai", url = "https://api.example/v1/"}}\n')
    fleet = load(path)
    host = fleet.hosts["mini"]
    assert (host.url, host.address, host.port) == ("https://api.example/v1", "api.example", 443)
    assert (host.engine.model, host.whole, fleet.engine_hosts, fleet.answering_hosts) == ("m", True, [], [host])
    copy = written(fleet, tmp_path)
    assert copy.hosts == fleet.hosts and served_digest(copy, host) == served_digest(fleet, host)


@pytest.mark.parametrize(("connector", "refused"), [("ssh", True), ("local", False)])
def test_a_deployed_gateway_has_no_variable_with_the_key(tmp_path: Path, connector: str, refused: bool) -> None:
    path = tmp_path / "hosts.toml"
    gateway = f'[hosts.gate]\nroles = ["gateway"]\naddress = "10.0.0.1"\nport = 8080\nconnector = "{connector}"\n'
    engine = 'engine = {name = "openai", url = "http://10.0.0.9:11434/v1", key_variable = "OTHER_KEY"}\n'
    path.write_text(f"{HEAD}{HOST}{engine}{gateway}")
    with pytest.raises(ConfigError, match="gate has no such variable") if refused else nullcontext():
        assert load(path).hosts["mini"].engine.key_variable == "OTHER_KEY"


def test_commands_that_need_its_machine_name_it(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(f'{HEAD}{HOST}engine = {{name = "openai", url = "http://10.0.0.9:11434/v1"}}\n')
    with pytest.raises(UsageError, match="disagg asks this server and does not manage it"):
        load(path).select(["mini"], managed=True)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('engine = {name = "openai"}', 'missing key "url"'),
        ('engine = {name = "mlx", url = "http://h/v1"}', 'the engine "mlx" cannot answer whole requests'),
        ('engine = {name = "openai", url = "ftp://h"}', "this is not a URL"),
        ('engine = {name = "openai", url = "http://key@h"}', "a password does not belong in this file"),
        ('engine = {name = "openai", url = "http://h/v1?key=1"}', "this URL has a query"),
        ('engine = {name = "openai", url = "http://h", key_file = "key"}', "key_file is not an absolute path"),
        ('engine = {name = "openai", url = "http://h", key_variable = "sk-1"}', "is not the name of an environment"),
        ('engine = {name = "openai", url = "http://h"}\nport = 8000', "port is for servers of disagg"),
    ],
)
def test_what_a_whole_host_cannot_have_is_pointed_at(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(f"{HEAD}{HOST}{lines}\n")
    with pytest.raises(ConfigError, match=message):
        load(path)
