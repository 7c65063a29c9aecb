"""Hosts with the role gateway: they run no model and know all of the fleet."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.config import load, served_digest
from tests.config.conftest import ExpectFault
from tests.config.test_render import written

ORIGIN = 'scheme, host and, if it is not the usual one, port, in small letters, as in "https://chat.example.org"'
GATEWAY = '\n[hosts.front]\naddress = "10.0.0.2"\nroles = ["gateway"]\nport = 8080\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('«model» = "qwen:30b"', "model is for hosts that run a model"),
        ("«kv_port» = 9009", "kv_port is for hosts that run a model"),
        ('«engine» = {name = "mlx"}', "engine is for hosts that run a model"),
    ],
)
def test_a_gateway_has_no_model_and_no_engine(expect_fault: ExpectFault, line: str, message: str) -> None:
    text = 'engine.name = "mlx"\n'
    expect_fault({text: f"{text}{GATEWAY}{line}\n"}, message, "a gateway runs none: remove this line")


def test_the_first_key_that_a_gateway_cannot_have_is_the_one_that_is_named(expect_fault: ExpectFault) -> None:
    text = 'engine.name = "mlx"\n'
    lines = "\n".join(("«wired_limit_mb» = 9", 'model = "qwen:30b"', "kv_port = 9009", 'hardware = "dgx-spark"'))
    message = "wired_limit_mb is for hosts that run a model"
    expect_fault({text: f"{text}{GATEWAY}{lines}\n"}, message, "a gateway runs none: remove this line")


def test_a_gateway_survives_being_written_with_the_models_of_the_other_hosts(tmp_path: Path, fleet_text: str) -> None:
    (tmp_path / "hosts.toml").write_text(fleet_text + GATEWAY)
    fleet = load(tmp_path / "hosts.toml")
    copy = written(fleet, tmp_path)
    assert copy.hosts == fleet.hosts
    front = copy.hosts["front"]
    assert front.gateway and front.model == "" and front.url == "http://10.0.0.2:8080"
    assert [host.name for host in copy.engine_hosts] == ["spark", "mac"]
    assert served_digest(copy, front) == served_digest(fleet, front)


CERTIFICATE = 'tls_cert = "/etc/gateway.pem"\ntls_key = "~/gateway.key"\n'


@pytest.mark.parametrize(
    ("lines", "message", "hint"),
    [
        ('cors_origins = [«"chat.example.org"»]', '"chat.example.org" is not an origin', ORIGIN),
        ('cors_origins = [«"https://chat.example.org/"»]', '"https://chat.example.org/" is not an origin', ORIGIN),
        ('cors_origins = [«"https://Chat.example.org"»]', '"https://Chat.example.org" is not an origin', ORIGIN),
        (
            'cors_origins = ["*", «"https://a.org:443"»]',
            '"https://a.org:443" is not an origin',
            "browsers leave out this port",
        ),
        ('«tls_cert» = "/etc/gateway.pem"', "tls_cert needs tls_key", "name both, or none"),
        ('«tls_key» = "/etc/gateway.key"', "tls_key needs tls_cert", "name both, or none"),
        (
            'tls_cert = «"gateway.pem"»',
            "tls_cert is not an absolute path",
            "a file on the gateway's machine: begin with / or ~/",
        ),
        (CERTIFICATE + "«tls_self_signed» = true", "there is a certificate already: tls_cert", "remove one of the two"),
        ("keep_responses = «-1»", "keep_responses is out of range", "from 0 to 10000"),
    ],
)
def test_what_a_gateway_offers_its_clients_is_checked(
    expect_fault: ExpectFault, lines: str, message: str, hint: str
) -> None:
    text = 'engine.name = "mlx"\n'
    expect_fault({text: f"{text}{GATEWAY}{lines}\n"}, message, hint)


def test_only_gateways_have_clients(expect_fault: ExpectFault) -> None:
    text = 'engine.name = "mlx"\n'
    message = 'unknown key "cors_origins" in [hosts.mac]'
    expect_fault({text: f'{text}«cors_origins» = ["*"]\n'}, message, "this is a key of gateways, which clients ask")


@pytest.mark.parametrize(
    "more", [CERTIFICATE, "tls_self_signed = true\n", 'cors_origins = ["https://a.org", "app://b"]\n']
)
def test_what_a_gateway_offers_survives_being_written_and_makes_it_outdated(
    tmp_path: Path, fleet_text: str, more: str
) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(fleet_text + GATEWAY)
    before = load(path)
    path.write_text(fleet_text + GATEWAY + more + "keep_responses = 7\n")
    fleet = load(path)
    assert written(fleet, tmp_path).hosts == fleet.hosts and fleet.hosts["front"].settings.keep_responses == 7
    assert served_digest(fleet, fleet.hosts["front"]) != served_digest(before, before.hosts["front"])
    assert served_digest(fleet, fleet.hosts["mac"]) == served_digest(before, before.hosts["mac"])
    assert fleet.hosts["front"].url == f"http{'s' if 'tls' in more else ''}://10.0.0.2:8080"


def test_a_gateway_knows_the_default_model_and_reads_another_while_it_runs(tmp_path: Path, fleet_text: str) -> None:
    path, digests = tmp_path / "hosts.toml", set()
    for line in ("", 'default_model = "qwen"\n', 'default_model = "plain"\n'):
        path.write_text(fleet_text.replace('name = "lab"\n', f'name = "lab"\n{line}') + GATEWAY)
        fleet = load(path)
        digests.add(served_digest(fleet, fleet.hosts["front"]))
        served = fleet.default_model if "qwen" in line else None
        assert written(fleet, tmp_path).default_model == served, "only models that have hosts are written"
    assert fleet.default_model == "plain" and len(digests) == 1


def test_a_gateway_is_outdated_if_any_host_changes(tmp_path: Path, fleet_text: str) -> None:
    def digest(text: str) -> str:
        (tmp_path / "hosts.toml").write_text(text + GATEWAY)
        fleet = load(tmp_path / "hosts.toml")
        return served_digest(fleet, fleet.hosts["front"])

    before = digest(fleet_text)
    for word, another in (
        ("port = 8000", "port = 8010"),
        ('engine.name = "mlx"', 'engine = {name = "mlx", max_batch = 3}'),
    ):
        assert fleet_text.count(word) and digest(fleet_text.replace(word, another)) != before
